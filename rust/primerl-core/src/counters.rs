//! How rollouts ended. Each ends in exactly one way, so the counters add up to what was dispatched.

use serde::{Deserialize, Serialize};

/// How a rollout ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// In a cut batch, with at least one sample.
    Trained,
    /// Finished well, but left out for a reason that is not its own staleness: its group was dropped, or all of its
    /// samples are longer than `seq_len`.
    Filtered,
    /// Sampled by too many policies, or too old at the cut.
    Stale,
    /// The environment failed, the time was up, or nothing trainable was sampled.
    Failed,
    /// Not needed any more (its group was dropped, the run ended) or lost with its worker.
    Cancelled,
    /// Part of an evaluation's report.
    Evaluated,
}

/// Numbers of rollouts since the run began. With those in flight and those finished and not yet cut,
/// the endings always add up to `dispatched`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Leased to a worker. Each lease is a new rollout.
    pub dispatched: u64,
    pub trained: u64,
    pub filtered: u64,
    pub stale: u64,
    pub failed: u64,
    pub cancelled: u64,
    pub evaluated: u64,
    /// Rollouts to be trained that the environment cut short. This and the next two are no endings: they say more of
    /// rollouts that are counted above.
    pub truncated: u64,
    /// Failed because nothing trainable was sampled.
    pub empty: u64,
    /// Failed because the environment said so.
    pub errored: u64,
}

impl Counters {
    pub fn count(&mut self, ended: Ended) {
        *match ended {
            Ended::Trained => &mut self.trained,
            Ended::Filtered => &mut self.filtered,
            Ended::Stale => &mut self.stale,
            Ended::Failed => &mut self.failed,
            Ended::Cancelled => &mut self.cancelled,
            Ended::Evaluated => &mut self.evaluated,
        } += 1;
    }

    /// Rollouts that have ended, in whatever way.
    pub fn ended(&self) -> u64 {
        self.trained + self.filtered + self.stale + self.failed + self.cancelled + self.evaluated
    }
}
