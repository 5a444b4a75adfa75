//! The state machine: [`Core`].
//!
//! An event is taken in (`events`), then everything that follows from the new state is decided (`settle`), in the order
//! of the data flow: deadlines, batches to cut, versions to load, evaluations, leases, answers to the trainer, the end.
//! The rules stand in the modules that own them: [`crate::admission`], [`crate::batch`], [`crate::policy`],
//! [`crate::evaluation`], [`crate::group`], [`crate::rollout`].

mod check;
mod events;
mod inspect;
mod restart;

pub use inspect::{BatchWait, EngineView, NoRollouts, WorkerView};
pub use restart::{Listed, OpenRollout, OpenWorker};

use crate::admission::Limits;
use crate::batch::Batches;
use crate::config::{Config, ConfigError, Role};
use crate::counters::{Attempts, Counters, Losses};
use crate::curriculum::Curriculum;
use crate::curriculum::Rest;
use crate::deadlines::{Deadlines, Due};
use crate::effect::{CancelReason, Effect};
use crate::evaluation::Round;
use crate::event::Event;
use crate::failure::{ErrorCounts, ErrorKind, FirstError};
use crate::group::Group;
use crate::ids::*;
use crate::metrics::Interval;
use crate::policy::Ledger;
use crate::rollout::{Remains, Rollout};
use crate::time::Time;
use crate::wait::{Armed, Waits};
use crate::worker::Blocked;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// Ended rollouts that an event frees on its way.
const FREED_PER_EVENT: usize = 32;

