//! Requests of a rollout whose answer its environment has waited for in vain. If the rollout's time is up meanwhile,
//! the error names the server that did not answer, in addition to the environment, which could only wait.

use primerl_core::ErrorKind;
use primerl_core::event::Outcome;
use primerl_core::failure::Refusal;
use primerl_engines::clients::Endpoint;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Requests by number.
#[derive(Debug, Default)]
pub(crate) struct Unanswered(BTreeMap<u32, Request>);

#[derive(Clone, Copy, Debug)]
struct Request {
    since: Instant,
    /// No client waits for it any more.
    abandoned: bool,
}

/// The server in words, and the code of its silence.
fn name_and_code(endpoint: Option<&Endpoint>) -> (String, &'static str) {
    match endpoint {
        Some(endpoint) => (
            format!("{} ({})", endpoint.name(), endpoint.url()),
            "endpoint_unavailable",
        ),
        None => ("the run's engines".to_owned(), "engine_unavailable"),
    }
}

impl Unanswered {
    pub(crate) fn begin(&mut self, number: u32, now: Instant) {
        let request = Request {
            since: now,
            abandoned: false,
        };
        self.0.insert(number, request);
    }

    /// The request was answered, or its client got an error: a client that abandoned an earlier request has continued.
    pub(crate) fn told(&mut self, number: u32) {
        self.0.remove(&number);
        self.0.retain(|_, request| !request.abandoned);
    }

    pub(crate) fn abandoned(&mut self, number: u32) {
        if let Some(request) = self.0.get_mut(&number) {
            request.abandoned = true;
        }
    }

    /// How long the oldest request has waited.
    pub(crate) fn longest(&self, now: Instant) -> Option<Duration> {
        let since = self.0.values().map(|request| request.since).min();
        since.map(|since| now.saturating_duration_since(since))
    }

    /// Adds the server that did not answer to the report of a rollout whose time was up. That server is blamed if the
    /// rollout, which `began` then, waited for it for most of the time.
    pub(crate) fn name_server(
        &self,
        outcome: &mut Outcome,
        endpoint: Option<&Endpoint>,
        began: Instant,
        now: Instant,
    ) {
        let timeout = outcome.error.as_mut();
        let timeout = timeout.filter(|error| ErrorKind::of(error) == ErrorKind::Timeout);
        let (Some(waited), Some(error)) = (self.longest(now), timeout) else {
            return;
        };
        let (who, code) = name_and_code(endpoint);
        let seconds = waited.as_secs_f64();
        error.message.push_str(&format!(
            "; a request to {who} had had no answer for {seconds:.1} s"
        ));
        if waited * 2 >= now.saturating_duration_since(began) {
            outcome.refusal = Some(Refusal {
                code: code.to_owned(),
                status: 503,
                overflow: None,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_core::failure::RolloutError;

    fn reported(unanswered: &Unanswered, began: Instant, kind: &str, now: Instant) -> Outcome {
        let mut outcome = Outcome {
            error: Some(RolloutError {
                kind: kind.to_owned(),
                message: "the environment did not end within 19.0 s".to_owned(),
                ..RolloutError::default()
            }),
            ..Outcome::default()
        };
        unanswered.name_server(&mut outcome, None, began, now);
        outcome
    }

    fn message(outcome: &Outcome) -> &str {
        outcome.error.as_ref().map_or("", |error| &error.message)
    }

    #[test]
    fn who_did_not_answer_is_named_and_blamed_for_most_of_the_time() {
        let (mut unanswered, began) = (Unanswered::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        unanswered.begin(1, at(4));
        let late = reported(&unanswered, began, "timeout", at(20));
        let expected = "within 19.0 s; a request to the run's engines had had no answer for 16.0 s";
        assert!(message(&late).ends_with(expected), "{late:?}");
        let refusal = late.refusal.expect("is blamed");
        assert_eq!(refusal.code, "engine_unavailable");
        // Another failure has another cause.
        let broken = reported(&unanswered, began, "tool", at(20));
        assert!(!message(&broken).contains("a request") && broken.refusal.is_none());
        // Most of the time was the environment's own.
        unanswered.told(1);
        unanswered.begin(2, at(15));
        let slow = reported(&unanswered, began, "timeout", at(20));
        assert!(
            message(&slow).contains("for 5.0 s") && slow.refusal.is_none(),
            "{slow:?}"
        );
    }

    #[test]
    fn a_request_that_was_given_up_counts_until_another_is_answered() {
        let (mut unanswered, began) = (Unanswered::default(), Instant::now());
        let at = |seconds| began + Duration::from_secs(seconds);
        unanswered.begin(1, at(0));
        unanswered.abandoned(1);
        assert_eq!(unanswered.longest(at(9)), Some(Duration::from_secs(9)));
        unanswered.begin(2, at(10));
        unanswered.told(2);
        assert_eq!(unanswered.longest(at(12)), None);
    }
}
