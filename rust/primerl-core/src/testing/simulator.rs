//! A whole run in virtual time: engines that load and serve versions, workers that run rollouts, a trainer, and faults,
//! all from one seed. The core under test is the real one; a failing seed is a unit test.

mod actors;
pub mod batching;
mod custom;
mod disk;
mod engines;
mod messages;
mod process;
mod restarts;
pub mod scenarios;
mod trainer;
mod turns;
mod workers;

use crate::Core;
use crate::config::Config;
use crate::effect::Effect;
use crate::event::Event;
use crate::ids::*;
use crate::testing::observer::Observer;
use crate::testing::witness::Witness;
use crate::time::{Duration, Time};
use actors::{Action, Asked, Engine, Trainer, Worker};
use batching::EngineModel;
use disk::Disk;
use process::{Process, Reply, Withheld};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;

/// Probabilities of what can go wrong, each per opportunity.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A rollout's environment fails.
    pub rollout_fails: f64,
    /// A rollout ends well with nothing sampled.
    pub rollout_empty: f64,
    /// A rollout is cut short by its environment.
    pub rollout_truncated: f64,
    /// A custom algorithm answers with an error, with nonsense, or not at all.
    pub advantages_fail: f64,
    /// A rollout never reports.
    pub rollout_hangs: f64,
    /// A rollout takes many times longer than usual.
    pub rollout_slow: f64,
    /// A worker dies at a heartbeat; another one takes its place after a while.
    pub worker_dies: f64,
    /// An engine fails to load a version, and comes back after a while.
    pub engine_fails: f64,
    /// An engine dies between two loads, likewise.
    pub engine_dies: f64,
    /// The trainer loses an answer and asks for the same batch again.
    pub trainer_forgets: f64,
    /// The trainer dies when it has a batch, and resumes from its last checkpoint.
    pub trainer_dies: f64,
    /// The orchestrator is restarted some seconds after it started.
    pub orchestrator_dies: f64,
    /// The answer to a lease request never reaches the worker, whose next heartbeats do not name the rollouts.
    pub lease_lost: f64,
    /// An event comes twice: a worker's report, a trainer's request.
    pub message_repeated: f64,
    /// A worker continues a rollout that was taken from it, and reports a turn and the end of it.
    pub report_late: f64,
    /// An engine, from its start to its death, takes many times longer than usual.
    pub engine_slow: f64,
    /// `None`: whatever is written is on disk at once.
    pub disk: Option<DiskFaults>,
}

/// A disk that takes its time, so that what is on its way to it is lost when the orchestrator dies. What a journal's
/// event leads to is seen outside only when the event is safe, as the orchestrator's driver does it.
#[derive(Clone, Copy, Debug, Default)]
pub struct DiskFaults {
    /// A write takes seconds instead of milliseconds.
    pub slow: f64,
    /// A write fails, which ends the orchestrator; it is started again once the disk works.
    pub fails: f64,
    /// The orchestrator dies with its machine, and all that is not synced.
    pub power_fails: f64,
    /// At a restart the newest snapshot cannot be read.
    pub snapshot_damaged: f64,
}

/// A component that is killed for good, to see that this is reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kill {
    Workers,
    Engines,
    Trainer,
}

/// What rollouts are rewarded with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rewards {
    /// Any number from 0 to 1, so that no two are equal.
    Numbers,
    /// 0 or 1. Of three examples one mostly gets 1, one mostly 0, and one either.
    Verdicts,
    /// Always 1: no group has a signal.
    Ones,
}

#[derive(Clone, Debug)]
pub struct Scenario {
    pub seed: u64,
    pub config: Config,
    pub engines: u32,
    pub workers_per_environment: u32,
    pub rollouts_per_worker: u32,
    pub examples: u32,
    /// Environments reward whole groups.
    pub whole_groups: bool,
    pub rewards: Rewards,
    pub engine_model: EngineModel,
    /// Tokens; above 8 every other answer is longer than that, and few are that long.
    pub longest_answer: u32,
    pub faults: Faults,
    pub kill: Option<(Time, Kill)>,
    /// The simulation is stopped then, if the run has not ended.
    pub give_up: Time,
}

