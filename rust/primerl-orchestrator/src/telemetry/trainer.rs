//! How long the trainer waits for batches.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Written by the trainer's endpoints; with several ranks, the first request and the first answer count.
#[derive(Debug, Default)]
pub struct TrainerClock(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    first_asked: Option<Instant>,
    waiting_since: Option<Instant>,
    waited: Duration,
    ended: Option<Instant>,
    last_seen: Option<Instant>,
    /// It has sent a heartbeat, and has not said goodbye: silence means that it hangs or is dead.
    beats: bool,
    doing: String,
    /// Its launcher starts it again, and it has not begun yet.
    starting: Option<Starting>,
}

#[derive(Clone, Debug)]
struct Starting {
    since: Instant,
    within: Duration,
    why: String,
}

/// How a trainer is overdue.
#[derive(Debug, PartialEq)]
pub enum Overdue {
    /// It fell silent.
    Silent { silent: Duration, doing: String },
    /// It was started again, and sent nothing within the time that a start may take.
    NotBack { within: Duration, why: String },
}

impl TrainerClock {
    /// A rank asks; repeated requests for the same batch are one wait.
    pub fn asked(&self) {
        let mut state = self.0.lock();
        let now = Instant::now();
        state.last_seen = Some(now);
        state.first_asked.get_or_insert(now);
        state.waiting_since.get_or_insert(now);
    }

    pub fn answered(&self) {
        let mut state = self.0.lock();
        let now = Instant::now();
        state.last_seen = Some(now);
        if let Some(since) = state.waiting_since.take() {
            state.waited += now - since;
        }
    }

    /// The trainer knows that there are no more batches: waiting for the end of the run is not idling.
    pub fn ended(&self) {
        let mut state = self.0.lock();
        state.waiting_since = None;
        state.ended.get_or_insert_with(Instant::now);
    }

    pub fn heard(&self) {
        self.0.lock().last_seen = Some(Instant::now());
    }

    pub fn beat(&self, doing: String, leaving: bool) {
        let mut state = self.0.lock();
        state.last_seen = Some(Instant::now());
        state.beats = !leaving;
        state.doing = doing;
        state.starting = None;
    }

    /// The launcher starts the trainer again, because it ended by `why`: the deadlines of the earlier one do not apply
    /// until the new one begins or `within` has passed.
    pub fn is_started(&self, within: Duration, why: String) {
        let mut state = self.0.lock();
        state.beats = false;
        // The one that has ended asks for no batch any more.
        if let Some(since) = state.waiting_since.take() {
            state.waited += since.elapsed();
        }
        state.doing = "starting again".to_owned();
        state.starting = Some(Starting {
            since: Instant::now(),
            within,
            why,
        });
    }

    /// This process was itself suspended for so long: it could not receive heartbeats.
    pub fn postpone(&self, by: Duration) {
        let mut state = self.0.lock();
        state.last_seen = Some(Instant::now());
        if let Some(starting) = &mut state.starting {
            starting.since += by;
        }
    }

    /// Whether it has been silent for too long.
    pub fn overdue(&self, patience: Duration) -> Option<Overdue> {
        if let Some(silent) = self.silent_for().filter(|silent| *silent > patience) {
            let doing = self.doing();
            return Some(Overdue::Silent { silent, doing });
        }
        let starting = self.0.lock().starting.clone()?;
        let Starting { since, within, why } = starting;
        (since.elapsed() > within).then_some(Overdue::NotBack { within, why })
    }

    /// For how long a trainer that should send heartbeats has been silent. A custom training loop need not send any.
    pub fn silent_for(&self) -> Option<Duration> {
        let state = self.0.lock();
        state
            .last_seen
            .filter(|_| state.beats)
            .map(|seen| seen.elapsed())
    }

    pub fn doing(&self) -> String {
        self.0.lock().doing.clone()
    }

    pub fn last_seen(&self) -> Option<Duration> {
        self.0.lock().last_seen.map(|seen| seen.elapsed())
    }

    pub fn is_waiting(&self) -> bool {
        self.0.lock().waiting_since.is_some()
    }

    /// Seconds waited since the first request.
    pub fn waited(&self) -> Duration {
        let state = self.0.lock();
        state.waited
            + state
                .waiting_since
                .map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Share of the time since the first request in which it waited.
    pub fn idle_share(&self) -> Option<f64> {
        let (first, ended) = {
            let state = self.0.lock();
            (state.first_asked?, state.ended)
        };
        let total = ended
            .unwrap_or_else(Instant::now)
            .duration_since(first)
            .as_secs_f64();
        (total > 0.0).then(|| (self.waited().as_secs_f64() / total).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_trainer_that_beats_can_fall_silent() {
        let trainer = TrainerClock::default();
        trainer.asked();
        assert_eq!(
            trainer.silent_for(),
            None,
            "a loop of one's own sends no heartbeats"
        );
        trainer.beat("optimizer".into(), false);
        assert!(trainer.silent_for().is_some());
        trainer.beat("finished".into(), true);
        assert_eq!(trainer.silent_for(), None, "it said goodbye");
    }

    #[test]
    fn a_restarted_trainer_has_the_time_of_a_start() {
        let (trainer, none) = (TrainerClock::default(), Duration::ZERO);
        trainer.beat("optimizer".into(), false);
        assert!(matches!(
            trainer.overdue(none),
            Some(Overdue::Silent { .. })
        ));
        let why = || "was killed by SIGKILL".to_owned();
        trainer.is_started(Duration::from_secs(600), why());
        assert_eq!(trainer.overdue(none), None, "it may still be importing");
        trainer.is_started(none, why());
        let late = std::iter::repeat_with(|| trainer.overdue(none)).find_map(|late| late);
        assert_eq!(
            late,
            Some(Overdue::NotBack {
                within: none,
                why: why()
            })
        );
        trainer.beat("loading the model".into(), false);
        assert_eq!(trainer.overdue(Duration::from_secs(600)), None);
    }
}
