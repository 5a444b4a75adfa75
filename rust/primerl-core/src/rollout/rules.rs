//! Which of a finished rollout's samples are trained, and how long they may be.

use crate::config::{Config, LongSamples, TrajectoryStrategy, TruncatedRollouts};
use crate::event::Outcome;
use crate::failure::RolloutError;
use crate::ids::EnvironmentId;
use crate::sample::Sample;
use serde::{Deserialize, Serialize};

/// What a finished rollout's turns become, and which parts are dropped.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub strategy: TrajectoryStrategy,
    pub truncated: TruncatedRollouts,
    pub long: LongSamples,
    pub seq_len: usize,
    /// The algorithm has no meaning for a reward below it.
    pub lowest_reward: f64,
}

impl Rules {
    pub fn of(config: &Config, environment: EnvironmentId) -> Self {
        let algorithm = &config.environment(environment).algorithm;
        Rules {
            strategy: config.run.trajectory_strategy,
            truncated: config.run.truncated_rollouts,
            long: config.run.long_samples,
            seq_len: config.run.seq_len as usize,
            lowest_reward: algorithm.kind.lowest_reward(),
        }
    }

    /// A rollout that the environment cut short may have to fail.
    pub(super) fn check_whole(
        &self,
        samples: &[Sample],
        outcome: &Outcome,
    ) -> Result<(), RolloutError> {
        let truncated = |sample: &Sample| outcome.traces[sample.trace].truncated;
        if self.truncated == TruncatedRollouts::Drop && samples.iter().any(truncated) {
            return Err(RolloutError::new(
                "truncated",
                "the environment cut it short, and truncated_rollouts = \"drop\"".to_owned(),
            ));
        }
        Ok(())
    }

    /// Whether a sample is to be trained; shortens it where the rules say so. `truncated`: its trace is.
    pub(super) fn keep(
        &self,
        sample: &mut Sample,
        truncated: bool,
        left_out: &mut LeftOut,
    ) -> bool {
        if truncated && self.truncated == TruncatedRollouts::Mask {
            left_out.masked += 1;
            return false;
        }
        if sample.len() <= self.seq_len {
            return true;
        }
        if self.long == LongSamples::Truncate {
            sample.truncate(self.seq_len);
        }
        let keep = self.long == LongSamples::Truncate && sample.loss_tokens > 0;
        match keep {
            true => left_out.cut += 1,
            false => left_out.too_long += 1,
        }
        keep
    }
}

/// Samples of a finished rollout that are not trained as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    /// Longer than `seq_len`, or with nothing to train within it.
    pub too_long: u32,
    /// Cut to `seq_len`.
    pub cut: u32,
    /// Part of a trace that the environment truncated.
    pub masked: u32,
}
