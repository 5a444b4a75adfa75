//! The open rollouts, each with its conversations.

mod allowance;

pub(crate) use allowance::tighten;

use self::allowance::Allowance;
use super::attempts::Attempts;
use super::budget::Budget;
use super::limits::{self, Held};
use super::live::Live;
use super::request::Options;
use super::sampling::Rules;
use super::seen::Seen;
use super::unanswered::Unanswered;
use super::{Gateway, RolloutLimits, Sampling};
use axum::http::Extensions;
use parking_lot::{Mutex, RwLock};
use primerl_core::conversation::{MessageKey, Walk};
use primerl_core::counters::CancelReason;
use primerl_core::effect::LeasedRollout;
use primerl_core::failure::Refusal;
use primerl_core::{
    Conversation, EnvironmentId, ExampleIndex, RolloutId, Turn, TurnIndex, WorkerId,
};
use primerl_engines::Resident;
use primerl_engines::clients::Endpoint;
use primerl_service::http::ApiError;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// All open rollouts. The driver opens, cancels and closes them; requests look them up.
#[derive(Debug, Default)]
pub struct Rollouts {
    open: RwLock<HashMap<RolloutId, Arc<Rollout>>>,
    /// One more than the highest number ever opened: distinguishes rollouts that are over from those that never
    /// existed.
    next: AtomicU64,
    /// For each environment, the server that answers instead of the engines.
    endpoints: Vec<Option<Arc<Endpoint>>>,
    /// Limits of each environment.
    limits: Vec<RolloutLimits>,
    /// For each environment, the time from a rollout's lease to its deadline.
    spans: Vec<Duration>,
}

/// One open rollout.
#[derive(Debug)]
pub struct Rollout {
    pub id: RolloutId,
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    pub worker: WorkerId,
    pub evaluation: bool,
    pub sampling: Sampling,
    /// The server that answers instead of the engines.
    pub endpoint: Option<Arc<Endpoint>>,
    /// When it was leased; after a restart, as far back as this machine's clock goes.
    pub began: Instant,
    pub deadline: Instant,
    /// Whether the rollout waits for an answer. Locked only for a moment.
    asking: Mutex<Asking>,
    /// Aborts the rollout's engine requests.
    pub over: CancellationToken,
    pub(super) budget: Budget,
    pub allowance: Allowance,
    cancelled: OnceLock<CancelReason>,
    /// Locked for look-ups and inserts, never across an await.
    pub(super) state: Mutex<RolloutState>,
    /// One value of each type that a dialect keeps for the rollout.
    dialects: Mutex<Extensions>,
}

#[derive(Debug, Default)]
pub(super) struct RolloutState {
    /// Recorded turns of all sessions, in order.
    pub turns: Vec<Turn>,
    /// Number of tokens that the turns hold.
    pub tokens: usize,
    /// The last error that its client got, if no answer followed.
    pub refusal: Option<Refusal>,
    /// Number of requests that were started so far.
    pub requests: u32,
    pub sessions: HashMap<Arc<str>, Session>,
    /// Number of messages whose keys the sessions cache.
    pub keys: usize,
    /// Requests that are being answered or were answered: a retry gets the answer again.
    pub attempts: Attempts<Arc<Live>>,
    /// Requests for whose answer the rollout waits, or has waited in vain.
    pub unanswered: Unanswered,
}

/// Whether a rollout waits for an answer or runs its environment's code.
#[derive(Clone, Copy, Debug)]
struct Asking {
    requests: usize,
    /// When the number of requests last changed from zero to more, or back; at first, when the rollout was opened.
    since: Instant,
}

/// What a rollout is doing, and since when.
#[derive(Clone, Copy, Debug)]
pub struct Doing {
    /// It waits for an answer; otherwise its environment's code is running.
    pub asks: bool,
    pub since: Instant,
}

impl Asking {
    fn since(now: Instant) -> Asking {
        Asking {
            requests: 0,
            since: now,
        }
    }
}

/// One conversation.
#[derive(Debug, Default)]
pub(super) struct Session {
    pub conversation: Conversation,
    /// The engine that caches its prefix.
    pub resident: Option<Resident>,
    /// Keys of messages by the hash of their bytes: a known message is not parsed again.
    pub keys: foldhash::HashMap<u128, MessageKey>,
    /// The part of the last chat request's body that is known.
    pub seen: Option<Arc<Seen>>,
    /// Positions of the last request's messages among the recorded turns, by the hash through each message.
    pub walked: Option<(u128, Walk)>,
    /// The options that were last used, by the hash of their bytes.
    pub options: Option<(u128, Arc<Options>)>,
}

