//! Looks at every effect from outside and knows what it must not be. It shares no code with the core.

mod limits;
mod measured;
mod together;
mod whole;

use crate::config::*;
use crate::counters::CancelReason;
use crate::effect::{Effect, EvaluationReport, LeasedRollout};
use crate::event::{Event, Outcome};
use crate::ids::*;
use crate::pack::{Columns, PackedBatch};
use crate::time::Time;
use std::collections::{BTreeMap, BTreeSet};

/// One sampled token, as the simulated engine knows it. Sampled tokens are unique in a simulation.
#[derive(Clone, Debug)]
pub struct SampledToken {
    pub rollout: RolloutId,
    pub version: PolicyVersion,
    pub logprob: f32,
    /// The whole prompt, for the first token of a turn.
    pub prompt: Option<Vec<u32>>,
}

#[derive(Clone, Debug)]
struct LeasedAt {
    rollout: LeasedRollout,
    proved: Option<PolicyVersion>,
    /// Which lease answer it came with.
    answer: u64,
    closed: bool,
}

/// What happened so far. Each method panics with the rule that was broken.
#[derive(Clone, Debug)]
pub struct Observer {
    config: Config,
    pub sampled: BTreeMap<u32, SampledToken>,
    trained_tokens: BTreeSet<u32>,
    trained_rollouts: BTreeMap<RolloutId, Step>,
    /// Cut short by their environments.
    truncated: BTreeSet<RolloutId>,
    leased: BTreeMap<RolloutId, LeasedAt>,
    /// Rewards of the rollouts that went well, by group.
    rewards: BTreeMap<GroupId, Vec<f64>>,
    proved: Option<PolicyVersion>,
    /// Engines that proved something since they joined last.
    serving: BTreeSet<EngineId>,
    limits: BTreeMap<EngineId, u32>,
    in_flight: usize,
    in_flight_evaluation: usize,
    pub most_in_flight: usize,
    pub cancelled: BTreeMap<CancelReason, u64>,
    waiting: BTreeMap<RequestId, Time>,
    /// Environments that reward whole groups, how many rollouts requests ask for, and lease answers so far.
    whole: BTreeSet<EnvironmentId>,
    asked: BTreeMap<RequestId, u32>,
    answers: u64,
    pub batches: BTreeMap<Step, PackedBatch>,
    kept_from: Step,
    /// When each step was cut, and when each evaluation ended.
    pub cut_at: Vec<Time>,
    pub evaluated_at: Vec<Time>,
    now: Time,
    pub evaluations: Vec<EvaluationReport>,
    measured: measured::Measured,
    pub warnings: Vec<String>,
    pub finished: Option<String>,
}

impl Observer {
    pub fn new(config: Config) -> Self {
        Observer {
            config,
            sampled: BTreeMap::new(),
            trained_tokens: BTreeSet::new(),
            trained_rollouts: BTreeMap::new(),
            truncated: BTreeSet::new(),
            leased: BTreeMap::new(),
            rewards: BTreeMap::new(),
            proved: None,
            serving: BTreeSet::new(),
            limits: BTreeMap::new(),
            in_flight: 0,
            in_flight_evaluation: 0,
            most_in_flight: 0,
            cancelled: BTreeMap::new(),
            waiting: BTreeMap::new(),
            whole: BTreeSet::new(),
            asked: BTreeMap::new(),
            answers: 0,
            batches: BTreeMap::new(),
            kept_from: Step(1),
            cut_at: Vec::new(),
            evaluated_at: Vec::new(),
            now: Time::default(),
            evaluations: Vec::new(),
            measured: measured::Measured::default(),
            warnings: Vec::new(),
            finished: None,
        }
    }

    pub fn saw_event(&mut self, event: &Event, now: Time) {
        self.now = now;
        match event {
            Event::EnvironmentReady {
                environment,
                whole_groups: true,
                ..
            } => {
                self.whole.insert(*environment);
            }
            Event::LeaseRequested { request, max, .. } => {
                self.asked.insert(*request, *max);
                self.waiting.insert(*request, now);
            }
            Event::BatchRequested { request, .. } | Event::NextBatchRequested { request, .. } => {
                self.waiting.insert(*request, now);
            }
            Event::RequestDropped { request } => {
                self.waiting.remove(request);
            }
            Event::RolloutFinished {
                rollout, outcome, ..
            } => {
                if outcome.traces.iter().any(|trace| trace.truncated) {
                    self.truncated.insert(*rollout);
                }
                self.saw_report(*rollout, outcome);
            }
            Event::EngineProved { engine, version } => {
                self.proved = self.proved.max(Some(*version));
                self.serving.insert(*engine);
            }
            Event::EngineJoined { engine, .. } | Event::EngineLost { engine, .. } => {
                self.serving.remove(engine);
            }
            Event::TrainerResumed { step } => self.measured.saw_resume(*step),
            Event::WeightsPublished {
                version, digest, ..
            } => self.measured.saw_weights(*version, digest),
            Event::Restarted => {
                self.serving.clear();
                // The process that asked does not listen any more.
                self.waiting.clear();
            }
            _ => {}
        }
    }

