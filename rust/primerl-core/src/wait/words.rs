//! Waits in words.

use super::Wait;
use crate::Core;
use crate::admission::last_step;
use crate::config::TrainingMode;
use crate::ids::*;
use crate::status::own_name;

impl Core {
    /// Who waits.
    pub(super) fn who(&self, wait: Wait) -> String {
        match wait {
            Wait::NoWorker(environment) => format!("environment {:?}", self.name(environment)),
            Wait::Advantages(group) | Wait::Teacher(group) => format!("group {group}"),
            Wait::Blocked(worker) => self.short_name(worker),
            _ if self.is_end(wait) => "the end".to_owned(),
            Wait::Evaluation(_) | Wait::EvaluationReport(_) => "the next weight update".to_owned(),
            _ => "the run".to_owned(),
        }
    }

    /// Whether it is the end of a run that only evaluates, which waits for all that it measures.
    pub(super) fn is_end(&self, wait: Wait) -> bool {
        let is_of_evaluation = matches!(wait, Wait::Evaluation(_) | Wait::EvaluationReport(_));
        is_of_evaluation && self.config.only_evaluates()
    }

    /// What is waited for.
    pub(crate) fn words(&self, wait: Wait) -> String {
        match wait {
            Wait::NoEngine => format!("an inference engine: {}", self.engines_in_words()),
            Wait::EngineUpdate(engine, version) => {
                format!("engine {engine} to load and prove version {version}")
            }
            Wait::NoWorker(environment) => self.missing_worker_in_words(environment).to_owned(),
            Wait::Weights(version) => {
                format!("the trainer to publish the weights of version {version}")
            }
            Wait::BatchRequest(step) => {
                format!("the trainer to ask for the batch of step {step}")
            }
            Wait::Advantages(_) => "its custom advantages".to_owned(),
            Wait::Teacher(group) => self.scores_in_words(group).to_owned(),
            Wait::Blocked(worker) => self.block_in_words(worker),
            Wait::Republication(_)
            | Wait::HandedOut(_)
            | Wait::NoEvaluation
            | Wait::Evaluation(_)
            | Wait::EvaluationReport(_) => self.evaluation_in_words(wait),
            _ => self.training_in_words(wait),
        }
    }