impl RolloutState {
    pub(crate) fn held(&self) -> Held {
        Held {
            running: self.attempts.running(),
            requests: self.requests,
            turns: self.turns.len(),
            tokens: self.tokens,
        }
    }

    /// Adds a finished turn; returns its number.
    pub(crate) fn record(&mut self, turn: &Turn) -> TurnIndex {
        let index = TurnIndex(self.turns.len() as u32);
        self.refusal = None;
        self.turns.push(turn.clone());
        self.tokens += turn.prompt_suffix.len() + turn.sampled.len();
        let session = self.sessions.entry(Arc::clone(&turn.session)).or_default();
        session.conversation.record(index, turn);
        index
    }

    /// The conversation of this name, which is created if it does not exist.
    pub(crate) fn session(&mut self, name: &Arc<str>) -> Result<&mut Session, ApiError> {
        if !self.sessions.contains_key(name) {
            limits::check_sessions(self.sessions.len())?;
        }
        Ok(self.sessions.entry(Arc::clone(name)).or_default())
    }

    /// Caches the keys of these messages.
    pub(crate) fn keep_keys(&mut self, session: &Arc<str>, keys: Vec<(u128, MessageKey)>) {
        self.keys += keys.len();
        if self.keys > limits::MOST_KEYS {
            self.keys = keys.len();
            let sessions = self.sessions.values_mut();
            sessions.for_each(|session| session.keys = Default::default());
        }
        if let Some(session) = self.sessions.get_mut(session) {
            session.keys.extend(keys);
        }
    }
}

impl Rollouts {
    pub fn with_endpoints(endpoints: Vec<Option<Arc<Endpoint>>>) -> Rollouts {
        Rollouts {
            endpoints,
            ..Rollouts::default()
        }
    }

    pub fn with_limits(self, limits: Vec<RolloutLimits>, spans: Vec<Duration>) -> Rollouts {
        Rollouts {
            limits,
            spans,
            ..self
        }
    }

    /// Sets the first rollout number; lower ones count as over.
    pub fn begin_at(&self, next: RolloutId) {
        self.next.store(next.0, Ordering::Relaxed);
    }

    pub fn open(&self, lease: &LeasedRollout, worker: WorkerId, sampling: Sampling) {
        let environment = lease.environment.0 as usize;
        let endpoint = self.endpoints.get(environment).cloned().flatten();
        let mut sampling = sampling;
        if endpoint.is_some() {
            // Another model answers, with its own template.
            sampling.template_kwargs = None;
        }
        let limits = self.limits.get(environment).copied().unwrap_or_default();
        let now = Instant::now();
        let deadline = now + Duration::from_micros(lease.deadline.0);
        let span = self.spans.get(environment).copied().unwrap_or_default();
        let began = deadline.checked_sub(span).unwrap_or(now);
        let budget = Budget::new(sampling.rollout_max_tokens);
        budget.lower(limits.tokens);
        let rollout = Rollout {
            id: lease.rollout,
            environment: lease.environment,
            example: lease.example,
            worker,
            evaluation: lease.evaluation,
            budget,
            allowance: Allowance::new(limits),
            sampling,
            endpoint,
            began,
            deadline,
            asking: Mutex::new(Asking::since(now)),
            over: CancellationToken::new(),
            cancelled: OnceLock::new(),
            state: Mutex::default(),
            dialects: Mutex::default(),
        };
        self.next.fetch_max(lease.rollout.0 + 1, Ordering::Relaxed);
        self.open.write().insert(lease.rollout, Arc::new(rollout));
    }

    pub fn get(&self, id: RolloutId) -> Option<Arc<Rollout>> {
        self.open.read().get(&id).cloned()
    }

    /// All open rollouts, in no particular order.
    pub fn all(&self) -> Vec<Arc<Rollout>> {
        self.open.read().values().cloned().collect()
    }

