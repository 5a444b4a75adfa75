//! Who waits for what: the waits nobody asked about, which are warned of, and all others.

use crate::Core;
use crate::effect::Effect;
use crate::evaluation::Round;
use crate::ids::*;
use crate::status::{Wait, own_name};
use crate::time::Duration;
use crate::wait::{Armed, Key};
use std::collections::BTreeMap;

impl Core {
    /// Who waits for what at this moment, and after which span that is worth a warning.
    fn current_waits(&self) -> Vec<(Key, Duration)> {
        let mut waits = Vec::new();
        if self.finished.is_some() {
            return waits;
        }
        let timeouts = &self.config.timeouts;
        if !self.ledger.has_live_engine() && !self.config.without_engines {
            waits.push((Key::NoEngine, timeouts.worker));
        }
        for (id, engine) in self.ledger.engines() {
            if let Some(version) = engine.updating {
                waits.push((Key::EngineUpdate(*id, version), timeouts.weights));
            }
        }
        for (id, _) in self.config.environment_ids() {
            let site = &self.sites[id.0 as usize];
            if site.in_flight == 0 && site.requests.is_empty() && self.has_work(id) {
                waits.push((Key::NoWorker(id), timeouts.worker));
            }
        }
        if let Some(key) = self.trainer_owes() {
            waits.push((key, timeouts.weights));
        }
        waits
    }

    fn has_work(&self, environment: EnvironmentId) -> bool {
        if !self.is_training(environment) {
            let progress = self
                .round
                .as_ref()
                .and_then(|round| round.environments.get(&environment));
            return progress
                .is_some_and(|progress| progress.total.is_none() || !progress.queue.is_empty());
        }
        let site = &self.sites[environment.0 as usize];
        self.next_step.0 <= self.config.max_steps
            && (site.examples.is_none()
                || !site.queue.is_empty()
                || !site.set_aside.is_empty()
                || self.may_begin_group())
    }

    fn trainer_owes(&self) -> Option<Key> {
        if self.config.without_engines {
            return None;
        }
        if self.ledger.newest_published().is_none() {
            return Some(Key::Weights(PolicyVersion(0)));
        }
        // Not the newest that was published: it may have gone back to a checkpoint.
        let trained = self.ledger.newest_trained();
        // It may hold the batch after the one it trains.
        if self.batches.newest_fetched() > Some(trained) {
            return Some(Key::Weights(PolicyVersion(trained.0 + 1)));
        }
        let owes = self.batches.requests.is_empty() && trained.0 < self.config.max_steps;
        owes.then_some(Key::BatchRequest(Step(trained.0 + 1)))
    }

    pub(crate) fn refresh_waits(&mut self) {
        let current = self.current_waits();
        self.waits.update(&current, self.now, &mut self.deadlines);
    }

    pub(crate) fn warn_of_wait(&mut self, key: Key) {
        // It may have ended with the event that let its deadline pass.
        let mut current = self.current_waits().into_iter();
        let Some((_, span)) = current.find(|(other, _)| *other == key) else {
            return;
        };
        let Some(since) = self.waits.rearm(key, span, self.now, &mut self.deadlines) else {
            return;
        };
        let (who, waiting_for) = self.wait_in_words(key);
        let seconds = self.now.since(since).as_secs_f64();
        self.effects.push(Effect::Warn {
            message: format!("{who} waits for {waiting_for}, since {seconds:.0} s"),
        });
    }

    fn wait_in_words(&self, key: Key) -> (String, String) {
        match key {
            Key::NoEngine => (
                "the run".to_owned(),
                format!("an inference engine: {}", self.engines_in_words()),
            ),
            Key::EngineUpdate(engine, version) => (
                "the run".to_owned(),
                format!("engine {engine} to load and prove version {version}"),
            ),
            Key::NoWorker(environment) => {
                let site = &self.sites[environment.0 as usize];
                let what = match (site.workers, site.examples) {
                    (0, _) => "a worker: none is registered",
                    (_, None) => "a worker that lists its examples",
                    (_, Some(_)) => "its workers to ask for rollouts",
                };
                (
                    format!("environment {:?}", self.name(environment)),
                    what.to_owned(),
                )
            }
            Key::Weights(version) => (
                "the run".to_owned(),
                format!("the trainer to publish the weights of version {version}"),
            ),
            Key::BatchRequest(step) => (
                "the run".to_owned(),
                format!("the trainer to ask for the batch of step {step}"),
            ),
        }
    }

    /// Every wait there is, in the order of who waits for whom: the trainer for a batch, an evaluation or groups for what
    /// they lack, those above, and last whoever holds nobody up. Between those who wait for rollouts and their ends, the
    /// shell says what the rollouts are at.
    pub(crate) fn all_waits(&self) -> Vec<Wait> {
        let requests = self.batches.requests.values().map(|request| {
            Wait::new(
                format!("trainer, data rank {}", request.rank),
                self.why_no_batch(request.step),
                self.trainer.waiting_since.unwrap_or(self.now),
                request.deadline,
            )
        });
        let armed = self.waits.iter().map(|(key, Armed { since, deadline })| {
            let (who, waiting_for) = self.wait_in_words(*key);
            Wait::new(who, waiting_for, *since, *deadline)
        });
        let round = self.round.iter();
        requests
            .chain(round.map(|round| self.wait_for_evaluation(round)))
            .chain(self.waits_for_advantages())
            .chain(self.waits_for_teacher())
            .chain(armed)
            .chain(self.waits_of_blocked())
            .chain(self.waits_of_idle())
            .collect()
    }

    /// Workers that have nothing to do.
    fn waits_of_idle(&self) -> Vec<Wait> {
        let mut reasons: BTreeMap<EnvironmentId, String> = BTreeMap::new();
        let mut waits = Vec::new();
        for lease in self.lease_requests.values() {
            let Some(worker) = self.workers.get(&lease.worker) else {
                continue;
            };
            if !worker.running.is_empty() || worker.blocked.is_some() {
                continue;
            }
            let environment = lease.environment;
            let reason = reasons
                .entry(environment)
                .or_insert_with(|| self.why_no_lease(environment));
            let since = lease.deadline - self.config.timeouts.long_poll;
            let who = format!("worker {}", own_name(&worker.name));
            waits.push(Wait {
                is_usual: true,
                ..Wait::new(who, reason.clone(), since, lease.deadline)
            });
        }
        waits
    }

    fn wait_for_evaluation(&self, round: &Round) -> Wait {
        let (version, progress) = (round.version, round.environments.values());
        let ended: u32 = progress.clone().map(|progress| progress.ended()).sum();
        let total: u32 = progress.filter_map(|progress| progress.total).sum();
        let waiting_for = match round.is_over() {
            false => {
                format!("the evaluation of version {version} to end ({ended} of {total} rollouts)")
            }
            // Else it would be reported and closed.
            true => format!(
                "the trainer, which went back, to publish version {version} again: its evaluation is reported then"
            ),
        };
        let who = match self.config.only_evaluates() {
            true => "the end",
            false => "the next weight update",
        };
        Wait::new(who.to_owned(), waiting_for, round.since, round.deadline)
    }
}
