//! What engines, workers and the trainer do in a simulation.

use super::batching::Batching;
use super::restarts::Death;
use super::{Kill, Simulator};
use crate::event::{Event, Outcome};
use crate::ids::*;
use crate::sample::TokenLogprobs;
use crate::time::{Duration, Time};
use crate::turn::Turn;
use std::collections::{BTreeMap, BTreeSet};

/// After which a call that found no orchestrator is tried again.
const TRY_AGAIN: Duration = Duration(500_000);

#[derive(Clone, Debug)]
pub enum Action {
    /// In its life number so and so.
    EngineStarts(EngineId, u32),
    /// The engine has loaded the version it was asked to.
    EngineLoaded(EngineId, PolicyVersion, u32),
    EngineDies(EngineId, u32),
    EngineReports(EngineId, u32),
    /// The engine may have something to tell, unless that has changed since.
    EngineWorks(EngineId, Time),
    WorkerStarts(EnvironmentId),
    Heartbeat(WorkerId),
    AskForLease(WorkerId),
    BeginTurn(WorkerId, RolloutId),
    TrainerAsks(Step, u32, u32),
    TrainerAsksAhead(Step, u32, u32),
    TrainerPublishes(PolicyVersion, u32),
    TrainerStarts,
    /// The agent asks again for an answer that did not come.
    AskForAnswer(WorkerId, RolloutId),
    TellResult(WorkerId, RolloutId),
    /// The process with this number is killed.
    OrchestratorDies(u32),
    OrchestratorStarts(Death),
    /// What the journal's writer and the recorder of this process are at.
    Flush(u32),
    Written(u32),
    Synced(u32),
    IdleSync(u32),
    Recorded(u32),
    AdvantagesComputed(GroupId, Result<Vec<Vec<f32>>, String>),
    TeacherScored(GroupId, Result<Vec<TokenLogprobs>, String>),
    LeaseMissed(WorkerId, RolloutId),
    ReportsLate(WorkerId, RolloutId),
    Kill(Kill),
}

/// A turn that an engine was asked for; versions and log-probabilities are still to come.
#[derive(Debug)]
pub struct Asked {
    pub engine: EngineId,
    pub worker: WorkerId,
    pub turn: Turn,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
}

#[derive(Debug, Default)]
pub struct Engine {
    /// `None`: it does not run.
    pub batching: Option<Box<dyn Batching>>,
    pub serves: Option<PolicyVersion>,
    /// The version it was asked to load, and whether it has stopped for that.
    pub told: Option<PolicyVersion>,
    pub loads: bool,
    /// When it is next looked at.
    pub looked_at: Option<Time>,
    /// Counts restarts, so that what an earlier life had planned has no effect.
    pub life: u32,
    pub slow: bool,
    pub dead_for_good: bool,
}

impl Engine {
    /// Whatever it was asked is void.
    pub fn ends(&mut self) {
        self.life += 1;
        self.serves = None;
        self.told = None;
    }
}

#[derive(Clone, Debug)]
pub struct Worker {
    pub environment: EnvironmentId,
    /// The name of its process, whatever number that has.
    pub name: String,
    pub running: BTreeMap<RolloutId, Running>,
    /// Results that were reported and not answered.
    pub reporting: BTreeMap<RolloutId, Outcome>,
    pub asking: bool,
}

/// A rollout as its environment knows it.
#[derive(Clone, Debug)]
pub struct Running {
    pub example: ExampleIndex,
    pub turns_left: u32,
    pub slow: bool,
    /// Two seats, of which the second is not trained.
    pub two_seats: bool,
    pub turns: Vec<RunningTurn>,
    /// The answer of the last of them has not come yet.
    pub unanswered: bool,
}

#[derive(Clone, Debug)]
pub struct RunningTurn {
    /// Its number, unless the orchestrator has lost it.
    pub index: Option<u32>,
    pub seat: usize,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
}

#[derive(Debug, Default)]
pub struct Trainer {
    pub step: u64,
    pub requests: BTreeMap<RequestId, u32>,
    /// What it asked for while it trained the step before, and has got of that.
    pub asked_ahead: BTreeMap<RequestId, (Step, u32)>,
    pub held: BTreeSet<(Step, u32)>,
    pub fetched: BTreeSet<u32>,
    /// It has all parts of its step: what comes now is a repeated answer.
    pub works: bool,
    /// Counts restarts, so that what an earlier life had planned has no effect.
    pub life: u32,
    /// What a new life begins with.
    pub checkpoint: u64,
    /// Digests of the weights up to the newest: it comes to others when it computes them again.
    pub digests: BTreeMap<PolicyVersion, String>,
    pub dead: bool,
}