    /// A report counts while its rollout is open. Of the simulated seats only the player is trained.
    fn saw_report(&mut self, rollout: RolloutId, outcome: &Outcome) {
        let open = self.leased.get(&rollout).filter(|leased| !leased.closed);
        let player = outcome
            .traces
            .iter()
            .find(|trace| trace.session == "player");
        if let (Some(leased), Some(player), true) = (open, player, outcome.ok) {
            let group = self.rewards.entry(leased.rollout.group).or_default();
            group.push(player.reward);
        }
    }

    pub fn saw_effect(&mut self, effect: &Effect) {
        assert!(
            self.finished.is_none()
                || matches!(
                    effect,
                    Effect::NoLease { finished: true, .. }
                        | Effect::NoMoreBatches { .. }
                        | Effect::LimitEngine { .. }
                        | Effect::ForgetBatches { .. }
                        | Effect::WorkerLost { .. }
                        | Effect::WorkerGone { .. }
                        | Effect::Warn { .. }
                ),
            "after the end: {effect:?}"
        );
        match effect {
            Effect::Lease {
                request, rollouts, ..
            } => {
                self.answered(*request);
                assert!(!rollouts.is_empty(), "a lease of nothing");
                self.answers += 1;
                self.check_together(*request, rollouts);
                rollouts.iter().for_each(|rollout| self.saw_lease(rollout));
            }
            Effect::NoLease {
                request, reason, ..
            } => {
                self.answered(*request);
                assert!(!reason.is_empty());
            }
            Effect::Batch {
                request,
                rank,
                step,
            } => {
                self.answered(*request);
                assert!((*rank as usize) < self.batches[step].ranks.len());
                assert!(*step >= self.kept_from, "step {step} was given up");
            }
            Effect::ForgetBatches { before } => self.kept_from = *before,
            Effect::BatchNotReady {
                request,
                waiting_for,
            } => {
                self.answered(*request);
                assert!(!waiting_for.is_empty());
            }
            Effect::NoMoreBatches { request } => self.answered(*request),
            Effect::BatchCut { batch } => self.saw_batch(batch),
            Effect::RolloutClosed { rollout } => self.saw_close(*rollout),
            Effect::CancelRollout {
                rollout, reason, ..
            } => {
                assert!(
                    !self.leased[rollout].closed,
                    "{rollout} is cancelled after its end"
                );
                *self.cancelled.entry(*reason).or_default() += 1;
            }
            Effect::Evaluated(report) => {
                self.evaluated_at.push(self.now);
                self.measured.check(report);
                self.evaluations.push(report.clone());
            }
            Effect::Warn { message } => self.warnings.push(message.clone()),
            Effect::Finished { reason } => self.finished = Some(reason.clone()),
            Effect::Failed { reason } => panic!("the simulated faults are not hopeless: {reason}"),
            Effect::LimitEngine { engine, limit } => self.saw_limit(*engine, *limit),
            // The shell tells people of these as well.
            Effect::WorkerLost { reason, .. } => self.warnings.push(reason.clone()),
            Effect::WorkerGone { why, .. } => self.warnings.push(why.clone()),
            Effect::UpdateEngine { .. }
            | Effect::ComputeAdvantages { .. }
            | Effect::ScoreByTeacher { .. }
            | Effect::RolloutFailed { .. }
            | Effect::RolloutVoided { .. }
            | Effect::GroupDropped { .. } => {}
        }
    }

    /// No request waits longer than a long poll.
    pub fn after_event(&self, now: Time) {
        for (request, since) in &self.waiting {
            assert!(
                now < *since + self.config.timeouts.long_poll,
                "request {request} was not answered in time"
            );
        }
    }

