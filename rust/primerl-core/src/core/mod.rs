//! The state machine: [`Core`].
//!
//! An event is taken in (`events`), then everything that follows from the new state is decided (`settle`), in the order
//! of the data flow: deadlines, batches to cut, versions to load, evaluations, leases, answers to the trainer, the end.
//! The rules stand in the modules that own them: [`crate::admission`], [`crate::batch`], [`crate::policy`],
//! [`crate::evaluation`], [`crate::group`], [`crate::rollout`].

mod advantages;
mod batches;
mod check;
mod events;
mod leases;
mod policies;
mod reasons;
mod report;
mod rollouts;
mod workers;

use crate::batch::Batches;
use crate::config::{Config, ConfigError, Role};
use crate::counters::Counters;
use crate::curriculum::Curriculum;
use crate::deadlines::{Deadlines, Due};
use crate::effect::{CancelReason, Effect};
use crate::evaluation::Round;
use crate::event::Event;
use crate::group::Group;
use crate::ids::*;
use crate::metrics::Interval;
use crate::policy::Ledger;
use crate::rollout::Rollout;
use crate::time::Time;
use crate::waits::{Armed, Waits};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// What the core knows of one environment.
#[derive(Debug, Default)]
struct Site {
    examples: Option<u32>,
    /// Slots of training groups that wait for a worker.
    queue: VecDeque<(GroupId, usize)>,
    /// Lease requests that wait, oldest first.
    requests: VecDeque<RequestId>,
    in_flight: usize,
    workers: usize,
    /// Training groups dropped since the last one that was completed.
    failed_groups: u32,
}

#[derive(Debug)]
struct Worker {
    environment: EnvironmentId,
    last_seen: Time,
    running: BTreeSet<RolloutId>,
}

#[derive(Clone, Copy, Debug)]
struct LeaseRequest {
    worker: WorkerId,
    environment: EnvironmentId,
    max: u32,
    deadline: Time,
}

#[derive(Debug, Default)]
struct Trainer {
    last_seen: Option<Time>,
    waiting_since: Option<Time>,
}

/// All decisions of one run.
pub struct Core {
    config: Config,
    rng: ChaCha8Rng,
    now: Time,
    curriculum: Curriculum,
    sites: Vec<Site>,
    /// Training groups begun and not cut.
    groups: BTreeMap<GroupId, Group>,
    /// Complete groups, in the order in which they became so.
    ready: VecDeque<GroupId>,
    /// Complete groups that wait for a custom algorithm's advantages.
    computing: BTreeMap<GroupId, Armed>,
    /// In flight.
    rollouts: BTreeMap<RolloutId, Rollout>,
    in_flight_evaluation: usize,
    workers: BTreeMap<WorkerId, Worker>,
    lease_requests: BTreeMap<RequestId, LeaseRequest>,
    ledger: Ledger,
    round: Option<Round>,
    /// Versions up to this one have had their evaluation.
    evaluated: Option<PolicyVersion>,
    next_step: Step,
    batches: Batches,
    trainer: Trainer,
    counters: Counters,
    groups_dropped: u64,
    last_cut: Interval,
    next_group: u64,
    next_rollout: u64,
    deadlines: Deadlines,
    waits: Waits,
    failures: BTreeMap<String, u64>,
    ignored: BTreeMap<&'static str, u64>,
    finished: Option<String>,
    /// Why the run has to be given up; acted on once the event is taken in.
    hopeless: Option<String>,
    effects: Vec<Effect>,
}

