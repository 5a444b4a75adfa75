//! The state machine: [`Core`].
//!
//! [`Core::handle`] applies an event (`events`), then decides everything that follows from the new state (`settle`), in
//! the order of the data flow: deadlines, batches to cut, evaluations, versions to load, leases, answers to the trainer,
//! the end. Each stage's module holds its state, its rules and its transitions, which are methods of [`Core`].

mod check;
mod events;
mod layout;
mod restart;
mod views;

pub use crate::wait::{BatchWait, NoRollouts};
pub use restart::{Listed, OpenRollout, OpenWorker};
pub use views::{EngineView, WorkerView};

use crate::admission::Limits;
use crate::batch::{Batches, Trainer};
use crate::config::{Config, ConfigError, Role};
use crate::counters::{CancelReason, Counters, Discards, Ended, Tally};
use crate::curriculum::Curriculum;
use crate::deadlines::{Deadlines, Due};
use crate::effect::Effect;
use crate::environment::Environments;
use crate::evaluation::Evaluations;
use crate::event::Event;
use crate::group::Groups;
use crate::ids::*;
use crate::policy::Ledger;
use crate::rollout::{Leases, Rollouts};
use crate::signal::{Signals, Source};
use crate::time::Time;
use crate::wait::Waits;
use crate::worker::Workers;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// All decisions of one run. Plain data: a copy of it and the events since are the run.
#[derive(Clone, Debug)]
pub struct Core {
    pub(crate) config: Config,
    pub(crate) rng: ChaCha8Rng,
    pub(crate) now: Time,
    pub(crate) deadlines: Deadlines,
    pub(crate) curriculum: Curriculum,
    pub(crate) environments: Environments,
    pub(crate) groups: Groups,
    pub(crate) signals: Signals,
    pub(crate) rollouts: Rollouts,
    pub(crate) leases: Leases,
    pub(crate) workers: Workers,
    pub(crate) ledger: Ledger,
    pub(crate) limits: Limits,
    pub(crate) evaluations: Evaluations,
    /// The next step to be cut.
    pub(crate) next_step: Step,
    pub(crate) batches: Batches,
    pub(crate) trainer: Trainer,
    pub(crate) tally: Tally,
    pub(crate) waits: Waits,
    pub(crate) ending: Ending,
    /// Nothing is left to be decided: an event that changes nothing that decisions rest on needs none. Not part of the
    /// state: deciding once more changes nothing.
    settled: bool,
    /// Effects of the event that is being handled; empty between events.
    pub(crate) effects: Vec<Effect>,
}

/// How the run ended.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ending {
    /// Why it is over, once it is.
    pub finished: Option<String>,
    /// It is over because it failed.
    pub failed: bool,
    /// Why the run has to be given up; it ends when the event has been applied.
    pub hopeless: Option<String>,
}