/// What the core knows of one environment.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Site {
    pub(crate) examples: Option<u32>,
    /// Groups are run whole, each by one worker ([`crate::group`]).
    #[serde(default)]
    pub(crate) whole_groups: bool,
    /// Slots of training groups that wait for a worker. The oldest group is served first, so retries go before what
    /// was drawn later.
    pub(crate) queue: BTreeSet<(GroupId, usize)>,
    /// Lease requests that wait, by their order of arrival.
    pub(crate) requests: BTreeMap<u64, RequestId>,
    pub(crate) in_flight: usize,
    pub(crate) workers: usize,
    /// When work last waited for a worker without one asking: since then nobody has asked.
    pub(crate) unasked_since: Time,
    /// Nobody came for its work for too long: it gives up its turns until a worker asks.
    pub(crate) absent: bool,
    /// Groups taken out of the queue meanwhile. They hold no place; they go on when the environment has its turn.
    pub(crate) set_aside: BTreeSet<GroupId>,
    /// Training groups dropped since the last one that was completed.
    pub(crate) failed_groups: u32,
    /// Groups dropped in a row, as their first prompts are longer than the context.
    #[serde(default)]
    pub(crate) too_long_groups: u32,
    /// Nothing came of it, and others go on.
    #[serde(default)]
    pub(crate) rest: Option<Rest>,
    #[serde(default)]
    pub(crate) attempts: Attempts,
    /// Since the run began.
    #[serde(default)]
    pub(crate) errors: ErrorCounts,
    /// The first of each kind that was reported.
    #[serde(default)]
    pub(crate) first_errors: BTreeMap<ErrorKind, FirstError>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Worker {
    pub(crate) environment: EnvironmentId,
    pub(crate) name: String,
    pub(crate) last_seen: Time,
    pub(crate) running: BTreeSet<RolloutId>,
    #[serde(default)]
    pub(crate) blocked: Option<Blocked>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct LeaseRequest {
    pub(crate) worker: WorkerId,
    pub(crate) environment: EnvironmentId,
    pub(crate) max: u32,
    pub(crate) deadline: Time,
    /// Its place in its environment's queue of requests.
    pub(crate) place: u64,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Trainer {
    pub(crate) last_seen: Option<Time>,
    pub(crate) waiting_since: Option<Time>,
}

/// All decisions of one run. Plain data: a copy of it and the events since are the run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Core {
    pub(crate) config: Config,
    pub(crate) rng: ChaCha8Rng,
    pub(crate) now: Time,
    pub(crate) curriculum: Curriculum,
    pub(crate) sites: Vec<Site>,
    /// Training groups begun and not cut.
    pub(crate) groups: BTreeMap<GroupId, Group>,
    /// Complete groups, in the order in which they became so.
    pub(crate) ready: BTreeSet<(u64, GroupId)>,
    pub(crate) next_ready: u64,
    /// Complete groups that wait for a custom algorithm's advantages.
    pub(crate) computing: BTreeMap<GroupId, Armed>,
    /// Complete groups that wait for the teacher's log-probabilities.
    #[serde(default)]
    pub(crate) scoring: BTreeMap<GroupId, Armed>,
    /// In flight. Boxed: a tree moves its entries about.
    pub(crate) rollouts: BTreeMap<RolloutId, Box<Rollout>>,
    /// Training rollouts that have sampled something, in flight or finished and not cut, by their oldest version; and
    /// where they belong.
    pub(crate) by_age: BTreeMap<(PolicyVersion, RolloutId), (GroupId, usize)>,
    pub(crate) in_flight_evaluation: usize,
    /// Cancelled together with many others; freed a few at a time, for that takes longer than all the rest. No part of
    /// the state: a snapshot leaves it out.
    #[serde(skip)]
    pub(crate) remains: Vec<Remains>,
    pub(crate) workers: BTreeMap<WorkerId, Worker>,
    pub(crate) lease_requests: BTreeMap<RequestId, LeaseRequest>,
    pub(crate) next_place: u64,
    pub(crate) ledger: Ledger,
    pub(crate) limits: Limits,
    pub(crate) round: Option<Round>,
    /// Of a run that only evaluates: its round, when that has ended.
    #[serde(default)]
    pub(crate) measured: Option<Round>,
    /// Versions up to this one have had their evaluation.
    pub(crate) evaluated: Option<PolicyVersion>,
    pub(crate) next_step: Step,
    pub(crate) batches: Batches,
    pub(crate) trainer: Trainer,
    /// When a group last had a signal, or the run was started again.
    #[serde(default)]
    pub(crate) signal_at: Time,
    pub(crate) counters: Counters,
    pub(crate) losses: Losses,
    pub(crate) last_cut: Interval,
    pub(crate) next_group: u64,
    pub(crate) next_rollout: u64,
    pub(crate) next_worker: u64,
    pub(crate) deadlines: Deadlines,
    pub(crate) waits: Waits,
    pub(crate) ignored: BTreeMap<String, u64>,
    pub(crate) finished: Option<String>,
    /// It is over because it failed.
    pub(crate) failed: bool,
    /// Why the run has to be given up; acted on once the event is taken in.
    pub(crate) hopeless: Option<String>,
    /// Nothing is left to be decided: an event that changes nothing that decisions rest on needs none. No part of the
    /// state: deciding once more changes nothing.
    #[serde(skip)]
    pub(crate) settled: bool,
    /// Of the event that is being handled; empty between events.
    #[serde(skip)]
    pub(crate) effects: Vec<Effect>,
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
            ready: BTreeSet::new(),
            next_ready: 0,
            computing: BTreeMap::new(),
            scoring: BTreeMap::new(),
            rollouts: BTreeMap::new(),
            by_age: BTreeMap::new(),
            in_flight_evaluation: 0,
            remains: Vec::new(),
            workers: BTreeMap::new(),
            lease_requests: BTreeMap::new(),
            next_place: 0,
            ledger: match config.without_engines {
                true => Ledger::without_engines(),
                false => Ledger::default(),
            },
            limits: Limits::default(),
            round: None,
            measured: None,
            evaluated: None,
            next_step: Step(1),
            batches: Batches::default(),
            trainer: Trainer::default(),
            signal_at: Time::default(),
            counters: Counters::default(),
            losses: Losses::default(),
            last_cut: Interval::default(),
            next_group: 0,
            next_rollout: 0,
            next_worker: 0,
            deadlines: Deadlines::default(),
            waits: Waits::default(),
            ignored: BTreeMap::new(),
            finished: None,
            failed: false,
            hopeless: None,
            settled: false,
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
        let decides_nothing = event.is_only_noted();
        self.take_in(event);
        let expired = self.expire();
        // What such an event leads to, it says by an effect.
        if decides_nothing && self.settled && !expired && self.effects.is_empty() {
            self.stay_settled();
        } else {
            self.settle();
        }
        #[cfg(debug_assertions)]
        if let Err(broken) = self.check() {
            panic!("an invariant of the core is broken: {broken}");
        }
        let kept = self.remains.len().saturating_sub(FREED_PER_EVENT);
        self.remains.truncate(kept);
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

    /// What was lost so far, and why.
    pub fn losses(&self) -> &Losses {
        &self.losses
    }

    /// Why weights that are published now would not be used.
    pub fn refuses_weights(&self, version: PolicyVersion, digest: &str) -> Option<String> {
        if version.0 >= self.next_step.0 {
            let last = self.next_step.0 - 1;
            return Some(format!(
                "version {version} was published, but only {last} steps were cut"
            ));
        }
        self.ledger.refuses(version, digest).or_else(|| {
            let fetched = self.batches.newest_trainable().map_or(0, |step| step.0);
            (version.0 > fetched).then(|| {
                format!(
                    "version {version} was published, but its trainer has not fetched the batch of step {version}: it \
                     cannot have trained that step"
                )
            })
        })
    }

    /// Why the run is over, once it is.
    pub fn finished(&self) -> Option<&str> {
        self.finished.as_deref()
    }

    pub(crate) fn settle(&mut self) {
        if let Some(reason) = self.hopeless.take() {
            self.end(Effect::Failed { reason });
        }
        let wanted = self.ledger.wanted();
        if self.finished.is_none() {
            self.cut_batches();
            self.evaluate();
            self.update_engines();
            self.finish_if_done();
        }
        self.dispatch();
        self.answer_batch_requests();
        self.refresh_waits();
        // Another version may be one to evaluate; a run without hope ends with the next event.
        self.settled = self.hopeless.is_none() && self.ledger.wanted() == wanted;
    }

    /// [`Core::settle`] where only time has passed: work that nobody asks for may go to others. Most events are turns
    /// and signs of life, and come here.
    pub(crate) fn stay_settled(&mut self) {
        self.dispatch();
        if !self.effects.is_empty() {
            self.refresh_waits();
        }
        #[cfg(debug_assertions)]
        self.assert_settled();
    }

    /// Returns whether something was due.
    pub(crate) fn expire(&mut self) -> bool {
        let mut any = false;
        while let Some(due) = self.deadlines.pop(self.now) {
            any = true;
            match due {
                Due::Rollout(rollout) => self.rollout_timed_out(rollout),
                Due::Worker(worker) => self.worker_timed_out(worker),
                Due::Lease(request) => self.lease_poll_ended(request),
                Due::Batch(request) => self.batch_poll_ended(request),
                Due::Evaluation => self.evaluation_timed_out(),
                Due::Advantages(group) => self.advantages_timed_out(group),
                Due::Teacher(group) => self.teacher_timed_out(group),
                Due::Wait(key) => self.warn_of_wait(key),
                // Work is handed out once the event is taken in.
                Due::Rest(_) => {}
            }
        }
        any
    }

    pub(crate) fn finish_if_done(&mut self) {
        let last = PolicyVersion(self.config.max_steps);
        let all_cut = self.next_step.0 > self.config.max_steps;
        let evaluated = self.round.is_none() && !self.is_evaluation_due(last);
        if all_cut && self.ledger.newest_proved() >= Some(last) && evaluated {
            let reason = match self.config.max_steps {
                0 => "everything is evaluated".to_owned(),
                steps => format!("all {steps} steps are trained, and version {steps} is proved"),
            };
            self.end(Effect::Finished { reason });
        }
    }

    /// Ends the run, well or badly: cancels what is in flight. Waiting requests are answered by `settle`.
    pub(crate) fn end(&mut self, effect: Effect) {
        let (Effect::Finished { reason } | Effect::Failed { reason }) = &effect else {
            unreachable!("{effect:?} does not end a run");
        };
        if self.finished.is_some() {
            return;
        }
        self.finished = Some(reason.clone());
        self.failed = matches!(effect, Effect::Failed { .. });
        self.close_round(CancelReason::RunFinished);
        let in_flight: Vec<RolloutId> = self.rollouts.keys().copied().collect();
        for rollout in in_flight {
            let rollout = self.cancel(rollout, CancelReason::RunFinished);
            rollout.end(crate::counters::Ended::Cancelled, &mut self.counters);
        }
        self.discard_groups();
        self.effects.push(effect);
    }

    pub(crate) fn warn(&mut self, message: String) {
        self.effects.push(Effect::Warn { message });
    }

    pub(crate) fn ignore(&mut self, what: &'static str) {
        *self.ignored.entry(what.to_owned()).or_default() += 1;
    }

    pub(crate) fn name(&self, environment: EnvironmentId) -> &str {
        &self.config.environment(environment).name
    }

    pub(crate) fn is_training(&self, environment: EnvironmentId) -> bool {
        self.config.environment(environment).role == Role::Train
    }
}

#[cfg(test)]
mod tests;
