//! Whether a server that is asked answers at all. The time is an argument.

use parking_lot::Mutex;
use std::fmt::Display;
use std::time::{Duration, Instant};

/// A request within this time after others gave up counts as the same wait.
const SAME_WAIT: Duration = Duration::from_secs(60);

/// A server that the run cannot continue without has answered no request for too long.
#[derive(Debug, thiserror::Error)]
#[error("{name}: {problem}; see {table}")]
pub struct Unanswered {
    name: String,
    problem: String,
    /// Name of the server's table in the config.
    table: String,
}

/// Outage of one server, over all requests to it.
#[derive(Debug, Default)]
pub struct Outage(Mutex<State>);

/// Held for a few instructions.
#[derive(Debug, Default)]
struct State {
    pending: usize,
    /// Time of the last answer, or of the first request after a time without waiting requests.
    since: Option<Instant>,
    /// How long earlier requests waited in vain before they gave up, and when they did.
    before: Duration,
    given_up: Option<Instant>,
    /// The last request's failure since the last answer.
    last: Option<String>,
    /// Requests in a row that the server refused to let in since the last answer.
    shut_out: u32,
    news: News,
}

/// Rate limit for warnings: many requests fail together, and one of them is reported.
#[derive(Debug, Default)]
pub struct News {
    told: Option<Instant>,
}

/// A request waits for an answer until this is dropped.
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

    /// Whether a failure should be reported: not again within `repeat`, unless there was an answer since.
    pub fn is_news(&self, now: Instant, repeat: Duration) -> bool {
        self.0.lock().news.is_due(now, repeat)
    }

    /// A request failed without an answer.
    pub fn failed(&self, error: &dyn Display) {
        self.0.lock().last = Some(error.to_string());
    }

    fn end(&self, now: Instant) {
        let mut state = self.0.lock();
        state.pending -= 1;
        if state.pending == 0 {
            // A reported failure is not reported again because other requests wait now.
            state.before = state.silence(now);
            state.since = None;
            state.given_up = Some(now);
        }
    }
}

impl News {
    /// Whether to report now: not again within `repeat`, unless it was over meanwhile.
    pub fn is_due(&mut self, now: Instant, repeat: Duration) -> bool {
        let is_due = self
            .told
            .is_none_or(|told| now.saturating_duration_since(told) >= repeat);
        if is_due {
            self.told = Some(now);
        }
        is_due
    }

    /// The next problem is reported at once.
    pub fn is_over(&mut self) {
        self.told = None;
    }
}

impl Pending<'_> {
    /// The server gave a usable answer, or a refusal of this one request.
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

    /// This many requests in a row were not let in, including this one.
    pub fn shut_out(&self) -> u32 {
        let mut state = self.0.0.lock();
        state.shut_out = state.shut_out.saturating_add(1);
        state.shut_out
    }

    /// For how long it has answered none of the waiting requests.
    pub fn silence(&self, now: Instant) -> Duration {
        self.0.0.lock().silence(now)
    }

    /// The last request's failure, if there was no answer since.
    pub fn last(&self) -> Option<String> {
        self.0.0.lock().last.clone()
    }

    /// [`Outage::is_news`]
    pub fn is_news(&self, now: Instant, repeat: Duration) -> bool {
        self.0.is_news(now, repeat)
    }

    /// The error that ends the run when a server has answered no request for longer than `limit`; `table` names it in
    /// the config, and `last` is its last failure.
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
    fn silence_counts_while_requests_wait_and_ends_with_an_answer() {
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
        // No request was waiting meanwhile.
        let third = outage.begin(at(500));
        assert_eq!(third.silence(at(501)), Duration::from_secs(1));
    }

    #[test]
    fn requests_that_give_up_count_for_the_next_ones() {
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
        // The server got no request for a while, and may be another one by now.
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