    fn missing_worker_in_words(&self, environment: EnvironmentId) -> &'static str {
        let state = &self.environments[environment];
        match (state.workers, state.examples) {
            (0, _) => "a worker: none is registered",
            (_, None) => "a worker that lists its examples",
            (_, Some(_)) => "its workers to ask for rollouts",
        }
    }

    fn block_in_words(&self, worker: WorkerId) -> String {
        let worker = self.workers.registered.get(&worker);
        let blocked = worker.and_then(|worker| worker.blocked.as_ref());
        let code = blocked.map(|blocked| blocked.code()).unwrap_or_default();
        format!("its environment's code, which blocks it{code}")
    }

    fn evaluation_in_words(&self, wait: Wait) -> String {
        match wait {
            Wait::Republication(version) => format!(
                "the evaluation of version {version} waits for the trainer, which went back and is at version {}, to \
                 publish it again",
                self.ledger.newest_trained()
            ),
            Wait::HandedOut(version) => {
                format!("every rollout of the evaluation of version {version} is handed out")
            }
            Wait::Evaluation(version) => {
                let (ended, total) = self.evaluations.ended_of_total();
                format!("the evaluation of version {version} to end ({ended} of {total} rollouts)")
            }
            Wait::EvaluationReport(version) => format!(
                "the trainer, which went back, to publish version {version} again: its evaluation is reported then"
            ),
            _ => "no evaluation is due".to_owned(),
        }
    }

    fn training_in_words(&self, wait: Wait) -> String {
        match wait {
            Wait::FirstWeights => "the trainer has not published version 0".to_owned(),
            Wait::Proof(version) => format!(
                "no engine has proved version {version}: {}",
                self.engines_in_words()
            ),
            Wait::Examples(environment) => format!(
                "environment {:?} has no worker that listed its examples",
                self.name(environment)
            ),
            Wait::Groups => self.groups_in_words(),
            Wait::AllCut => format!("all {} steps are cut", self.config.run.max_steps),
            Wait::Rest(environment) => {
                let why = self.why_it_rests(environment).unwrap_or_default();
                format!("it rests: {why}")
            }
            Wait::Room => self.room_in_words(),
            Wait::NextVersion => self.next_version_in_words(),
            _ => "all available work belongs to other environments".to_owned(),
        }
    }

    fn next_version_in_words(&self) -> String {
        let last = last_step(&self.config, self.ledger.newest_proved());
        format!(
            "{} rollouts are under way, as many as may be trained before {} is proved (up to step {})",
            self.rollouts_begun(),
            self.next_version(),
            last.unwrap_or(Step(0)),
        )
    }

    fn room_in_words(&self) -> String {
        let (in_flight, limit) = (self.rollouts.in_flight.len(), self.in_flight_limit());
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
            self.rollouts.evaluating
        )
    }

    fn scores_in_words(&self, group: GroupId) -> &'static str {
        let environment = self.groups.live.get(&group).map(|group| group.environment);
        match environment.map(|id| self.config.training_mode(id)) {
            Some(TrainingMode::Opsd) => "the policy's own log-probabilities behind a demonstration",
            _ => "its teacher's log-probabilities",
        }
    }

    /// How far the next batch is, and what holds it up.
    fn groups_in_words(&self) -> String {
        let queues = self.environments.iter().map(|state| state.queue.len());
        let queued: usize = queues.sum();
        let mut words = vec![format!(
            "{} of {} groups ready for step {}, {} rollouts in flight, {queued} queued",
            self.groups.ready.len(),
            self.groups_needed(),
            self.next_step,
            self.rollouts.in_flight.len()
        )];
        let waiting = [
            (self.signals.custom.len(), "their custom advantages"),
            (self.signals.teacher.len(), "their teacher"),
        ];
        for (count, what) in waiting.into_iter().filter(|(count, _)| *count > 0) {
            words.push(format!("{count} groups wait for {what}"));
        }
        for id in self.training_environments() {
            self.environment_in_words(id, &mut words);
        }
        if !self.ledger.has_live_engine() {
            words.push(format!("no engine is usable: {}", self.engines_in_words()));
        }
        words.join("; ")
    }

    fn environment_in_words(&self, id: EnvironmentId, words: &mut Vec<String>) {
        let (state, name) = (&self.environments[id], self.name(id));
        if state.workers == 0 {
            words.push(format!("environment {name:?} has no worker"));
        }
        let in_a_row = self.curriculum.filtered_in_a_row(id);
        if in_a_row > 1 {
            words.push(format!(
                "environment {name:?}: the last {in_a_row} groups had no signal"
            ));
        }
        if let Some(why) = self.why_it_rests(id) {
            words.push(format!("environment {name:?} rests: {why}"));
        }
        if !state.set_aside.is_empty() {
            let seconds = self.now.since(state.unasked_since).as_secs_f64();
            words.push(format!(
                "{} groups of environment {name:?} are set aside, its workers have not asked for rollouts for {seconds:.0} s",
                state.set_aside.len(),
            ));
        }
    }

    /// `12 of "a", the oldest since 3 s, 4 of "b", ...`: which environment holds the places, and for how long.
    fn in_flight_in_words(&self) -> String {
        let busy = self.environments.ids().filter_map(|id| {
            let count = self.environments[id].in_flight;
            // Numbers are given in the order of leases.
            let oldest = (count > 0).then(|| {
                let mut rollouts = self.rollouts.in_flight.values();
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
        match words.is_empty() {
            true => "no engine has joined".to_owned(),
            false => words.join(", "),
        }
    }

    fn next_version(&self) -> String {
        match self.ledger.newest_proved() {
            Some(PolicyVersion(version)) => format!("version {}", version + 1),
            None => "version 0".to_owned(),
        }
    }

    /// `worker env_task_0`
    pub(super) fn short_name(&self, id: WorkerId) -> String {
        match self.workers.registered.get(&id) {
            Some(worker) => format!("worker {}", own_name(&worker.name)),
            None => format!("worker {id}"),
        }
    }
}
