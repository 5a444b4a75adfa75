//! What engines, workers and the trainer do in a simulation.

use super::{Kill, Simulator};
use crate::admission::EngineLoad;
use crate::effect::LeasedRollout;
use crate::event::Event;
use crate::ids::*;
use rand::Rng;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug)]
pub enum Action {
    EngineStarts(EngineId),
    /// The engine has loaded the version it was told to, in its life number so and so.
    EngineLoaded(EngineId, PolicyVersion, u32),
    EngineDies(EngineId, u32),
    EngineReports(EngineId, u32),
    WorkerStarts(EnvironmentId),
    Heartbeat(WorkerId),
    AskForLease(WorkerId),
    BeginTurn(WorkerId, RolloutId),
    EndTurn(WorkerId, RolloutId, Sampling),
    TrainerAsks(Step, u32, u32),
    TrainerPublishes(PolicyVersion, u32),
    TrainerStarts,
    OrchestratorRestarts,
    AdvantagesComputed(GroupId, Result<Vec<Vec<f32>>, String>),
    LeaseMissed(WorkerId, RolloutId),
    ReportsLate(WorkerId, RolloutId),
    Kill(Kill),
}

/// A request that an engine works on.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    pub engine: EngineId,
    pub life: u32,
    pub began_at: PolicyVersion,
}

#[derive(Clone, Debug, Default)]
pub struct Engine {
    pub serves: Option<PolicyVersion>,
    /// Counts restarts, so that what an earlier life had planned comes to nothing.
    pub life: u32,
    pub runs: bool,
    /// Requests it has.
    pub requests: u32,
    pub slow: bool,
    dead_for_good: bool,
}

#[derive(Clone, Debug)]
pub struct Worker {
    environment: EnvironmentId,
    pub running: BTreeMap<RolloutId, Running>,
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
}

#[derive(Clone, Debug)]
pub struct RunningTurn {
    pub seat: usize,
    /// Prompt and answer.
    pub tokens: Vec<u32>,
}

#[derive(Debug, Default)]
pub struct Trainer {
    pub step: u64,
    pub requests: BTreeMap<RequestId, u32>,
    pub fetched: BTreeSet<u32>,
    /// It has all parts of its step: what comes now is a repeated answer.
    pub works: bool,
    /// Counts restarts, so that what an earlier life had planned comes to nothing.
    pub life: u32,
    /// What a new life begins with.
    pub checkpoint: u64,
    dead: bool,
}

impl Simulator {
    pub(super) fn act(&mut self, action: Action) {
        match action {
            Action::EngineStarts(engine) => self.engine_starts(engine),
            Action::EngineLoaded(engine, version, life) => {
                self.engine_loaded(engine, version, life)
            }
            Action::EngineDies(engine, life) => self.engine_dies(engine, life),
            Action::EngineReports(engine, life) => self.engine_reports(engine, life),
            Action::WorkerStarts(environment) => self.worker_starts(environment),
            Action::Heartbeat(worker) => self.heartbeat(worker),
            Action::AskForLease(worker) => self.ask_for_lease(worker),
            Action::BeginTurn(worker, rollout) => self.begin_turn(worker, rollout),
            Action::EndTurn(worker, rollout, sampling) => self.end_turn(worker, rollout, sampling),
            Action::TrainerAsks(step, rank, life) => self.trainer_asks(step, rank, life),
            Action::TrainerPublishes(version, life) => self.trainer_publishes(version, life),
            Action::TrainerStarts => self.trainer_starts(),
            Action::OrchestratorRestarts => self.restart(),
            Action::AdvantagesComputed(group, result) => {
                self.send(Event::AdvantagesComputed { group, result })
            }
            Action::LeaseMissed(worker, rollout) => self.lease_missed(worker, rollout),
            Action::ReportsLate(worker, rollout) => self.reports_late(worker, rollout),
            Action::Kill(kill) => self.kill(kill),
        }
    }

