//! A whole run in virtual time: engines that load and serve versions, workers that run rollouts, a trainer, and faults,
//! all from one seed. The core under test is the real one; a failing seed is a unit test.

mod actors;
mod custom;
mod messages;
mod restarts;
mod turns;

use crate::config::Config;
use crate::core::Core;
use crate::effect::Effect;
use crate::event::Event;
use crate::ids::*;
use crate::testing::observer::Observer;
use crate::time::{Duration, Time};
use actors::{Action, Engine, Trainer, Worker};
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
    /// The trainer dies when it has a batch, and goes on from its last checkpoint.
    pub trainer_dies: f64,
    /// The orchestrator is restarted some seconds after it started.
    pub orchestrator_dies: f64,
    /// The answer to a lease request never reaches the worker, whose next heartbeats do not name the rollouts.
    pub lease_lost: f64,
    /// An event comes twice: a worker's report, a trainer's request.
    pub message_repeated: f64,
    /// A worker goes on with a rollout that was taken from it, and reports a turn and the end of it.
    pub report_late: f64,
    /// An engine, from its start to its death, takes many times longer than usual.
    pub engine_slow: f64,
}

/// A component that is killed for good, to see that someone is told.
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
    pub rewards: Rewards,
    /// Requests an engine works on without getting slower; with more of them, all take proportionally longer. Engines
    /// report their load by it; `None`: they report nothing and never get slower.
    pub engine_capacity: Option<u32>,
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
    workers: BTreeMap<WorkerId, Worker>,
    /// Which worker a lease request is from.
    lease_requests: BTreeMap<RequestId, WorkerId>,
    trainer: Trainer,
    next_request: u64,
    next_worker: u64,
    next_token: u32,
    pub events: u64,
    /// What a journal would hold: the core as it was at some time, and every event since.
    snapshot: Core,
    journal: Vec<(Time, Event)>,
    pub late_reports: u64,
    /// Every event, if it is set before the run.
    pub recorded: Option<Vec<(Time, Event)>>,
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
            workers: BTreeMap::new(),
            lease_requests: BTreeMap::new(),
            trainer: Trainer::default(),
            next_request: 0,
            next_worker: 0,
            next_token: 1,
            events: 0,
            snapshot: core.clone(),
            journal: Vec::new(),
            recorded: None,
            core,
            late_reports: 0,
            scenario,
        };
        simulator.start();
        simulator
    }

    /// Plays on until the core says `Finished` (returns the reason), or until `give_up` (returns `None`).
    pub fn run(&mut self) -> Option<String> {
        while self.observer.finished.is_none() {
            let planned = self.agenda.first_key_value().map(|((at, _), _)| *at);
            let next = [planned, self.core.next_deadline()]
                .into_iter()
                .flatten()
                .min()?;
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
        self.observer.finished.clone()
    }

    fn start(&mut self) {
        for engine in 0..self.scenario.engines {
            let at = self.spread(0.1, 3.0);
            self.plan(at, Action::EngineStarts(EngineId(engine)));
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

    /// Gives an event to the core, and carries out what it says.
    fn send(&mut self, event: Event) {
        self.events += 1;
        if self.scenario.faults.orchestrator_dies > 0.0 {
            self.journal.push((self.now, event.clone()));
        }
        if let Some(recorded) = &mut self.recorded {
            recorded.push((self.now, event.clone()));
        }
        self.observer.saw_event(&event, self.now);
        let effects = self.core.handle(event, self.now);
        self.core.check().expect("the core's invariants hold");
        for effect in &effects {
            self.observer.saw_effect(effect);
        }
        self.observer.after_event(self.now);
        effects
            .into_iter()
            .for_each(|effect| self.carry_out(effect));
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Lease {
                request,
                worker,
                rollouts,
            } => self.worker_gets(request, worker, rollouts),
            Effect::NoLease {
                request, finished, ..
            } => self.worker_gets_nothing(request, finished),
            Effect::CancelRollout {
                rollout,
                worker: Some(worker),
                ..
            } => self.worker_cancels(worker, rollout),
            Effect::UpdateEngine {
                engine, version, ..
            } => self.engine_updates(engine, version),
            Effect::ComputeAdvantages { request } => self.compute_advantages(&request),
            Effect::Batch { request, .. } => self.trainer_gets(request),
            Effect::BatchNotReady { request, .. } => self.trainer_asks_again(request),
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
mod message_tests;
#[cfg(test)]
mod tests;
