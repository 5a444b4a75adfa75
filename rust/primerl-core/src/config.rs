//! What a run is told. Checked once, by [`Config::validate`], before a [`crate::Core`] is made.

use crate::time::Duration;
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Config {
    pub seed: u64,
    /// The run ends after this many steps.
    pub max_steps: u64,
    /// Rollouts per step, a multiple of `group_size`.
    pub batch_size: u32,
    /// Rollouts per example.
    pub group_size: u32,
    /// Longest micro-batch, tokens. A longer sample is dropped and counted.
    pub seq_len: u32,
    pub data_ranks: u32,
    /// How many steps generation may run ahead of the trainer; 0 is synchronous.
    pub max_async_level: u64,
    /// Bound on staleness of trained samples and on the policies one rollout in flight may have seen.
    pub max_off_policy_steps: u64,
    /// The in-flight target is this many times `batch_size`; at least 1.
    pub oversampling_factor: f64,
    pub algorithm: Algorithm,
    /// Training environments first, then evaluation environments; an [`crate::EnvironmentId`] is an index here.
    pub environments: Vec<Environment>,
    pub timeouts: Timeouts,
    /// Model shape for estimated FLOPs, by which micro-batches are balanced.
    pub flops: FlopsModel,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Environment {
    /// Unique among environments, appears in metrics and logs.
    pub name: String,
    pub role: Role,
    /// Relative share of training groups.
    pub ratio: f64,
    /// How often a failed rollout is tried again before its group is dropped.
    pub max_retries: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    Train,
    Evaluate(Evaluation),
}

/// An evaluation runs at one pinned policy version: the next weight update waits until it has ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Examples taken from the front of the environment's list; `None` is all.
    pub num_examples: Option<u32>,
    pub rollouts_per_example: u32,
    /// Every that many steps; `None` is only at the start and at the end.
    pub interval: Option<u64>,
    /// Evaluate version 0 before the first step.
    pub base_model: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Algorithm {
    /// Group-relative advantages (Shao et al. 2024, arXiv:2402.03300): reward minus the group's mean;
    /// with `normalize_std` also divided by the group's standard deviation.
    Grpo {
        normalize_std: bool,
        /// Negative control: permute advantages over the whole batch, so that nothing can be learnt.
        shuffle_advantages: bool,
    },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Timeouts {
    /// A rollout that has not ended this long after it was leased is cancelled and counts as failed.
    pub rollout: Duration,
    /// A worker that was not heard of for this long has lost its leases.
    pub worker: Duration,
    /// Longest time a lease or batch request waits before it is answered with a reason.
    pub long_poll: Duration,
    /// An evaluation that has not ended by then is closed with what it has.
    pub evaluation: Duration,
}

/// FLOPs of a forward and backward pass over one sequence of `n` tokens:
/// `linear * n + quadratic * n^2` (parameters' and attention's part).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct FlopsModel {
    pub linear: f64,
    pub quadratic: f64,
}
