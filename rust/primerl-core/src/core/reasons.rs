//! Why something has to wait, in words; and the waits nobody asked about, which are warned of.

use super::Core;
use crate::admission;
use crate::effect::Effect;
use crate::evaluation::Round;
use crate::ids::*;
use crate::status::Wait;
use crate::time::Duration;
use crate::waits::{Armed, Key};

impl Core {
    /// Why no rollout can be leased to a worker of this environment.
    pub(super) fn why_no_lease(&self, environment: EnvironmentId) -> String {
        if !self.is_training(environment) {
            return match &self.round {
                Some(_) if !self.evaluation_has_room(self.leased_together(environment)) => {
                    self.why_no_room()
                }
                Some(round) => format!(
                    "every rollout of the evaluation of version {} is handed out",
                    round.version
                ),
                None => self.why_no_evaluation(),
            };
        }
        if self.next_step.0 > self.config.max_steps {
            return format!("all {} steps are cut", self.config.max_steps);
        }
        if let Some(why) = self.why_no_training() {
            return why;
        }
        if !self.training_has_room(self.leased_together(environment)) {
            return self.why_no_room();
        }
        if !self.may_begin_group() {
            let last =
                admission::last_step(&self.config, self.ledger.newest_proved()).unwrap_or(Step(0));
            return format!(
                "{} groups are under way, as many as may be trained before {} is proved (up to step {last})",
                self.groups_under_way(),
                self.next_version(),
            );
        }
        "what there is to do is for other environments".to_owned()
    }

    fn why_no_evaluation(&self) -> String {
        let wanted = self.ledger.wanted();
        let left = wanted.filter(|version| !self.ledger.is_of_this_trainer(*version));
        match left.filter(|version| self.is_evaluation_due(*version)) {
            Some(version) => format!(
                "the evaluation of version {version} waits for the trainer, which went back and is at version {}, to \
                 publish it again",
                self.ledger.newest_trained()
            ),
            None => "no evaluation is due".to_owned(),
        }
    }

    fn why_no_room(&self) -> String {
        let (in_flight, limit) = (self.rollouts.len(), self.in_flight_limit());
        let bound = match (self.limits.allowed(), self.config.max_in_flight()) {
            _ if self.config.without_engines => "at the same time",
            (0, _) => return format!("no engine serves: {}", self.engines_in_words()),
            (engines, batch) if engines < batch => "by the limits of the engines that serve",
            // The key of `primerl eval`.
            _ if self.config.only_evaluates() => "by concurrency",
            _ => "by oversampling_factor * batch_size",
        };
        if in_flight >= limit {
            return format!("{in_flight} rollouts are in flight, the most allowed {bound}");
        }
        format!(
            "{in_flight} rollouts are in flight, {} of them of evaluations; the rest of the {limit} allowed {bound} is \
             kept for the other class by admission.evaluation_share",
            self.in_flight_evaluation
        )
    }

    /// What the batch of `step` waits for.
    pub(super) fn why_no_batch(&self, step: Step) -> String {
        if let Some(why) = self.why_no_training() {
            return why;
        }
        let last =
            admission::last_step(&self.config, self.ledger.newest_proved()).unwrap_or(Step(0));
        if step > last {
            let needed = PolicyVersion(step.0.saturating_sub(1 + self.config.max_async_level));
            return format!(
                "no engine has proved version {needed}: {}",
                self.engines_in_words()
            );
        }
        let queued: usize = self.sites.iter().map(|site| site.queue.len()).sum();
        let mut words = format!(
            "{} of {} groups ready for step {}, {} rollouts in flight, {queued} queued",
            self.ready.len(),
            self.config.groups_per_batch(),
            self.next_step,
            self.rollouts.len()
        );
        if !self.computing.is_empty() {
            let waiting = self.computing.len();
            words.push_str(&format!(
                "; {waiting} groups wait for their custom advantages"
            ));
        }
        if !self.scoring.is_empty() {
            let waiting = self.scoring.len();
            words.push_str(&format!("; {waiting} groups wait for their teacher"));
        }
        for (id, _) in self
            .config
            .environment_ids()
            .filter(|(id, _)| self.is_training(*id))
        {
            if self.sites[id.0 as usize].workers == 0 {
                words.push_str(&format!("; environment {:?} has no worker", self.name(id)));
            }
            words.push_str(&self.filtered_in_words(id));
            let site = &self.sites[id.0 as usize];
            if !site.set_aside.is_empty() {
                let seconds = self.now.since(site.unasked_since).as_secs_f64();
                words.push_str(&format!(
                    "; {} groups of environment {:?} are set aside, its workers have not asked for rollouts for {seconds:.0} s",
                    site.set_aside.len(),
                    self.name(id)
                ));
            }
        }
        if !self.ledger.has_live_engine() {
            words.push_str(&format!(
                "; no engine is usable: {}",
                self.engines_in_words()
            ));
        }
        words
    }

