//! What a run is doing and waiting for, as the core knows it. The shell adds addresses, process ids and rates.

mod report;

use crate::counters::{CancelReason, Counters, VoidReason};
use crate::curriculum::EnvironmentBuffer;
use crate::event::EngineLoad;
use crate::failure::{ErrorKind, FirstError};
use crate::ids::*;
use crate::time::Time;
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Clone, Debug, Serialize)]
pub struct Status {
    pub run: RunStatus,
    pub rollouts: RolloutStatus,
    pub groups: GroupStatus,
    pub trainer: TrainerStatus,
    pub environments: Vec<EnvironmentStatus>,
    /// The difficulty buffer of each training environment whose examples are known.
    pub buffer: Vec<EnvironmentBuffer>,
    pub engines: Vec<EngineStatus>,
    pub workers: Vec<WorkerStatus>,
    pub waits: Vec<WaitStatus>,
    /// Evaluations under way.
    pub evaluations: Vec<EvaluationStatus>,
    /// Metrics of the batch cut last.
    pub last_step: Option<BTreeMap<String, f64>>,
    /// Failed rollouts by [`crate::failure::RolloutError::kind`].
    pub failures: BTreeMap<String, u64>,
    /// Rollouts that failed or were lost with their worker, by who is to blame.
    pub errors: BTreeMap<ErrorKind, u64>,
    /// Rollouts cancelled in flight.
    pub cancelled: BTreeMap<CancelReason, u64>,
    /// Rollouts that had finished and were not trained.
    pub voided: BTreeMap<VoidReason, u64>,
    /// Events that named nothing the core knows (a rollout that is over, an engine that never joined), by kind.
    pub ignored: BTreeMap<String, u64>,
}

#[derive(Clone, Debug, Serialize)]
pub struct RunStatus {
    /// The next step to be cut; `max_steps` + 1 once all were.
    pub next_step: Step,
    pub max_steps: u64,
    /// Newest version that at least one engine has proved.
    pub policy_version: Option<PolicyVersion>,
    /// Newest version the trainer has published.
    pub published_version: Option<PolicyVersion>,
    /// Since the run began, by engines, whatever became of them.
    pub sampled_tokens: u64,
    /// Why the run is over, once it is.
    pub finished: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct RolloutStatus {
    /// Leased and not ended.
    pub in_flight: u64,
    /// Most that may be in flight now: by `oversampling_factor`, and by the limits of the engines that serve.
    pub limit: u64,
    /// How many of those in flight belong to evaluations.
    pub in_flight_evaluation: u64,
    /// Ended well, waiting for their group or for their batch to be cut.
    pub finished: u64,
    /// Drawn and waiting for a worker; not yet dispatched.
    pub queued: u64,
    #[serde(flatten)]
    pub counters: Counters,
}

#[derive(Clone, Debug, Serialize)]
pub struct GroupStatus {
    /// Complete, waiting for the cut.
    pub ready: usize,
    /// Complete groups a batch needs.
    pub needed: usize,
    /// Begun and not cut.
    pub live: usize,
    /// Dropped since the run began.
    pub dropped: u64,
    /// How many of the live ones are set aside because no worker asks for their environment's work.
    pub set_aside: usize,
    /// Since when the trainer waits, and no group has had a signal, where that has been so for long in every environment.
    pub without_signal_since: Option<Time>,
}

#[derive(Clone, Debug, Serialize)]
pub struct TrainerStatus {
    /// A rank waits for a batch.
    pub waiting: bool,
    /// Since when the longest-waiting rank has waited, its long polls joined.
    pub waiting_since: Option<Time>,
    pub last_seen: Option<Time>,
    /// The newest step of which some rank has its batch.
    pub fetched: Option<Step>,
}

#[derive(Clone, Debug, Serialize)]
pub struct EnvironmentStatus {
    pub environment: EnvironmentId,
    pub name: String,
    /// Number of examples, once a worker has registered.
    pub examples: Option<u32>,
    pub workers: usize,
    pub queued: usize,
    /// Groups set aside because no worker asks for the environment's work.
    pub set_aside: usize,
    pub in_flight: usize,
    /// Why no groups of it are begun.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rests: Option<String>,
    /// Rollouts that failed or were lost with their worker, since the run began; evaluations' each time that they did.
    pub errors: BTreeMap<ErrorKind, u64>,
    /// The first of each kind that was reported.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub first_errors: BTreeMap<ErrorKind, FirstError>,
}

#[derive(Clone, Debug, Serialize)]
pub struct EngineStatus {
    pub engine: EngineId,
    /// What it proved last; no traffic without.
    pub version: Option<PolicyVersion>,
    /// The version it was asked to load, while it does.
    pub updating: Option<PolicyVersion>,
    /// Why it is out of rotation.
    pub lost: Option<String>,
    /// Rollouts in flight it is trusted with.
    pub limit: Option<u32>,
    /// What it last reported.
    pub load: Option<EngineLoad>,
}

#[derive(Clone, Debug, Serialize)]
pub struct WorkerStatus {
    pub worker: WorkerId,
    pub environment: EnvironmentId,
    pub last_seen: Time,
    pub running: usize,
    /// Its environment's code keeps its event loop from running.
    pub blocked: Option<BlockStatus>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct BlockStatus {
    pub since: Time,
    /// The line of code, where that is known.
    pub at: Option<String>,
    /// Whose code it is, where that is known.
    pub rollout: Option<RolloutId>,
}

#[derive(Clone, Debug, Serialize)]
pub struct EvaluationStatus {
    pub environment: EnvironmentId,
    pub version: PolicyVersion,
    pub ended: u32,
    pub total: u32,
    pub since: Time,
    pub deadline: Time,
}

/// What people know a worker by: its process's name in the run, without the number that makes it unique among all
/// processes.
pub fn own_name(name: &str) -> &str {
    match name.rsplit_once(':') {
        Some((own, pid)) if !own.is_empty() && pid.bytes().all(|c| c.is_ascii_digit()) => own,
        _ => name,
    }
}

/// Someone waits: who, for what, since when, and when the core will act on it (answer, warn or give up).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WaitStatus {
    pub who: String,
    #[serde(rename = "for")]
    pub waiting_for: String,
    pub since: Time,
    pub deadline: Time,
    /// It is how a run works, and holds no one up: a worker has nothing to do.
    pub is_usual: bool,
    /// It is the end of a run that only evaluates, which waits for all that it measures.
    pub is_end: bool,
}
