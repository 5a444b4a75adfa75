//! How rollouts ended. Each ends in exactly one way, so the counters add up to what was dispatched.

use crate::failure::ErrorCounts;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How a rollout ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Ended {
    /// In a cut batch, with at least one sample.
    Trained,
    /// Finished well, but not trained for a reason that is not its own staleness: its group was dropped or had no signal,
    /// or all of its samples are longer than `seq_len`.
    Filtered,
    /// Sampled by too many policies, or too old for the next step to be cut.
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
    /// Rollouts to be trained that the environment cut short. This and the next two are not endings: they describe
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

/// Training rollouts of one environment that have left flight since the last cut, for whatever reason, whether or not
/// they will be trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempts {
    pub ended: u64,
    /// How many of these are `empty` as in [`Counters`].
    pub empty: u64,
    pub errored: u64,
    /// Failed, or lost with their worker.
    #[serde(default)]
    pub errors: ErrorCounts,
}

impl Attempts {
    pub fn add(&mut self, other: &Attempts) {
        self.ended += other.ended;
        self.empty += other.empty;
        self.errored += other.errored;
        self.errors.add(&other.errors);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CancelReason {
    /// More than `max_off_policy_steps` policies contributed.
    TooManyPolicies,
    /// What it has sampled would be staler than `max_off_policy_steps` at the next step to be cut.
    TooOld,
    Timeout,
    WorkerLost,
    /// Its group was dropped.
    GroupDropped,
    /// Another rollout of its group gave no result, and its environment rewards whole groups.
    GroupRestarted,
    /// It evaluated weights in whose place the trainer has published others.
    WeightsReplaced,
    RunFinished,
}

impl CancelReason {
    pub const ALL: [CancelReason; 8] = [
        CancelReason::TooManyPolicies,
        CancelReason::TooOld,
        CancelReason::Timeout,
        CancelReason::WorkerLost,
        CancelReason::GroupDropped,
        CancelReason::GroupRestarted,
        CancelReason::WeightsReplaced,
        CancelReason::RunFinished,
    ];

    /// As in metrics: `cancelled/<name>`.
    pub fn name(self) -> &'static str {
        match self {
            CancelReason::TooManyPolicies => "too_many_policies",
            CancelReason::TooOld => "too_old",
            CancelReason::Timeout => "timeout",
            CancelReason::WorkerLost => "worker_lost",
            CancelReason::GroupDropped => "group_dropped",
            CancelReason::GroupRestarted => "group_restarted",
            CancelReason::WeightsReplaced => "weights_replaced",
            CancelReason::RunFinished => "run_finished",
        }
    }
}

/// Why a finished rollout is not trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VoidReason {
    /// Staler than `max_off_policy_steps` at the next step to be cut.
    TooOld,
    /// Its group was dropped because of another rollout.
    GroupDropped,
    /// All of its samples are longer than `seq_len`.
    TooLong,
    /// All of its samples were cut short by the environment, and such are masked.
    Masked,
    /// All rewards of its group were equal, and such groups are filtered.
    NoSignal,
    /// Another rollout of its group failed or was lost, and its environment rewards whole groups: it is run again.
    GroupIncomplete,
    /// The run ended before its group was cut.
    RunFinished,
}

impl VoidReason {
    pub const ALL: [VoidReason; 7] = [
        VoidReason::TooOld,
        VoidReason::GroupDropped,
        VoidReason::TooLong,
        VoidReason::Masked,
        VoidReason::NoSignal,
        VoidReason::GroupIncomplete,
        VoidReason::RunFinished,
    ];

    /// As in metrics: `voided/<name>`.
    pub fn name(self) -> &'static str {
        match self {
            VoidReason::TooOld => "too_old",
            VoidReason::GroupDropped => "group_dropped",
            VoidReason::TooLong => "too_long",
            VoidReason::Masked => "masked",
            VoidReason::NoSignal => "no_signal",
            VoidReason::GroupIncomplete => "group_incomplete",
            VoidReason::RunFinished => "run_finished",
        }
    }

    /// How such a rollout ends.
    pub fn ended(self) -> Ended {
        match self {
            VoidReason::TooOld => Ended::Stale,
            VoidReason::GroupDropped
            | VoidReason::TooLong
            | VoidReason::Masked
            | VoidReason::NoSignal => Ended::Filtered,
            VoidReason::GroupIncomplete | VoidReason::RunFinished => Ended::Cancelled,
        }
    }
}

