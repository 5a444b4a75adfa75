//! One server of the teacher: its requests, and why it gets none.

use super::health::Health;
use parking_lot::Mutex;
use primerl_engines::clients::{EndpointError, News, Scorer};
use std::time::{Duration, Instant};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

#[derive(Debug)]
pub(super) struct Member {
    pub scorer: Scorer,
    /// Held for a few instructions, by requests and by its own task.
    pub state: Mutex<State>,
    /// Something failed: check it now.
    pub suspect: Notify,
}

#[derive(Debug)]
pub(super) struct State {
    pub health: Health,
    /// Cancelled when it is taken out: its requests go to other servers at once.
    pub lost: CancellationToken,
    /// Its last failure.
    pub last: Option<String>,
    pub news: News,
    /// Its context length, to be compared with the longest sample once that is known.
    pub room: Option<u32>,
}

impl Member {
    pub fn new(scorer: Scorer) -> Member {
        let health = Health::new(scorer.timeout());
        Member {
            scorer,
            state: Mutex::new(State {
                health,
                lost: CancellationToken::new(),
                last: None,
                news: News::default(),
                room: None,
            }),
            suspect: Notify::new(),
        }
    }

    /// A place on it, if it may get requests and has fewer than `most`.
    pub fn take(&self, most: usize) -> Option<Place<'_>> {
        let mut state = self.state.lock();
        if !state.health.is_well() || state.health.running >= most {
            return None;
        }
        state.health.begin(Instant::now());
        let lost = state.lost.clone();
        Some(Place { member: self, lost })
    }

    /// It gets no requests, and its current ones end now.
    pub fn take_out(&self, why: &str) {
        let mut state = self.state.lock();
        state.health.take_out();
        self.cut_off(&mut state, why);
    }

    /// It is not the run's teacher.
    pub fn refuse(&self, problem: String) {
        let mut state = self.state.lock();
        state.health.take_out();
        state.last = Some(problem);
        std::mem::take(&mut state.lost).cancel();
    }

    /// A request failed, or reached a server that is not the run's teacher.
    pub fn request_failed(&self, error: &EndpointError) {
        if matches!(error, EndpointError::Status { status, .. } if *status < 500)
            && !is_another(error)
        {
            // The server is overloaded.
            self.state.lock().last = Some(error.to_string());
            return;
        }
        let mut state = self.state.lock();
        let was_out = state.health.is_out();
        state.last = Some(error.to_string());
        state.health.request_failed();
        if is_another(error) {
            state.health.take_out();
        }
        if state.health.is_out() && !was_out {
            self.cut_off(&mut state, &error.to_string());
        }
        drop(state);
        self.suspect.notify_one();
    }

    pub fn look_failed(&self, why: &str) {
        let mut state = self.state.lock();
        let was_out = state.health.is_out();
        state.health.look_failed();
        match state.health.is_out() && !was_out {
            true => self.cut_off(&mut state, why),
            false => state.last = Some(why.to_owned()),
        }
    }

    fn cut_off(&self, state: &mut State, why: &str) {
        let lost = std::mem::take(&mut state.lost);
        let moved = state.health.running;
        state.last = Some(why.to_owned());
        tracing::warn!(
            why,
            moved,
            "{} gets no requests until it answers again; the other servers get them",
            self.scorer.describe()
        );
        lost.cancel();
    }

    /// Whether to report a failure now.
    pub fn is_news(&self, repeat: Duration) -> bool {
        self.state.lock().news.is_due(Instant::now(), repeat)
    }
}

/// Its model or its key differs from when it was proved: it may have been restarted.
pub(super) fn is_another(error: &EndpointError) -> bool {
    matches!(error, EndpointError::Status { status, .. } if matches!(status, 401 | 403 | 404 | 405))
}

/// A request's place on a member.
pub(super) struct Place<'a> {
    pub member: &'a Member,
    pub lost: CancellationToken,
}

impl Place<'_> {
    pub fn answered(&self) {
        self.member.state.lock().health.answered(Instant::now());
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.member.state.lock().health.ended();
    }
}