    /// What keeps all of training from starting.
    fn why_no_training(&self) -> Option<String> {
        if self.ledger.newest_proved().is_none() {
            return Some(match self.ledger.newest_published() {
                None => "the trainer has not published version 0".to_owned(),
                Some(version) => format!(
                    "no engine has proved version {version}: {}",
                    self.engines_in_words()
                ),
            });
        }
        let missing = self.curriculum.missing()?;
        Some(format!(
            "environment {:?} has no worker that listed its examples",
            self.name(missing)
        ))
    }

    fn engines_in_words(&self) -> String {
        let words = self.ledger.engines().iter().map(|(id, engine)| {
            match (engine.updating, &engine.lost) {
                (_, Some(reason)) => format!("engine {id} is lost ({reason})"),
                (Some(version), None) => format!("engine {id} is loading version {version}"),
                (None, None) => match engine.proved {
                    Some(version) => format!("engine {id} serves version {version}"),
                    None => format!("engine {id} has proved nothing"),
                },
            }
        });
        let words: Vec<String> = words.collect();
        if words.is_empty() {
            "no engine has joined".to_owned()
        } else {
            words.join(", ")
        }
    }

    fn next_version(&self) -> String {
        match self.ledger.newest_proved() {
            Some(PolicyVersion(version)) => format!("version {}", version + 1),
            None => "version 0".to_owned(),
        }
    }

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

    pub(super) fn refresh_waits(&mut self) {
        let current = self.current_waits();
        self.waits.update(&current, self.now, &mut self.deadlines);
    }

    pub(super) fn warn_of_wait(&mut self, key: Key) {
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

    /// Every wait there is: those above, long polls, and a weight update that an evaluation holds up.
    pub(super) fn all_waits(&self) -> Vec<Wait> {
        let mut waits: Vec<Wait> = Vec::new();
        for (key, Armed { since, deadline }) in self.waits.iter() {
            let (who, waiting_for) = self.wait_in_words(*key);
            waits.push(Wait {
                who,
                waiting_for,
                since: *since,
                deadline: *deadline,
            });
        }
        for request in self.batches.requests.values() {
            waits.push(Wait {
                who: format!("trainer, data rank {}", request.rank),
                waiting_for: self.why_no_batch(request.step),
                since: self.trainer.waiting_since.unwrap_or(self.now),
                deadline: request.deadline,
            });
        }
        for lease in self.lease_requests.values() {
            let environment = self.name(lease.environment);
            waits.push(Wait {
                who: format!("worker {} of environment {environment:?}", lease.worker),
                waiting_for: self.why_no_lease(lease.environment),
                since: lease.deadline - self.config.timeouts.long_poll,
                deadline: lease.deadline,
            });
        }
        waits.extend(self.waits_for_advantages());
        waits.extend(self.waits_for_teacher());
        let round = self.round.as_ref();
        waits.extend(round.map(|round| self.wait_for_evaluation(round)));
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
        Wait {
            who: who.to_owned(),
            waiting_for,
            since: round.since,
            deadline: round.deadline,
        }
    }
}
