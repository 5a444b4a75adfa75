//! Limits on the turns and the time of one rollout (`limits` of its environment and of its example), and which of its
//! conversations reached a limit. [`crate::budget`] counts its tokens.
//!
//! The harness is not trusted with limits: a request beyond a limit is refused, with a message at which agents end in
//! an orderly way. The conversation is then reported as truncated, whatever its environment reports.

use super::Rollout;
use crate::notes::Note;
use crate::rollout_limits::Limit;
use crate::{RolloutLimits, Service};
use axum::extract::{Path, State};
use axum::response::Response;
use parking_lot::Mutex;
use primerl_core::event::Outcome;
use primerl_service::http::{ApiError, Encoding, Wire};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

#[derive(Debug, Default)]
pub struct Allowance {
    /// Locked for look-ups and additions only.
    state: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    limits: RolloutLimits,
    /// Number of answers that were started and did not fail.
    turns: u32,
    /// The first limit that each session reached.
    met: BTreeMap<Arc<str>, Limit>,
}

impl Allowance {
    pub fn new(limits: RolloutLimits) -> Allowance {
        Allowance {
            state: Mutex::new(Taken {
                limits,
                ..Taken::default()
            }),
        }
    }

    /// Applies additional limits; the result is the limits now in force. Limits are never raised.
    pub fn tighten(&self, limits: RolloutLimits) -> RolloutLimits {
        let mut state = self.state.lock();
        state.limits = state.limits.tightened(limits);
        state.limits
    }

    /// Seconds since the lease during which the model answers.
    pub fn time_s(&self) -> Option<f64> {
        self.state.lock().limits.time_s
    }

    /// Starts this many more answers, or none of them.
    pub fn take(&self, choices: u32) -> Result<(), ApiError> {
        let mut state = self.state.lock();
        let turns = state.turns.saturating_add(choices);
        match state.limits.turns {
            Some(most) if turns > most => {
                let used = format!(
                    "has taken {} turns, and may take {most} in all",
                    state.turns
                );
                Err(Limit::Turns.refusal(&used))
            }
            _ => {
                state.turns = turns;
                Ok(())
            }
        }
    }

    /// Gives back the turns of answers that were started and failed.
    pub fn give_back(&self, choices: u32) {
        let mut state = self.state.lock();
        state.turns = state.turns.saturating_sub(choices);
    }

    /// Returns whether this is the first limit that the session reached.
    pub fn met(&self, session: &Arc<str>, limit: Limit) -> bool {
        let mut state = self.state.lock();
        let known = state.met.contains_key(session);
        if !known {
            state.met.insert(Arc::clone(session), limit);
        }
        !known
    }

    /// Marks each conversation that reached a limit as truncated.
    pub fn mark(&self, outcome: &mut Outcome) {
        let state = self.state.lock();
        let alone = outcome.traces.len() == 1;
        for trace in &mut outcome.traces {
            // A client that sends no session name has one conversation, and its only trace has another name.
            let own = state.met.get(trace.session.as_str());
            let any = state.met.values().next().filter(|_| alone);
            if let Some(limit) = own.or(any) {
                trace.truncated = true;
                trace.stop_condition = Some(limit.stop().into());
            }
        }
    }
}

impl Rollout {
    /// The instant at which the model's time is up.
    pub(crate) fn allowed_until(&self) -> Option<Instant> {
        let time_s = self.allowance.time_s()?;
        // A year counts as no limit; larger numbers would overflow the clock's arithmetic.
        let span = Duration::try_from_secs_f64(time_s).ok()?;
        self.began.checked_add(span)
    }

    pub(crate) fn check_time(&self) -> Result<(), ApiError> {
        match self.allowed_until() {
            Some(until) if Instant::now() >= until => Err(self.time_is_up()),
            _ => Ok(()),
        }
    }

    /// Resolves when the model's time is up; never resolves if there is no time limit.
    pub(crate) async fn out_of_time(&self) -> ApiError {
        match self.allowed_until() {
            Some(until) => tokio::time::sleep_until(until.into()).await,
            None => std::future::pending().await,
        }
        self.time_is_up()
    }

    fn time_is_up(&self) -> ApiError {
        let seconds = self.allowance.time_s().unwrap_or_default();
        Limit::Time.refusal(&format!("has had the {seconds} s it may take in all"))
    }

    /// Records that a request of this session was refused because of a limit.
    pub(crate) async fn note_refusal(
        &self,
        service: &Service,
        session: &Arc<str>,
        error: &ApiError,
    ) {
        if let Some(limit) = Limit::of(error) {
            self.note_limit(service, session, limit).await;
        }
    }

