//! Why something has to wait, in words.

use crate::Core;
use crate::admission;
use crate::ids::*;

impl Core {
    /// Why no rollout can be leased to a worker of this environment.
    pub(crate) fn why_no_lease(&self, environment: EnvironmentId) -> String {
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
        if let Some(why) = self.why_it_rests(environment) {
            return format!("it rests: {why}");
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
            let held = self.in_flight_in_words();
            return format!("{in_flight} rollouts are in flight, the most allowed {bound}: {held}");
        }
        format!(
            "{in_flight} rollouts are in flight, {} of them of evaluations; the rest of the {limit} allowed {bound} is \
             kept for the other class by admission.evaluation_share",
            self.in_flight_evaluation
        )
    }

    /// What the batch of `step` waits for.
    pub(crate) fn why_no_batch(&self, step: Step) -> String {
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
            if let Some(why) = self.why_it_rests(id) {
                words.push_str(&format!("; environment {:?} rests: {why}", self.name(id)));
            }
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

    /// `12 of "a", the oldest since 3 s, 4 of "b", ...`: which environment holds the places, and for how long.
    fn in_flight_in_words(&self) -> String {
        let busy = self.config.environment_ids().filter_map(|(id, _)| {
            let count = self.sites[id.0 as usize].in_flight;
            // Numbers are given in the order of leases.
            let oldest = (count > 0).then(|| {
                let mut rollouts = self.rollouts.values();
                rollouts.find(|rollout| rollout.environment == id)
            })??;
            let seconds = self.now.since(self.leased_at(oldest)).as_secs_f64();
            Some(format!(
                "{count} of {:?}, the oldest since {seconds:.0} s",
                self.name(id)
            ))
        });
        busy.collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn engines_in_words(&self) -> String {
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
}
