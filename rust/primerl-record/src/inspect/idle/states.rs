//! The states into which time is split, with their descriptions.

use crate::inspect::name_of;
use crate::inspect::spans::State;
use primerl_core::machine::{BatchWait, EngineView, NoRollouts, WorkerView};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::inspect) enum TrainerState {
    /// It has never asked for a batch.
    Starting,
    /// It has what it asked for: it trains, publishes, saves; or it has ended.
    Busy,
    Waits(BatchWait),
    /// The batch was cut between two of its requests.
    Collects,
    RunOver,
}

impl State for TrainerState {
    fn name(self) -> String {
        match self {
            TrainerState::Starting => "starting".to_owned(),
            TrainerState::Busy => "busy".to_owned(),
            TrainerState::Waits(wait) => format!("waits/{}", name_of(&wait)),
            TrainerState::Collects => "waits/collects".to_owned(),
            TrainerState::RunOver => "run_over".to_owned(),
        }
    }

    fn in_words(self) -> &'static str {
        match self {
            TrainerState::Starting => "has not asked for a batch yet",
            TrainerState::Busy => "trains, publishes, saves (it waits for no batch)",
            TrainerState::Collects => "waits: the batch is there, to be asked for again",
            TrainerState::RunOver => "the run is over",
            TrainerState::Waits(wait) => match wait {
                BatchWait::FirstWeights => "waits for itself to publish version 0",
                BatchWait::NoEngine => "waits: no engine has joined",
                BatchWait::EnginesLost => "waits: every engine is lost",
                BatchWait::EnginesLoading => "waits: engines load weights, none serves",
                BatchWait::EnginesUnproved => "waits: no engine has been asked to load yet",
                BatchWait::AsyncLevel => {
                    "waits: max_async_level, no engine has proved a version new enough"
                }
                BatchWait::NoWorker => {
                    "waits: an environment has no worker that listed its examples"
                }
                BatchWait::Rollouts => "waits for rollouts in flight",
                BatchWait::Evaluation => "waits for an evaluation (it holds new weights back)",
                BatchWait::Teacher => "waits for the teacher's log-probabilities",
                BatchWait::Advantages => "waits for a custom algorithm's advantages",
                BatchWait::WorkersAway => "waits: no worker asks for rollouts",
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::inspect) enum EngineState {
    NotJoined,
    /// In rotation, with rollouts in flight in the run.
    Serves,
    /// In rotation; no rollout is in flight.
    Idle(NoRollouts),
    Loads,
    /// It joined, and has not been asked to load weights.
    Unproved,
    Lost,
}

impl State for EngineState {
    fn name(self) -> String {
        match self {
            EngineState::NotJoined => "not_joined".to_owned(),
            EngineState::Serves => "serves".to_owned(),
            EngineState::Idle(why) => format!("idle/{}", name_of(&why)),
            EngineState::Loads => "loads".to_owned(),
            EngineState::Unproved => "unproved".to_owned(),
            EngineState::Lost => "lost".to_owned(),
        }
    }

    fn in_words(self) -> &'static str {
        match self {
            EngineState::NotJoined => "has not joined yet",
            EngineState::Serves => "serves while rollouts are in flight",
            EngineState::Loads => "loads weights",
            EngineState::Unproved => "waits for the first weights to load",
            EngineState::Lost => "lost",
            EngineState::Idle(why) => match why {
                NoRollouts::AllCut => "idle: nothing is left to be sampled",
                NoRollouts::Trainer => "idle: waits for the trainer (max_async_level, batch_size)",
                NoRollouts::NoWorker => "idle: no worker listed its environment's examples",
                NoRollouts::WorkersAway => "idle: no worker asks for rollouts",
            },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::inspect) enum WorkerState {
    Runs,
    /// No rollout, and it waits for a lease.
    Asks,
    /// No rollout, and no request: it starts, reports, or has ended unnoticed.
    Away,
}

impl State for WorkerState {
    fn name(self) -> String {
        match self {
            WorkerState::Runs => "runs",
            WorkerState::Asks => "asks",
            WorkerState::Away => "away",
        }
        .to_owned()
    }

    fn in_words(self) -> &'static str {
        match self {
            WorkerState::Runs => "runs rollouts",
            WorkerState::Asks => "waits for a rollout",
            WorkerState::Away => "neither runs nor asks",
        }
    }
}

impl EngineState {
    pub(super) fn of(engine: &EngineView, idle: Option<NoRollouts>) -> EngineState {
        match idle {
            _ if engine.is_lost => EngineState::Lost,
            _ if engine.updating.is_some() => EngineState::Loads,
            _ if engine.proved.is_none() => EngineState::Unproved,
            None => EngineState::Serves,
            Some(why) => EngineState::Idle(why),
        }
    }
}

impl WorkerState {
    pub(super) fn of(worker: &WorkerView) -> WorkerState {
        match (worker.running, worker.asks) {
            (0, true) => WorkerState::Asks,
            (0, false) => WorkerState::Away,
            _ => WorkerState::Runs,
        }
    }
}