/// A running simulation. [`Simulator::run`] plays it to the end of the run or to `give_up`.
pub struct Simulator {
    pub core: Core,
    pub observer: Observer,
    scenario: Scenario,
    rng: ChaCha8Rng,
    /// Faults of messages have a generator of their own: without them a seed gives the run it always gave.
    message_rng: ChaCha8Rng,
    now: Time,
    agenda: BTreeMap<(Time, u64), Action>,
    sequence: u64,
    engines: BTreeMap<EngineId, Engine>,
    /// What engines are asked for.
    asked: BTreeMap<RolloutId, Asked>,
    workers: BTreeMap<WorkerId, Worker>,
    /// Which worker a lease request is from.
    lease_requests: BTreeMap<RequestId, WorkerId>,
    trainer: Trainer,
    next_request: u64,
    next_worker: u64,
    /// Worker processes so far.
    processes: u64,
    next_token: u32,
    pub events: u64,
    /// What the outside has seen, which no restart may take back.
    pub witness: Witness,
    disk: Disk,
    process: Process,
    /// So far the core's clock is behind: it stands still while there is no orchestrator.
    behind: Duration,
    pub restarts: Restarts,
    /// Why the run is over, once it is recorded that it is.
    ended: Option<String>,
    pub late_reports: u64,
    /// Every event, if it is set before the run.
    pub recorded: Option<Vec<(Time, Event)>>,
}

/// What the restarts of a simulation were like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Restarts {
    pub kills: u64,
    pub power_losses: u64,
    pub disk_failures: u64,
    /// Events that had happened and were not on disk.
    pub lost_events: u64,
    /// Batches that were cut for good and not written.
    pub lost_batches: u64,
    pub damaged_snapshots: u64,
    /// Workers that were unknown by then.
    pub lost_workers: u64,
    /// Rollouts that a worker ran and that were unknown by then.
    pub lost_leases: u64,
    /// Answers that an agent had seen and that were lost.
    pub lost_turns: u64,
    /// Results reported again for lack of an answer.
    pub repeated_reports: u64,
}

impl Simulator {
    /// # Panics
    /// If the scenario's config is not valid.
    pub fn new(scenario: Scenario) -> Self {
        let core = Core::new(scenario.config.clone()).expect("a scenario has a valid config");
        let mut simulator = Simulator {
            observer: Observer::new(scenario.config.clone()),
            rng: ChaCha8Rng::seed_from_u64(scenario.seed),
            message_rng: ChaCha8Rng::seed_from_u64(scenario.seed ^ 0x6d65_7373),
            now: Time(0),
            agenda: BTreeMap::new(),
            sequence: 0,
            engines: BTreeMap::new(),
            asked: BTreeMap::new(),
            workers: BTreeMap::new(),
            lease_requests: BTreeMap::new(),
            trainer: Trainer::default(),
            next_request: 0,
            next_worker: 0,
            processes: 0,
            next_token: 1,
            events: 0,
            witness: Witness::default(),
            disk: Disk::new(&scenario, core.clone()),
            process: Process::new(0),
            behind: Duration(0),
            restarts: Restarts::default(),
            ended: None,
            recorded: None,
            core,
            late_reports: 0,
            scenario,
        };
        simulator.process.serves = true;
        simulator.start();
        simulator
    }

    /// Plays on until the core says `Finished` (returns the reason), or until `give_up` (returns `None`).
    pub fn run(&mut self) -> Option<String> {
        while self.ended.is_none() {
            let planned = self.agenda.first_key_value().map(|((at, _), _)| *at);
            let deadline = self.core.next_deadline().filter(|_| self.process.serves);
            let deadline = deadline.map(|at| at + self.behind);
            let next = [planned, deadline].into_iter().flatten().min()?;
            if next > self.scenario.give_up {
                return None;
            }
            self.now = self.now.max(next);
            if planned == Some(next) {
                let (_, action) = self.agenda.pop_first().expect("it is planned");
                self.act(action);
            } else {
                self.send(Event::Tick);
            }
        }
        self.ended.clone()
    }

