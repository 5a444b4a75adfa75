//! Looks at every effect from outside and knows what it must not be. It shares no code with the core.

use crate::config::*;
use crate::effect::{Effect, EvaluationReport, LeasedRollout};
use crate::event::Event;
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
    closed: bool,
}

/// What happened so far. Each method panics with the rule that was broken.
#[derive(Debug)]
pub struct Observer {
    config: Config,
    pub sampled: BTreeMap<u32, SampledToken>,
    trained_tokens: BTreeSet<u32>,
    trained_rollouts: BTreeMap<RolloutId, Step>,
    /// Cut short by their environments.
    truncated: BTreeSet<RolloutId>,
    leased: BTreeMap<RolloutId, LeasedAt>,
    proved: Option<PolicyVersion>,
    waiting: BTreeMap<RequestId, Time>,
    pub batches: BTreeMap<Step, PackedBatch>,
    pub evaluations: Vec<EvaluationReport>,
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
            proved: None,
            waiting: BTreeMap::new(),
            batches: BTreeMap::new(),
            evaluations: Vec::new(),
            warnings: Vec::new(),
            finished: None,
        }
    }

    pub fn saw_event(&mut self, event: &Event, now: Time) {
        match event {
            Event::LeaseRequested { request, .. } | Event::BatchRequested { request, .. } => {
                self.waiting.insert(*request, now);
            }
            Event::RequestDropped { request } => {
                self.waiting.remove(request);
            }
            Event::RolloutFinished {
                rollout, outcome, ..
            } if outcome.traces.iter().any(|trace| trace.truncated) => {
                self.truncated.insert(*rollout);
            }
            Event::EngineProved { version, .. } => self.proved = self.proved.max(Some(*version)),
            _ => {}
        }
    }

    pub fn saw_effect(&mut self, effect: &Effect) {
        assert!(
            self.finished.is_none()
                || matches!(
                    effect,
                    Effect::NoLease { finished: true, .. } | Effect::NoMoreBatches { .. }
                ),
            "after the end: {effect:?}"
        );
        match effect {
            Effect::Lease {
                request, rollouts, ..
            } => {
                self.answered(*request);
                assert!(!rollouts.is_empty(), "a lease of nothing");
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
                batch,
            } => {
                self.answered(*request);
                assert!((*rank as usize) < batch.ranks.len());
                assert_eq!(
                    self.batches.get(&batch.step),
                    Some(&**batch),
                    "every fetch of a step gets the batch that was cut"
                );
            }
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
            Effect::CancelRollout { rollout, .. } => assert!(
                !self.leased[rollout].closed,
                "{rollout} is cancelled after its end"
            ),
            Effect::Evaluated(report) => self.evaluations.push(report.clone()),
            Effect::Warn { message } => self.warnings.push(message.clone()),
            Effect::Finished { reason } => self.finished = Some(reason.clone()),
            Effect::Failed { reason } => panic!("the simulated faults are not hopeless: {reason}"),
            Effect::UpdateEngine { .. }
            | Effect::WorkerLost { .. }
            | Effect::ComputeAdvantages { .. } => {}
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

    /// Evaluations that the config asks for, in a run that went to its end: all are reported, once, in order.
    pub fn check_evaluations(&self) {
        for (id, environment) in self.config.environment_ids() {
            let Role::Evaluate(evaluation) = &environment.role else {
                continue;
            };
            let versions: Vec<u64> = self
                .evaluations
                .iter()
                .filter(|report| report.environment == id)
                .map(|report| report.version.0)
                .collect();
            let due = |version: &u64| {
                *version == self.config.max_steps
                    || (*version == 0 && evaluation.base_model)
                    || (*version > 0
                        && evaluation
                            .interval
                            .is_some_and(|interval| version.is_multiple_of(interval)))
            };
            assert_eq!(
                versions,
                (0..=self.config.max_steps).filter(due).collect::<Vec<_>>()
            );
        }
    }

    /// Every rollout that was leased is closed.
    pub fn check_all_closed(&self) {
        for (id, leased) in &self.leased {
            assert!(leased.closed, "rollout {id} was never closed");
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
            closed: false,
        };
        let proved = self
            .proved
            .expect("a rollout is leased before any version is proved");
        let ahead = self.batches.len() as u64 - proved.0;
        assert!(
            rollout.evaluation || ahead <= self.config.max_async_level,
            "a rollout is leased {ahead} steps ahead of version {proved}"
        );
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
    }

    fn saw_batch(&mut self, batch: &PackedBatch) {
        assert_eq!(
            batch.step.0,
            self.batches.len() as u64 + 1,
            "steps are cut in order"
        );
        assert!(batch.step.0 <= self.config.max_steps);
        assert_eq!(batch.ranks.len(), self.config.data_ranks as usize);
        let mut loss_tokens = 0;
        for micro_batch in batch.ranks.iter().flatten() {
            assert!(micro_batch.len() <= self.config.seq_len as usize);
            let columns = micro_batch.columns();
            loss_tokens += columns.loss_mask.iter().filter(|mask| **mask == 1).count() as u64;
            self.saw_micro_batch(batch.step, &columns);
        }
        assert!(loss_tokens > 0, "a batch without anything to train");
        assert_eq!(batch.loss_tokens, loss_tokens);
        self.batches.insert(batch.step, batch.clone());
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
            on_policy || self.config.max_async_level > 0,
            "rollout {rollout} of step {step} started when version {:?} was the newest",
            leased.proved
        );
        let trained_at = *self.trained_rollouts.entry(rollout).or_insert(step);
        assert_eq!(
            trained_at, step,
            "rollout {rollout} is trained in two steps"
        );
        assert!(
            self.config.truncated_rollouts == TruncatedRollouts::Train
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
                step.0 - 1 - sampled.version.0 <= self.config.max_off_policy_steps,
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
            turns == 1 || self.config.trajectory_strategy == TrajectoryStrategy::Interleaved,
            "{turns} turns are trained in one sequence"
        );
    }
}