impl Core {
    /// # Errors
    /// What [`Config::validate`] finds.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        config.validate()?;
        Ok(Core::begin(config))
    }

    fn begin(config: Config) -> Self {
        Core {
            rng: ChaCha8Rng::seed_from_u64(config.run.seed),
            now: Time::default(),
            deadlines: Deadlines::default(),
            curriculum: Curriculum::new(&config),
            environments: Environments::new(config.environments.len()),
            groups: Groups::default(),
            signals: Signals::default(),
            rollouts: Rollouts::default(),
            leases: Leases::default(),
            workers: Workers::default(),
            ledger: match config.without_engines {
                true => Ledger::without_engines(),
                false => Ledger::default(),
            },
            limits: Limits::default(),
            evaluations: Evaluations::default(),
            next_step: Step(1),
            batches: Batches::default(),
            trainer: Trainer::default(),
            tally: Tally::default(),
            waits: Waits::default(),
            ending: Ending::default(),
            settled: false,
            effects: Vec::new(),
            config,
        }
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Applies one event and returns what to do. Time never runs backwards: an earlier `now` counts as the last one.
    pub fn handle(&mut self, event: Event, now: Time) -> Vec<Effect> {
        self.now = self.now.max(now);
        let decides_nothing = event.is_only_noted();
        self.apply(event);
        let expired = self.expire();
        // Such an event reports by an effect that something follows from it.
        if decides_nothing && self.settled && !expired && self.effects.is_empty() {
            self.stay_settled();
        } else {
            self.settle();
        }
        #[cfg(debug_assertions)]
        if let Err(broken) = self.check() {
            panic!("an invariant of the core is broken: {broken}");
        }
        self.rollouts.free_some();
        std::mem::take(&mut self.effects)
    }

    /// When [`Event::Tick`] is due at the latest.
    pub fn next_deadline(&self) -> Option<Time> {
        self.deadlines.next()
    }

    /// Time of the last event.
    pub fn now(&self) -> Time {
        self.now
    }

    /// The next step to be cut.
    pub fn next_step(&self) -> Step {
        self.next_step
    }

    /// How rollouts ended so far.
    pub fn counters(&self) -> Counters {
        self.tally.counters
    }

    /// What was discarded so far, and why.
    pub fn discards(&self) -> &Discards {
        &self.tally.discards
    }

    /// Why the run is over, once it is.
    pub fn finished(&self) -> Option<&str> {
        self.ending.finished.as_deref()
    }

    /// Whether the run has ended without failing: nothing is left to do.
    pub fn is_over(&self) -> bool {
        self.ending.finished.is_some() && !self.ending.failed
    }

    fn settle(&mut self) {
        if let Some(reason) = self.ending.hopeless.take() {
            self.end(Effect::Failed { reason });
        }
        let wanted = self.ledger.wanted();
        self.advance();
        self.dispatch();
        self.answer_batch_requests();
        self.refresh_waits();
        // Another version may be one to evaluate; a run without hope ends with the next event.
        self.settled = self.ending.hopeless.is_none() && self.ledger.wanted() == wanted;
    }

    fn advance(&mut self) {
        if self.ending.finished.is_none() {
            self.cut_batches();
            self.evaluate();
            self.update_engines();
            self.finish_if_done();
        }
    }

    /// [`Core::settle`] where only time has passed: work that no worker asks for may go to others. Most events are turns
    /// and signs of life, and come here.
    fn stay_settled(&mut self) {
        self.dispatch();
        if !self.effects.is_empty() {
            self.refresh_waits();
        }
        #[cfg(debug_assertions)]
        self.assert_settled();
    }

    /// Returns whether something was due.
    fn expire(&mut self) -> bool {
        let mut any = false;
        while let Some(due) = self.deadlines.pop(self.now) {
            any = true;
            match due {
                Due::Rollout(rollout) => self.rollout_timed_out(rollout),
                Due::Worker(worker) => self.worker_timed_out(worker),
                Due::Lease(request) => self.lease_poll_ended(request),
                Due::Batch(request) => self.batch_poll_ended(request),
                Due::Evaluation => self.evaluation_timed_out(),
                Due::Advantages(group) => self.signal_timed_out(Source::Custom, group),
                Due::Teacher(group) => self.signal_timed_out(Source::Teacher, group),
                Due::Wait(wait) => self.warn_of_wait(wait),
                // Work is handed out once the event is applied.
                Due::Rest(_) => {}
            }
        }
        any
    }

    fn finish_if_done(&mut self) {
        let last = PolicyVersion(self.config.run.max_steps);
        let evaluated = self.evaluations.round.is_none() && !self.is_evaluation_due(last);
        if self.all_steps_cut() && self.ledger.newest_proved() >= Some(last) && evaluated {
            let reason = match self.config.run.max_steps {
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
        if self.ending.finished.is_some() {
            return;
        }
        self.ending.finished = Some(reason.clone());
        self.ending.failed = matches!(effect, Effect::Failed { .. });
        self.close_round(CancelReason::RunFinished);
        let in_flight: Vec<RolloutId> = self.rollouts.in_flight.keys().copied().collect();
        for rollout in in_flight {
            let rollout = self.cancel(rollout, CancelReason::RunFinished);
            rollout.end(Ended::Cancelled, &mut self.tally.counters);
        }
        self.discard_groups();
        self.effects.push(effect);
    }

    pub(crate) fn all_steps_cut(&self) -> bool {
        self.next_step.0 > self.config.run.max_steps
    }

    pub(crate) fn warn(&mut self, message: String) {
        self.effects.push(Effect::Warn { message });
    }

    pub(crate) fn ignore(&mut self, what: &'static str) {
        *self.tally.ignored.entry(what.to_owned()).or_default() += 1;
    }

    pub(crate) fn name(&self, environment: EnvironmentId) -> &str {
        &self.config.environment(environment).name
    }

    pub(crate) fn is_training(&self, environment: EnvironmentId) -> bool {
        self.config.environment(environment).role == Role::Train
    }

    /// Environments that are trained on.
    pub(crate) fn training_environments(&self) -> impl Iterator<Item = EnvironmentId> + '_ {
        let ids = self.config.environment_ids().map(|(id, _)| id);
        ids.filter(|id| self.is_training(*id))
    }
}

#[cfg(test)]
mod tests;