    fn answered(&mut self, request: RequestId) {
        assert!(
            self.waiting.remove(&request).is_some(),
            "request {request} is answered twice, or never asked"
        );
    }

    fn saw_lease(&mut self, rollout: &LeasedRollout) {
        let leased = LeasedAt {
            rollout: rollout.clone(),
            proved: self.proved,
            answer: self.answers,
            closed: false,
        };
        let proved = self
            .proved
            .expect("a rollout is leased before any version is proved");
        let ahead = self.batches.len() as u64 - proved.0;
        assert!(
            rollout.evaluation || ahead <= self.config.run.max_async_level,
            "a rollout is leased {ahead} steps ahead of version {proved}"
        );
        self.check_room(rollout);
        self.measured.saw_lease(rollout);
        let previous = self.leased.insert(rollout.rollout, leased);
        assert!(
            previous.is_none(),
            "rollout {} is leased twice",
            rollout.rollout
        );
    }

    fn saw_close(&mut self, rollout: RolloutId) {
        let leased = self
            .leased
            .get_mut(&rollout)
            .expect("only leased rollouts are closed");
        assert!(
            !std::mem::replace(&mut leased.closed, true),
            "rollout {rollout} is closed twice"
        );
        self.in_flight -= 1;
        self.in_flight_evaluation -= usize::from(leased.rollout.evaluation);
    }

    fn saw_batch(&mut self, batch: &PackedBatch) {
        assert_eq!(
            batch.step.0,
            self.batches.len() as u64 + 1,
            "steps are cut in order"
        );
        assert!(batch.step.0 <= self.config.run.max_steps);
        assert_eq!(batch.ranks.len(), self.config.run.data_ranks as usize);
        let mut loss_tokens = 0;
        for micro_batch in batch.ranks.iter().flatten() {
            assert!(micro_batch.unique_tokens() <= self.config.run.seq_len as usize);
            let columns = micro_batch.columns();
            loss_tokens += columns.loss_mask.iter().filter(|mask| **mask == 1).count() as u64;
            self.saw_micro_batch(batch.step, &columns);
        }
        assert!(loss_tokens > 0, "a batch without anything to train");
        self.saw_groups(batch);
        assert_eq!(batch.loss_tokens, loss_tokens);
        self.cut_at.push(self.now);
        self.check_groups(batch);
        self.check_one_run(batch);
        self.batches.insert(batch.step, batch.clone());
    }

    /// With filtering on, every group that is trained has something to compare.
    fn saw_groups(&self, batch: &PackedBatch) {
        let micro_batches = batch.ranks.iter().flatten();
        let sequences = micro_batches.flat_map(|micro_batch| micro_batch.sequences());
        let groups: BTreeMap<GroupId, EnvironmentId> = sequences
            .map(|weighted| {
                let group = self.leased[&weighted.sample.rollout].rollout.group;
                (group, weighted.environment)
            })
            .collect();
        for (group, environment) in groups {
            // Also of rollouts that became too old, or are dropped: the signal may lie there.
            let rewards = &self.rewards[&group];
            let taught = !self.config.training_mode(environment).is_rl();
            let algorithm = &self.config.environment(environment).algorithm;
            // Equal rewards may teach there: by lengths, and by what the seat got before.
            let otherwise =
                taught || algorithm.length_penalty.is_some() || algorithm.kind.learns_alone();
            assert!(rewards.len() >= self.config.min_group_size(environment));
            assert!(
                !self.config.buffer.online_difficulty_filtering
                    || otherwise
                    || crate::advantage::differ(rewards.iter().copied()),
                "group {group} has no signal and is trained: {rewards:?}"
            );
        }
    }

    fn saw_micro_batch(&mut self, step: Step, micro_batch: &Columns) {
        let n = micro_batch.token_ids.len();
        for len in [
            micro_batch.loss_mask.len(),
            micro_batch.logprobs.len(),
            micro_batch.advantages.len(),
        ] {
            assert_eq!(len, n, "columns have equal length");
        }
        assert_eq!(
            (micro_batch.versions.len(), micro_batch.temperatures.len()),
            (n, n)
        );
        assert_eq!(micro_batch.sequence_lengths.iter().sum::<i32>() as usize, n);
        self.saw_components(micro_batch);
        let mut start = 0;
        for (length, rollout) in micro_batch
            .sequence_lengths
            .iter()
            .zip(&micro_batch.rollouts)
        {
            let end = start + *length as usize;
            self.saw_sequence(step, *rollout, micro_batch, start, end);
            start = end;
        }
    }