    fn start(&mut self) {
        for engine in 0..self.scenario.engines {
            let at = self.spread(0.1, 3.0);
            self.plan(at, Action::EngineStarts(EngineId(engine), 0));
        }
        for environment in 0..self.scenario.config.environments.len() {
            for _ in 0..self.scenario.workers_per_environment {
                let at = self.spread(0.1, 5.0);
                self.plan(at, Action::WorkerStarts(EnvironmentId(environment as u32)));
            }
        }
        let at = self.spread(0.1, 4.0);
        self.plan(at, Action::TrainerPublishes(PolicyVersion(0), 0));
        self.plan_restart();
        if let Some((at, kill)) = self.scenario.kill {
            self.agenda.insert((at, u64::MAX), Action::Kill(kill));
        }
    }

    fn core_now(&self) -> Time {
        Time(self.now.0 - self.behind.0)
    }

    /// Gives an event to the core, and carries out what it says, as far as that need not wait for the disk. Returns the
    /// event's number.
    fn send(&mut self, event: Event) -> u64 {
        self.events += 1;
        let now = self.core_now();
        let number = self.disk.append(now, &event);
        if let Some(recorded) = &mut self.recorded {
            recorded.push((now, event.clone()));
        }
        self.observer.saw_event(&event, now);
        let effects = self.core.handle(event, now);
        self.core.check().expect("the core's invariants hold");
        for effect in &effects {
            self.observer.saw_effect(effect);
        }
        self.observer.after_event(now);
        for effect in effects {
            match effect {
                effect if effect.is_durable() => self.withhold(number, Withheld::Effect(effect)),
                effect if self.process.withholds_what_goes_before(&effect) => {
                    self.withhold(number, Withheld::Effect(effect));
                }
                // A worker that learns of it leaves, and is missed if the run is not over after all.
                effect @ Effect::NoLease { finished: true, .. } => {
                    self.withhold_reply(number, Reply::Over(effect));
                }
                effect => self.carry_out(effect),
            }
        }
        self.take_snapshot_if_due(number);
        self.write_what_waits();
        number
    }

    /// Sends what somebody waits for the answer to, who gets it when the event is safe enough.
    fn ask(&mut self, event: Event, reply: Reply) {
        let number = self.send(event);
        self.withhold_reply(number, reply);
        self.write_what_waits();
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Lease {
                request,
                worker,
                rollouts,
            } => {
                self.process.opened(worker, &rollouts, self.now);
                self.worker_gets(request, worker, rollouts);
            }
            Effect::RolloutClosed { rollout } => {
                self.process.closed(rollout);
                self.abort_request(rollout);
            }
            Effect::NoLease {
                request, finished, ..
            } => self.worker_gets_nothing(request, finished),
            Effect::NoMoreBatches { request } => {
                self.trainer.requests.remove(&request);
            }
            // Where there is a disk, the worker learns of it at its next heartbeat.
            Effect::CancelRollout {
                rollout,
                worker: Some(worker),
                ..
            } if self.disk.is_instant() => self.worker_cancels(worker, rollout),
            Effect::UpdateEngine {
                engine, version, ..
            } => self.engine_updates(engine, version),
            Effect::ComputeAdvantages { request } => self.compute_advantages(&request),
            Effect::ScoreByTeacher { request } => self.score_by_teacher(&request),
            Effect::BatchNotReady { request, .. } => self.trainer_asks_again(request),
            effect @ Effect::Batch { .. } => match self.disk.is_instant() {
                true => self.record(Withheld::Effect(effect)),
                false => self.give_recorder(Withheld::Effect(effect)),
            },
            _ => {}
        }
    }

    fn plan(&mut self, after: Duration, action: Action) {
        self.sequence += 1;
        self.agenda
            .insert((self.now + after, self.sequence), action);
    }

    fn chance(&mut self, probability: f64) -> bool {
        self.rng.random_bool(probability)
    }

    /// A random span between two numbers of seconds.
    fn spread(&mut self, low: f64, high: f64) -> Duration {
        Duration::from_secs_f64(self.rng.random_range(low..high))
    }

    fn new_request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }
}

#[cfg(test)]
mod disk_tests;
#[cfg(test)]
mod message_tests;
#[cfg(test)]
mod tests;