    /// Resolves once the journal has it, so that a restart knows it: the agent ends when it gets the refusal.
    pub(crate) async fn note_limit(&self, service: &Service, session: &Arc<str>, limit: Limit) {
        if !self.allowance.met(session, limit) {
            return;
        }
        let name = limit.name();
        tracing::info!(rollout = %self.id, %session, limit = name, "a limit was reached");
        let session = session.to_string();
        let note = Note::LimitMet { session, limit }.text();
        // If the run is over, no one needs the event.
        let _ = service.driver.noted(self.id, note).await;
    }

    /// Adds the gateway's data to a report of the rollout; it overrides the worker's.
    pub fn mark(&self, outcome: &mut Outcome) {
        outcome.refusal = self.refusal();
        self.allowance.mark(outcome);
        let endpoint = self.endpoint.as_deref();
        let state = self.state.lock();
        state
            .unanswered
            .name_server(outcome, endpoint, self.began, Instant::now());
    }

    /// Limits of the rollout's example, in addition to those of its environment.
    pub(crate) fn tighten(&self, limits: RolloutLimits) -> RolloutLimits {
        let limits = self.allowance.tighten(limits);
        self.budget.lower(limits.tokens);
        limits
    }
}

/// An env worker sends the limits of the rollout's example before it asks its environment for anything. The request
/// uses the rollout's key: limits are only ever lowered, so it does no harm if the agent calls this.
pub(crate) async fn tighten(
    State(service): State<Arc<Service>>,
    Path(rollout): Path<String>,
    Wire { body, .. }: Wire<RolloutLimits>,
) -> Result<Response, ApiError> {
    let rollout = service.gateway.rollouts.find(&rollout)?;
    if let Some((name, problem, hint)) = body.problem() {
        let message = format!("limits.{name} {problem}; {hint}");
        return Err(ApiError::invalid(message).param(name));
    }
    let limits = rollout.tighten(body);
    // These limits have to apply after a restart, too.
    let noted = service.driver.noted(rollout.id, Note::Limits(body).text());
    noted.await.map_err(|_| service.run.over())?;
    Ok(Encoding::Json.ok(&limits))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rollout_limits::{CODE, KIND};
    use primerl_core::event::Trace;

    fn turns(turns: u32) -> RolloutLimits {
        RolloutLimits {
            turns: Some(turns),
            ..RolloutLimits::default()
        }
    }

    #[test]
    fn turns_are_counted_when_they_begin_and_given_back_when_they_fail() {
        let allowance = Allowance::new(turns(3));
        allowance.take(2).expect("there are three");
        let error = allowance.take(2).expect_err("one is left");
        assert_eq!(
            (error.kind, error.code, error.param.as_deref()),
            (KIND, Some(CODE), Some("limits.turns"))
        );
        assert!(error.message.contains("maximum context length"));
        allowance.take(1).expect("one is left");
        allowance.give_back(1);
        allowance.take(1).expect("it failed");
        assert_eq!(Limit::of(&error), Some(Limit::Turns));
        assert_eq!(
            Limit::of(&ApiError::invalid("x").param("limits.turns")),
            None
        );
    }

    #[test]
    fn an_example_lowers_what_its_environment_allows_and_never_raises_it() {
        let allowance = Allowance::new(turns(3));
        assert_eq!(allowance.tighten(turns(5)), turns(3));
        assert_eq!(allowance.tighten(turns(1)), turns(1));
        allowance.take(1).expect("one is allowed");
        assert!(allowance.take(1).is_err());
    }

    #[test]
    fn conversations_that_reached_a_limit_are_truncated_whatever_their_environment_reports() {
        let trace = |session: &str| Trace {
            session: session.into(),
            stop_condition: Some("agent_completed".into()),
            ..Trace::default()
        };
        let outcome_of = |sessions: &[&str]| Outcome {
            traces: sessions.iter().map(|session| trace(session)).collect(),
            ..Outcome::default()
        };
        let allowance = Allowance::default();
        assert!(allowance.met(&"b".into(), Limit::Turns));
        assert!(!allowance.met(&"b".into(), Limit::Time), "the first counts");
        let mut two = outcome_of(&["a", "b"]);
        allowance.mark(&mut two);
        let ends = two
            .traces
            .iter()
            .map(|one| (one.truncated, one.stop_condition.as_deref()));
        let expected = [
            (false, Some("agent_completed")),
            (true, Some("limit_turns")),
        ];
        assert!(ends.eq(expected));
        // The client sent no session name.
        let mut one = outcome_of(&["c"]);
        allowance.mark(&mut one);
        assert!(one.traces[0].truncated);
    }
}