    /// Each sampled token belongs to what its environment learns from; the teacher's log-probability is minus the token.
    fn saw_components(&self, columns: &Columns) {
        let lengths = columns.sequence_lengths.iter().zip(&columns.environments);
        let modes = lengths.flat_map(|(length, environment)| {
            let mode = self.config.training_mode(*environment);
            std::iter::repeat_n(mode, *length as usize)
        });
        let mixed = self.config.mixes_modes();
        for (at, mode) in modes.enumerate() {
            if mode.is_scored() {
                let scored = -(columns.token_ids[at] as f32);
                assert_eq!(columns.teacher_logprobs[at], scored);
            }
            if !mixed {
                continue;
            }
            let sampled = f32::from(columns.loss_mask[at]);
            let weights = match mode {
                TrainingMode::Rl => [sampled, 0.0],
                _ => [0.0, sampled],
            };
            let found = [columns.rl_weights[at], columns.ref_kl_weights[at]];
            assert_eq!(found, weights, "token {at} is trained as {mode:?}");
        }
        for (at, weight) in columns.ce_weights.iter().enumerate() {
            let context = columns.loss_mask[at] == 0;
            assert!(
                *weight == 0.0 || (context && *weight == 0.25),
                "{weight} at {at}"
            );
        }
        let has_weights = !columns.rollouts.is_empty() && (mixed || self.config.echoes());
        assert_eq!(!columns.ce_weights.is_empty(), has_weights);
        let told = [&columns.rl_weights, &columns.ref_kl_weights];
        assert!(mixed || told.iter().all(|weights| weights.is_empty()));
    }

    fn saw_sequence(
        &mut self,
        step: Step,
        rollout: RolloutId,
        columns: &Columns,
        start: usize,
        end: usize,
    ) {
        let leased = &self.leased[&rollout];
        assert!(!leased.rollout.evaluation, "an evaluation is trained on");
        // With asynchrony a group may be overtaken by later ones; without, there is nothing to overtake it.
        let on_policy = leased.proved >= Some(step.trains());
        assert!(
            on_policy || self.config.run.max_async_level > 0,
            "rollout {rollout} of step {step} started when version {:?} was the newest",
            leased.proved
        );
        let trained_at = *self.trained_rollouts.entry(rollout).or_insert(step);
        assert_eq!(
            trained_at, step,
            "rollout {rollout} is trained in two steps"
        );
        assert!(
            self.config.run.truncated_rollouts == TruncatedRollouts::Train
                || !self.truncated.contains(&rollout),
            "a truncated rollout is trained"
        );
        let algorithm = self.config.environment(leased.rollout.environment);
        let algorithm = algorithm.algorithm.clone();
        let mut turns = 0;
        for at in start..end {
            let token = columns.token_ids[at] as u32;
            if columns.loss_mask[at] == 0 {
                assert_eq!((columns.versions[at], columns.advantages[at]), (-1, 0.0));
                continue;
            }
            assert!(columns.advantages[at].is_finite());
            if matches!(algorithm.kind, AlgorithmKind::Custom { .. })
                && algorithm.length_normalization == LengthNormalization::Token
            {
                assert_eq!(
                    columns.advantages[at], token as f32,
                    "the function's value for the token"
                );
            }
            let sampled = &self.sampled[&token];
            assert_eq!(sampled.rollout, rollout, "a token of another rollout");
            assert_eq!(sampled.version.0 as i32, columns.versions[at]);
            assert_eq!(sampled.logprob, columns.logprobs[at]);
            assert!(
                step.0 - 1 - sampled.version.0 <= self.config.run.max_off_policy_steps,
                "a stale token is trained"
            );
            assert!(
                self.trained_tokens.insert(token),
                "token {token} is trained twice"
            );
            turns += usize::from(sampled.prompt.is_some());
            if let Some(prompt) = &sampled.prompt {
                let before: Vec<u32> = columns.token_ids[start..at]
                    .iter()
                    .map(|token| *token as u32)
                    .collect();
                assert_eq!(
                    before, *prompt,
                    "the sequence before a turn is the engine's prompt"
                );
            }
        }
        assert!(turns > 0, "a sequence without a trained turn");
        assert!(
            turns == 1 || self.config.run.trajectory_strategy == TrajectoryStrategy::Interleaved,
            "{turns} turns are trained in one sequence"
        );
    }
}