    fn engine_starts(&mut self, id: EngineId) {
        let engine = self.engines.entry(id).or_default();
        if engine.dead_for_good {
            return;
        }
        engine.runs = true;
        let life = engine.life;
        if self.chance(self.scenario.faults.engine_dies) {
            let after = self.spread(1.0, 60.0);
            self.plan(after, Action::EngineDies(id, life));
        }
        let slow = self.message_fault(self.scenario.faults.engine_slow);
        self.engines.entry(id).or_default().slow = slow;
        self.plan(
            crate::Duration::from_secs(1),
            Action::EngineReports(id, life),
        );
        self.send(Event::EngineJoined {
            engine: id,
            url: format!("http://engine-{id}"),
        });
    }

    fn engine_reports(&mut self, id: EngineId, life: u32) {
        let engine = &self.engines[&id];
        let (Some(capacity), true) = (self.scenario.engine_capacity, engine.life == life) else {
            return;
        };
        let running = engine.requests.min(capacity);
        let load = EngineLoad {
            running,
            waiting: engine.requests - running,
            kv_cache_usage: f64::from(running) / f64::from(capacity),
            preemptions: 0,
        };
        self.plan(
            crate::Duration::from_secs(1),
            Action::EngineReports(id, life),
        );
        self.send(Event::EngineLoad { engine: id, load });
    }

    pub(super) fn engine_updates(&mut self, id: EngineId, version: PolicyVersion) {
        let life = self.engines[&id].life;
        let after = self.spread(0.1, 1.5);
        let action = match self.chance(self.scenario.faults.engine_fails) {
            true => Action::EngineDies(id, life),
            false => Action::EngineLoaded(id, version, life),
        };
        self.plan(after, action);
    }

    fn engine_loaded(&mut self, id: EngineId, version: PolicyVersion, life: u32) {
        let engine = self.engines.get_mut(&id).expect("it was told to load");
        if engine.life == life {
            engine.serves = Some(version);
            self.send(Event::EngineProved {
                engine: id,
                version,
            });
        }
    }

    fn engine_dies(&mut self, id: EngineId, life: u32) {
        let engine = self.engines.get_mut(&id).expect("it lived");
        if engine.life != life {
            return;
        }
        engine.life += 1;
        engine.runs = false;
        engine.serves = None;
        engine.requests = 0;
        let after = self.spread(0.5, 10.0);
        self.plan(after, Action::EngineStarts(id));
        self.send(Event::EngineLost {
            engine: id,
            reason: "connection refused".to_owned(),
        });
    }

    fn worker_starts(&mut self, environment: EnvironmentId) {
        let worker = WorkerId(self.next_worker);
        self.next_worker += 1;
        self.workers.insert(
            worker,
            Worker {
                environment,
                running: BTreeMap::new(),
                asking: false,
            },
        );
        self.send(Event::EnvironmentReady {
            environment,
            examples: self.scenario.examples,
        });
        self.send(Event::WorkerJoined {
            worker,
            environment,
            name: format!("worker-{worker}"),
        });
        self.heartbeat(worker);
        self.ask_for_lease(worker);
    }

    fn heartbeat(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let environment = worker.environment;
        if self.chance(self.scenario.faults.worker_dies) {
            self.workers.remove(&id);
            let after = self.spread(0.5, 20.0);
            return self.plan(after, Action::WorkerStarts(environment));
        }
        self.plan(crate::Duration::from_secs(3), Action::Heartbeat(id));
        self.send(Event::WorkerSeen { worker: id });
    }

    fn ask_for_lease(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        let free = self.scenario.rollouts_per_worker as usize - worker.running.len();
        if free == 0 || std::mem::replace(&mut worker.asking, true) {
            return;
        }
        let request = self.new_request();
        self.lease_requests.insert(request, id);
        self.send(Event::LeaseRequested {
            request,
            worker: id,
            max: free as u32,
        });
    }

