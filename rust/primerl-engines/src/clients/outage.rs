//! Whether a server that is asked answers at all. Time is passed in.

use parking_lot::Mutex;
use std::fmt::Display;
use std::time::{Duration, Instant};

/// Somebody else who asks within this time goes on waiting for those who have given up.
const SAME_WAIT: Duration = Duration::from_secs(60);

/// A server that nothing goes on without has answered nobody for too long.
#[derive(Debug, thiserror::Error)]
#[error("{name}: {problem}; see {table}")]
pub struct Unanswered {
    name: String,
    problem: String,
    /// Of the config.
    table: String,
}

/// Of one server, over all requests to it.
#[derive(Debug, Default)]
pub struct Outage(Mutex<State>);

/// Held for a few instructions.
#[derive(Debug, Default)]
struct State {
    pending: usize,
    /// Of the last answer, or of the first request since nobody was waiting for one.
    since: Option<Instant>,
    /// How long those waited in vain who had given up before that, and when they did.
    before: Duration,
    given_up: Option<Instant>,
    /// What a request last failed with since the last answer.
    last: Option<String>,
    /// Requests that were not let in since the last answer.
    shut_out: u32,
    news: News,
}

/// Many requests fail together: one of them is told of.
#[derive(Debug, Default)]
pub struct News {
    told: Option<Instant>,
}

/// Somebody waits for an answer, until this is dropped.
#[derive(Debug)]
pub struct Pending<'a>(&'a Outage);

impl State {
    fn silence(&self, now: Instant) -> Duration {
        let since = |at: Instant| now.saturating_duration_since(at);
        self.before + self.since.map_or(Duration::ZERO, since)
    }
}

impl Outage {
    pub fn begin(&self, now: Instant) -> Pending<'_> {
        let mut state = self.0.lock();
        state.pending += 1;
        if state.since.is_none() {
            state.since = Some(now);
            let apart = state.given_up.map(|at| now.saturating_duration_since(at));
            if apart.is_none_or(|apart| apart > SAME_WAIT) {
                state.before = Duration::ZERO;
                state.last = None;
            }
        }
        Pending(self)
    }

    /// Whether a failure should be told of: not again within `repeat`, unless there was an answer since.
    pub fn is_news(&self, now: Instant, repeat: Duration) -> bool {
        self.0.lock().news.is_due(now, repeat)
    }

    /// A request failed, and that is no answer.
    pub fn failed(&self, error: &dyn Display) {
        self.0.lock().last = Some(error.to_string());
    }

    fn end(&self, now: Instant) {
        let mut state = self.0.lock();
        state.pending -= 1;
        if state.pending == 0 {
            // What was told is not told again because others ask now.
            state.before = state.silence(now);
            state.since = None;
            state.given_up = Some(now);
        }
    }
}

impl News {
    /// Whether it is to be told now: not again within `repeat`, unless it was over meanwhile.
    pub fn is_due(&mut self, now: Instant, repeat: Duration) -> bool {
        let is_due = self
            .told
            .is_none_or(|told| now.saturating_duration_since(told) >= repeat);
        if is_due {
            self.told = Some(now);
        }
        is_due
    }

    /// What comes next is told at once.
    pub fn is_over(&mut self) {
        self.told = None;
    }
}

impl Pending<'_> {
    /// The server said something that can be used, or that no is its answer.
    pub fn answered(&self, now: Instant) {
        let mut state = self.0.0.lock();
        state.since = Some(now);
        state.before = Duration::ZERO;
        state.last = None;
        state.shut_out = 0;
        state.news.is_over();
    }

    /// [`Outage::failed`]
    pub fn failed(&self, error: &dyn Display) {
        self.0.failed(error);
    }

    /// So many requests in a row were not let in, with this one.
    pub fn shut_out(&self) -> u32 {
        let mut state = self.0.0.lock();
        state.shut_out = state.shut_out.saturating_add(1);
        state.shut_out
    }

    /// For how long it has not answered anybody who waits.
    pub fn silence(&self, now: Instant) -> Duration {
        self.0.0.lock().silence(now)
    }

    /// What a request last failed with, if there was no answer since.
    pub fn last(&self) -> Option<String> {
        self.0.0.lock().last.clone()
    }

    /// [`Outage::is_news`]
    pub fn is_news(&self, now: Instant, repeat: Duration) -> bool {
        self.0.is_news(now, repeat)
    }

    /// What ends the run, of a server that has answered nobody for longer than `limit`; `table` of the config names it, and
    /// `last` is what it failed with.
    pub fn given_up(
        &self,
        now: Instant,
        limit: Duration,
        name: String,
        table: &str,
        last: &dyn Display,
    ) -> Option<Unanswered> {
        let silence = self.silence(now);
        let seconds = silence.as_secs_f64();
        (silence > limit).then(|| Unanswered {
            name,
            problem: format!("it has not answered for {seconds:.0} s; last: {last}"),
            table: table.to_owned(),
        })
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.0.end(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clients::EndpointError;

    #[test]
    fn silence_is_of_those_who_wait_and_ends_with_an_answer() {
        let (outage, began) = (Outage::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let minute = Duration::from_secs(60);
        let first = outage.begin(began);
        let second = outage.begin(at(30));
        assert_eq!(second.silence(at(40)), Duration::from_secs(40));
        assert!(first.is_news(at(40), minute) && !second.is_news(at(99), minute));
        assert!(first.is_news(at(100), minute));
        let error = EndpointError::Transport("refused".into());
        let given_up =
            |now| second.given_up(now, minute, "the teacher".into(), "teacher.client", &error);
        assert!(given_up(at(60)).is_none());
        let said = given_up(at(61)).expect("is too long").to_string();
        assert!(
            said.contains("the teacher: it has not answered for 61 s; last: no answer: refused")
        );
        second.answered(at(70));
        assert_eq!(first.silence(at(75)), Duration::from_secs(5));
        assert!(outage.is_news(at(75), minute) && !outage.is_news(at(76), minute));
        drop((first, second));
        assert!(!outage.begin(at(80)).is_news(at(81), minute));
        // Nobody waited meanwhile.
        let third = outage.begin(at(500));
        assert_eq!(third.silence(at(501)), Duration::from_secs(1));
    }

    #[test]
    fn those_who_give_up_have_waited_for_those_who_ask_next() {
        let (outage, began) = (Outage::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        let ends = |pending: Pending<'_>, seconds| {
            std::mem::forget(pending);
            outage.end(at(seconds));
        };
        let first = outage.begin(began);
        first.failed(&"refused");
        ends(first, 19);
        let second = outage.begin(at(21));
        assert_eq!(second.silence(at(40)), Duration::from_secs(38));
        assert_eq!(second.last().as_deref(), Some("refused"));
        ends(second, 40);
        let third = outage.begin(at(40));
        third.answered(at(50));
        assert_eq!(
            (third.silence(at(53)), third.last()),
            (Duration::from_secs(3), None)
        );
        ends(third, 53);
        // It was not asked for anything for a while, and may be another one by now.
        let fourth = outage.begin(at(200));
        assert_eq!(fourth.silence(at(201)), Duration::from_secs(1));
    }

    #[test]
    fn requests_that_are_not_let_in_are_counted_until_one_is() {
        let (outage, began) = (Outage::default(), Instant::now());
        let (first, second) = (outage.begin(began), outage.begin(began));
        assert_eq!(
            (first.shut_out(), second.shut_out(), first.shut_out()),
            (1, 2, 3)
        );
        second.answered(began);
        assert_eq!(first.shut_out(), 1);
    }
}