impl Core {
    /// # Errors
    /// What [`Config::validate`] finds.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Core {
            rng: ChaCha8Rng::seed_from_u64(config.seed),
            now: Time::default(),
            curriculum: Curriculum::new(&config),
            sites: config
                .environments
                .iter()
                .map(|_| Site::default())
                .collect(),
            groups: BTreeMap::new(),
            ready: VecDeque::new(),
            computing: BTreeMap::new(),
            rollouts: BTreeMap::new(),
            in_flight_evaluation: 0,
            workers: BTreeMap::new(),
            lease_requests: BTreeMap::new(),
            ledger: Ledger::default(),
            round: None,
            evaluated: None,
            next_step: Step(1),
            batches: Batches::default(),
            trainer: Trainer::default(),
            counters: Counters::default(),
            groups_dropped: 0,
            last_cut: Interval::default(),
            next_group: 0,
            next_rollout: 0,
            deadlines: Deadlines::default(),
            waits: Waits::default(),
            failures: BTreeMap::new(),
            ignored: BTreeMap::new(),
            finished: None,
            hopeless: None,
            effects: Vec::new(),
            config,
        })
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Takes in one event and says what to do. Time never runs backwards: an earlier `now` counts as the last one.
    pub fn handle(&mut self, event: Event, now: Time) -> Vec<Effect> {
        self.now = self.now.max(now);
        self.take_in(event);
        self.expire();
        self.settle();
        #[cfg(debug_assertions)]
        if let Err(broken) = self.check() {
            panic!("an invariant of the core is broken: {broken}");
        }
        std::mem::take(&mut self.effects)
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.next()
    }

    /// How rollouts ended so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Why weights that are published now would not be used.
    pub fn refuses_weights(&self, version: PolicyVersion, digest: &str) -> Option<String> {
        if version.0 >= self.next_step.0 {
            let last = self.next_step.0 - 1;
            return Some(format!(
                "version {version} was published, but only {last} steps were cut"
            ));
        }
        self.ledger.refuses(version, digest)
    }

    /// Why the run is over, once it is.
    pub fn finished(&self) -> Option<&str> {
        self.finished.as_deref()
    }

    fn settle(&mut self) {
        if let Some(reason) = self.hopeless.take() {
            self.end(Effect::Failed { reason });
        }
        if self.finished.is_none() {
            self.cut_batches();
            self.evaluate();
            self.update_engines();
            self.finish_if_done();
        }
        self.dispatch();
        self.answer_batch_requests();
        self.refresh_waits();
    }

    fn expire(&mut self) {
        while let Some(due) = self.deadlines.pop(self.now) {
            match due {
                Due::Rollout(rollout) => self.rollout_timed_out(rollout),
                Due::Worker(worker) => self.worker_timed_out(worker),
                Due::Lease(request) => self.lease_poll_ended(request),
                Due::Batch(request) => self.batch_poll_ended(request),
                Due::Evaluation => self.evaluation_timed_out(),
                Due::Advantages(group) => self.advantages_timed_out(group),
                Due::Wait(key) => self.warn_of_wait(key),
            }
        }
    }

    fn finish_if_done(&mut self) {
        let last = PolicyVersion(self.config.max_steps);
        let all_cut = self.next_step.0 > self.config.max_steps;
        let evaluated = self.round.is_none() && !self.is_evaluation_due(last);
        if all_cut && self.ledger.newest_proved() >= Some(last) && evaluated {
            let steps = self.config.max_steps;
            let reason = format!("all {steps} steps are trained, and version {steps} is proved");
            self.end(Effect::Finished { reason });
        }
    }

    /// Ends the run, well or badly: cancels what is in flight. Waiting requests are answered by `settle`.
    fn end(&mut self, effect: Effect) {
        let (Effect::Finished { reason } | Effect::Failed { reason }) = &effect else {
            unreachable!("{effect:?} does not end a run");
        };
        if self.finished.is_some() {
            return;
        }
        self.finished = Some(reason.clone());
        self.close_round(CancelReason::RunFinished);
        let in_flight: Vec<RolloutId> = self.rollouts.keys().copied().collect();
        for rollout in in_flight {
            let rollout = self.cancel(rollout, CancelReason::RunFinished);
            rollout.end(crate::counters::Ended::Cancelled, &mut self.counters);
        }
        self.discard_groups();
        self.effects.push(effect);
    }

    fn warn(&mut self, message: String) {
        self.effects.push(Effect::Warn { message });
    }

    fn ignore(&mut self, what: &'static str) {
        *self.ignored.entry(what).or_default() += 1;
    }

    fn name(&self, environment: EnvironmentId) -> &str {
        &self.config.environment(environment).name
    }

    fn is_training(&self, environment: EnvironmentId) -> bool {
        self.config.environment(environment).role == Role::Train
    }
}

#[cfg(test)]
mod tests;