    pub(super) fn worker_gets(
        &mut self,
        request: RequestId,
        worker: WorkerId,
        rollouts: Vec<LeasedRollout>,
    ) {
        assert_eq!(
            self.lease_requests.remove(&request),
            Some(worker),
            "a lease goes to whoever asked"
        );
        if self.message_fault(self.scenario.faults.lease_lost) {
            return self.lease_is_lost(worker, &rollouts);
        }
        let capacity = self.scenario.rollouts_per_worker as usize;
        for leased in rollouts {
            let running = Running {
                example: leased.example,
                turns_left: self.rng.random_range(1..=4),
                slow: self.chance(self.scenario.faults.rollout_slow),
                two_seats: self.chance(0.2),
                turns: Vec::new(),
            };
            let after = self.spread(0.01, 0.5);
            // A worker that died while it waited leaves its lease to its deadline.
            let Some(known) = self.workers.get_mut(&worker) else {
                continue;
            };
            assert!(leased.environment == known.environment && known.running.len() < capacity);
            known.running.insert(leased.rollout, running);
            self.plan(after, Action::BeginTurn(worker, leased.rollout));
        }
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        known.asking = false;
        let after = self.spread(0.01, 0.1);
        self.plan(after, Action::AskForLease(worker));
    }

    pub(super) fn worker_gets_nothing(&mut self, request: RequestId, finished: bool) {
        let id = self
            .lease_requests
            .remove(&request)
            .expect("somebody asked");
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.asking = false;
            if !finished {
                self.plan(crate::Duration(1_000), Action::AskForLease(id));
            }
        }
    }

    pub(super) fn worker_cancels(&mut self, id: WorkerId, rollout: RolloutId) {
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.running.remove(&rollout);
            self.plan(crate::Duration(1_000), Action::AskForLease(id));
            if self.message_fault(self.scenario.faults.report_late) {
                self.plan(
                    crate::Duration::from_secs(2),
                    Action::ReportsLate(id, rollout),
                );
            }
        }
    }

    fn trainer_asks(&mut self, step: Step, rank: u32, life: u32) {
        if self.trainer.dead || self.trainer.life != life {
            return;
        }
        let times = match self.message_fault(self.scenario.faults.message_repeated) {
            true => 2,
            false => 1,
        };
        for _ in 0..times {
            let request = self.new_request();
            self.trainer.requests.insert(request, rank);
            self.send(Event::BatchRequested {
                request,
                step,
                rank,
            });
        }
    }

    pub(super) fn trainer_asks_again(&mut self, request: RequestId) {
        // A trainer that died since does not ask again.
        if let Some(rank) = self.trainer.requests.remove(&request)
            && !self.is_answered(rank)
        {
            self.trainer_repeats(rank);
        }
    }

    /// Whether the trainer has all it asked for, or a repeated request of the same rank still waits: one answer is
    /// enough.
    fn is_answered(&self, rank: u32) -> bool {
        self.trainer.works || self.trainer.requests.values().any(|other| *other == rank)
    }

    pub(super) fn trainer_repeats(&mut self, rank: u32) {
        let (step, life) = (Step(self.trainer.step), self.trainer.life);
        self.plan(
            crate::Duration(1_000),
            Action::TrainerAsks(step, rank, life),
        );
    }

    pub(super) fn trainer_gets(&mut self, request: RequestId) {
        let Some(rank) = self.trainer.requests.remove(&request) else {
            return;
        };
        if self.is_answered(rank) {
            return;
        }
        let dies = self.scenario.faults.trainer_dies;
        if dies > 0.0 && self.chance(dies) {
            return self.trainer_dies();
        }
        if self.chance(self.scenario.faults.trainer_forgets) {
            return self.trainer_repeats(rank);
        }
        self.trainer.fetched.insert(rank);
        if self.trainer.fetched.len() == self.scenario.config.data_ranks as usize {
            self.trainer.fetched.clear();
            self.trainer.works = true;
            let after = self.spread(0.5, 6.0);
            let version = PolicyVersion(self.trainer.step);
            self.plan(after, Action::TrainerPublishes(version, self.trainer.life));
        }
    }

    fn trainer_publishes(&mut self, version: PolicyVersion, life: u32) {
        if self.trainer.dead || self.trainer.life != life {
            return;
        }
        self.trainer.step = version.0 + 1;
        self.trainer.works = false;
        let manifest = format!("step_{version}/manifest.json");
        self.send(Event::WeightsPublished {
            version,
            manifest,
            digest: format!("{version:0>32}"),
        });
        for rank in 0..self.scenario.config.data_ranks {
            let after = self.spread(0.01, 0.1);
            let asks = Action::TrainerAsks(Step(version.0 + 1), rank, life);
            self.plan(after, asks);
        }
        self.trainer_saves(version);
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