/// What was discarded since the run began, and why. A rollout is cancelled in flight, voided after it had finished, or
/// fails.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Discards {
    pub cancelled: BTreeMap<CancelReason, u64>,
    pub voided: BTreeMap<VoidReason, u64>,
    /// By [`crate::failure::RolloutError::kind`]; failed turns, which need not fail their rollout, as `turn`.
    pub failed: BTreeMap<String, u64>,
    /// Slots of groups that were filled again.
    pub slots_refilled: u64,
    /// Slots of groups that were given up.
    pub slots_lost: u64,
    pub groups_dropped: u64,
    /// Groups set aside because no worker asked for their environment's work.
    pub groups_set_aside: u64,
    /// Whole groups begun again because of one of their rollouts.
    #[serde(default)]
    pub groups_restarted: u64,
}

impl Discards {
    pub fn cancelled(&mut self, reason: CancelReason) {
        *self.cancelled.entry(reason).or_default() += 1;
    }

    /// Counts a finished rollout that is not trained. Returns how it ends.
    pub fn voided(&mut self, reason: VoidReason) -> Ended {
        *self.voided.entry(reason).or_default() += 1;
        reason.ended()
    }

    pub fn failed(&mut self, kind: &str) {
        match self.failed.get_mut(kind) {
            Some(count) => *count += 1,
            None => {
                self.failed.insert(kind.to_owned(), 1);
            }
        }
    }
}

/// Everything the run counts.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub counters: Counters,
    pub discards: Discards,
    /// Tokens of all turns that engines have sampled since the run began, whatever became of them.
    pub sampled_tokens: u64,
    /// The counts at the last cut.
    pub last_cut: Interval,
    /// Events about something that the core does not know, by kind.
    pub ignored: BTreeMap<String, u64>,
}

impl Tally {
    /// What was counted since the last cut; the next interval begins here.
    pub fn end_interval(&mut self) -> Interval {
        let counted = Interval {
            counters: self.counters,
            discards: self.discards.clone(),
        };
        let interval = Interval::between(&self.last_cut, &counted);
        self.last_cut = counted;
        interval
    }
}

/// What was counted since the previous cut.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub counters: Counters,
    #[serde(rename = "losses")]
    pub discards: Discards,
}

impl Interval {
    /// The difference of two readings.
    pub fn between(earlier: &Interval, later: &Interval) -> Interval {
        let (a, b) = (&earlier.counters, &later.counters);
        let (c, d) = (&earlier.discards, &later.discards);
        Interval {
            counters: Counters {
                dispatched: b.dispatched - a.dispatched,
                trained: b.trained - a.trained,
                filtered: b.filtered - a.filtered,
                stale: b.stale - a.stale,
                failed: b.failed - a.failed,
                cancelled: b.cancelled - a.cancelled,
                evaluated: b.evaluated - a.evaluated,
                truncated: b.truncated - a.truncated,
                empty: b.empty - a.empty,
                errored: b.errored - a.errored,
            },
            discards: Discards {
                cancelled: grown(&c.cancelled, &d.cancelled),
                voided: grown(&c.voided, &d.voided),
                failed: grown(&c.failed, &d.failed),
                slots_refilled: d.slots_refilled - c.slots_refilled,
                slots_lost: d.slots_lost - c.slots_lost,
                groups_dropped: d.groups_dropped - c.groups_dropped,
                groups_set_aside: d.groups_set_aside - c.groups_set_aside,
                groups_restarted: d.groups_restarted - c.groups_restarted,
            },
        }
    }
}

/// By how much each count grew; what did not grow has no entry.
fn grown<K: Ord + Clone>(earlier: &BTreeMap<K, u64>, later: &BTreeMap<K, u64>) -> BTreeMap<K, u64> {
    later
        .iter()
        .map(|(key, count)| (key.clone(), count - earlier.get(key).unwrap_or(&0)))
        .filter(|(_, grown)| *grown > 0)
        .collect()
}
