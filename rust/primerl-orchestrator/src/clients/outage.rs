//! Whether a server that is asked answers at all.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// Of one server, over all requests to it.
#[derive(Debug, Default)]
pub struct Outage(Mutex<State>);

/// Held for a few instructions.
#[derive(Debug, Default)]
struct State {
    pending: usize,
    /// Of the last answer, or of the first request since nobody was waiting for one.
    since: Option<Instant>,
    /// Many requests fail together: one of them is told of.
    told: Option<Instant>,
}

/// Somebody waits for an answer, until this is dropped.
#[derive(Debug)]
pub struct Pending<'a>(&'a Outage);

impl Outage {
    pub fn begin(&self) -> Pending<'_> {
        let mut state = self.0.lock();
        state.pending += 1;
        state.since.get_or_insert_with(Instant::now);
        Pending(self)
    }
}

impl Pending<'_> {
    /// The server said something that can be used, or that no is its answer.
    pub fn answered(&self) {
        let mut state = self.0.0.lock();
        state.since = Some(Instant::now());
        state.told = None;
    }

    /// For how long it has not answered anybody who waits.
    pub fn silence(&self) -> Duration {
        let state = self.0.0.lock();
        state.since.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Whether it should be told of: not again within `repeat`.
    pub fn is_news(&self, repeat: Duration) -> bool {
        let mut state = self.0.0.lock();
        let is_news = state.told.is_none_or(|told| told.elapsed() >= repeat);
        if is_news {
            state.told = Some(Instant::now());
        }
        is_news
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        let mut state = self.0.0.lock();
        state.pending -= 1;
        if state.pending == 0 {
            *state = State::default();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn silence_is_of_those_who_wait_and_ends_with_an_answer() {
        let outage = Outage::default();
        let first = outage.begin();
        std::thread::sleep(Duration::from_millis(30));
        let second = outage.begin();
        assert!(second.silence() >= Duration::from_millis(30));
        assert!(first.is_news(Duration::from_secs(60)) && !second.is_news(Duration::from_secs(60)));
        second.answered();
        assert!(first.silence() < Duration::from_millis(30));
        drop((first, second));
        std::thread::sleep(Duration::from_millis(30));
        // Nobody waited meanwhile.
        assert!(outage.begin().silence() < Duration::from_millis(30));
    }
}