    /// The open rollout, or the error for its caller: 410 if it is over, 404 if it never existed.
    pub fn find(&self, id: &str) -> Result<Arc<Rollout>, ApiError> {
        let unknown =
            || ApiError::not_found("rollout_unknown", format!("there is no rollout `{id}`"));
        let number = RolloutId(id.parse().map_err(|_| unknown())?);
        match self.get(number) {
            Some(rollout) if rollout.over.is_cancelled() => Err(rollout.gone()),
            Some(rollout) => Ok(rollout),
            None if number.0 < self.next.load(Ordering::Relaxed) => Err(is_over(number, None)),
            None => Err(unknown()),
        }
    }

    pub fn cancel(&self, id: RolloutId, reason: CancelReason) {
        if let Some(rollout) = self.get(id) {
            // The first reason wins.
            let _ = rollout.cancelled.set(reason);
            rollout.over.cancel();
        }
    }

    /// Removes the rollout; returns the worker that ran it.
    pub fn close(&self, id: RolloutId) -> Option<WorkerId> {
        let rollout = self.open.write().remove(&id)?;
        rollout.over.cancel();
        Some(rollout.worker)
    }
}

impl Rollout {
    pub(super) fn asks(&self) {
        let mut asking = self.asking.lock();
        asking.requests += 1;
        if asking.requests == 1 {
            asking.since = Instant::now();
        }
    }

    pub(super) fn is_answered(&self) {
        let mut asking = self.asking.lock();
        asking.requests = asking.requests.saturating_sub(1);
        if asking.requests == 0 {
            asking.since = Instant::now();
        }
    }

    pub fn doing(&self) -> Doing {
        let asking = *self.asking.lock();
        Doing {
            asks: asking.requests > 0,
            since: asking.since,
        }
    }

    /// What a dialect keeps for the rollout between requests; created when it is first needed.
    pub(super) fn dialect_state<T: Default + Send + Sync + 'static>(&self) -> Arc<T> {
        let mut states = self.dialects.lock();
        Arc::clone(states.get_or_insert_default::<Arc<T>>())
    }

    /// The name that clients use for the model.
    pub(super) fn model<'a>(&'a self, gateway: &'a Gateway) -> &'a str {
        let endpoint = self.endpoint.as_deref();
        endpoint.map_or(&gateway.model, |endpoint| endpoint.model())
    }

    /// Whether a teacher answers it, for the policy to learn from.
    pub(super) fn is_taught(&self) -> bool {
        self.endpoint.is_some() && !self.evaluation
    }

    pub(super) fn rules(&self) -> Rules<'_> {
        Rules {
            sampling: &self.sampling,
            // The policy's rules of sampling do not apply to a teacher.
            evaluation: self.evaluation || self.is_taught(),
        }
    }

    /// Remembers the error that its client gets.
    pub(super) fn refuse(&self, error: &ApiError) {
        self.state.lock().refusal = Some(Refusal {
            code: error.code.unwrap_or_default().to_owned(),
            status: error.status.as_u16(),
            overflow: error.overflow,
        });
    }

    /// The last error that its client got, if no answer followed.
    pub fn refusal(&self) -> Option<Refusal> {
        self.state.lock().refusal.clone()
    }

    /// The error for requests to it once it is over.
    pub fn gone(&self) -> ApiError {
        is_over(self.id, self.cancelled.get().copied())
    }
}

fn is_over(id: RolloutId, reason: Option<CancelReason>) -> ApiError {
    let why = match reason {
        Some(CancelReason::TooManyPolicies) => {
            "it was cancelled: too many policy versions contributed"
        }
        Some(CancelReason::TooOld) => {
            "it was cancelled: its samples are too old to be trained at the next step"
        }
        Some(CancelReason::Timeout) => "it was cancelled: its time was up",
        Some(CancelReason::WorkerLost) => "its worker was lost; it was given to another",
        Some(CancelReason::GroupDropped) => "it was cancelled: its group was dropped",
        Some(CancelReason::GroupRestarted) => {
            "it was cancelled: another rollout of its group failed, and the whole group is run again"
        }
        Some(CancelReason::WeightsReplaced) => {
            "it was cancelled: the trainer has replaced the weights that it evaluated"
        }
        Some(CancelReason::RunFinished) => "it was cancelled: the run has finished",
        _ => "it has ended",
    };
    ApiError::gone("rollout_over", format!("rollout {id} is over: {why}"))
}