impl Action {
    /// Somebody calls the orchestrator.
    fn is_a_call(&self) -> bool {
        match self {
            Action::EngineStarts(..)
            | Action::WorkerStarts(_)
            | Action::Heartbeat(_)
            | Action::AskForLease(_)
            | Action::BeginTurn(..)
            | Action::TrainerAsks(..)
            | Action::TrainerAsksAhead(..)
            | Action::TrainerPublishes(..)
            | Action::TrainerStarts
            | Action::AskForAnswer(..)
            | Action::TellResult(..)
            | Action::LeaseMissed(..)
            | Action::ReportsLate(..) => true,
            // What an engine does goes unnoticed; whatever else there is ended with the process.
            Action::EngineLoaded(..)
            | Action::EngineDies(..)
            | Action::EngineReports(..)
            | Action::EngineWorks(..)
            | Action::AdvantagesComputed(..)
            | Action::TeacherScored(..)
            | Action::OrchestratorDies(_)
            | Action::OrchestratorStarts(_)
            | Action::Flush(_)
            | Action::Written(_)
            | Action::Synced(_)
            | Action::IdleSync(_)
            | Action::Recorded(_)
            | Action::Kill(_) => false,
        }
    }
}

impl Simulator {
    pub(super) fn act(&mut self, action: Action) {
        if !self.process.serves && action.is_a_call() {
            return self.plan(TRY_AGAIN, action);
        }
        match action {
            Action::EngineStarts(engine, life) => self.engine_starts(engine, life),
            Action::EngineLoaded(engine, version, life) => {
                self.engine_loaded(engine, version, life)
            }
            Action::EngineDies(engine, life) => self.engine_dies(engine, life),
            Action::EngineReports(engine, life) => self.engine_reports(engine, life),
            Action::EngineWorks(engine, at) => self.engine_works(engine, at),
            Action::WorkerStarts(environment) => self.worker_starts(environment),
            Action::Heartbeat(worker) => self.heartbeat(worker),
            Action::AskForLease(worker) => self.ask_for_lease(worker),
            Action::BeginTurn(worker, rollout) => self.begin_turn(worker, rollout),
            Action::TrainerAsks(step, rank, life) => self.trainer_asks(step, rank, life),
            Action::TrainerAsksAhead(step, rank, life) => {
                self.trainer_asks_ahead(step, rank, life);
            }
            Action::TrainerPublishes(version, life) => self.trainer_publishes(version, life),
            Action::TrainerStarts => self.trainer_starts(),
            Action::AskForAnswer(worker, rollout) => self.ask_for_answer(worker, rollout),
            Action::TellResult(worker, rollout) => self.tell_result(worker, rollout),
            Action::OrchestratorDies(life) => self.orchestrator_is_killed(life),
            Action::OrchestratorStarts(death) => self.restart(death),
            Action::Flush(life) => self.flush(life),
            Action::Written(life) => self.written(life),
            Action::Synced(life) => self.synced(life),
            Action::IdleSync(life) => self.idle_sync(life),
            Action::Recorded(life) => self.recorded(life),
            Action::AdvantagesComputed(group, result) => {
                self.send(Event::AdvantagesComputed { group, result });
            }
            Action::TeacherScored(group, result) => {
                self.send(Event::TeacherScored { group, result });
            }
            Action::LeaseMissed(worker, rollout) => self.lease_missed(worker, rollout),
            Action::ReportsLate(worker, rollout) => self.reports_late(worker, rollout),
            Action::Kill(kill) => self.kill(kill),
        }
    }

    fn kill(&mut self, kill: Kill) {
        match kill {
            Kill::Workers => {
                self.workers.clear();
                self.agenda
                    .retain(|_, action| !matches!(action, Action::WorkerStarts(_)));
            }
            Kill::Trainer => self.trainer.dead = true,
            Kill::Engines => {
                let ids: Vec<(EngineId, u32)> = self
                    .engines
                    .iter()
                    .map(|(id, engine)| (*id, engine.life))
                    .collect();
                for (id, life) in ids {
                    if let Some(engine) = self.engines.get_mut(&id) {
                        engine.dead_for_good = true;
                    }
                    self.engine_dies(id, life);
                }
            }
        }
    }
}
