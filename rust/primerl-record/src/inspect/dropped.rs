//! Rollouts and groups that were dropped, and why.

use super::fates::Fate;
use super::play::{JournalSummary, Moment, Observer, play};
use super::{InspectError, environment_name, seconds};
use primerl_core::counters::{Ended, VoidReason};
use primerl_core::*;
use serde::Serialize;
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

/// Number of the last ones of each kind that are shown.
const LAST: usize = 5;

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DroppedRollout {
    pub rollout: RolloutId,
    pub group: GroupId,
    pub environment: String,
    pub example: ExampleIndex,
    pub at_s: f64,
    pub message: Option<String>,
}

#[derive(Clone, Debug, Serialize)]
pub struct DroppedRollouts {
    pub ended: Ended,
    pub reason: String,
    pub count: u64,
    /// Tokens that they had sampled.
    pub sampled_tokens: u64,
    /// The last of them, oldest first.
    pub last: VecDeque<DroppedRollout>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DroppedGroup {
    pub group: GroupId,
    pub at_s: f64,
    pub why: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct DroppedGroups {
    pub reason: VoidReason,
    pub count: u64,
    /// The last of them, oldest first.
    pub last: VecDeque<DroppedGroup>,
}

#[derive(Clone, Debug, Serialize)]
pub struct DroppedReport {
    pub story: JournalSummary,
    /// All that ended in the played part, including trained ones.
    pub rollouts_ended: u64,
    pub sampled_tokens: u64,
    pub rollouts: Vec<DroppedRollouts>,
    pub groups: Vec<DroppedGroups>,
    /// Slots of groups that were filled again, and that were given up, since the run began.
    pub slots_refilled: u64,
    pub slots_lost: u64,
    /// Failed rollouts by kind since the run began, and failed turns as `turn`.
    pub failures: BTreeMap<String, u64>,
    /// Rollouts that failed or were lost with their worker, by who is to blame, since the run began.
    pub errors: BTreeMap<ErrorKind, u64>,
    /// Events that named something the core does not know, since the run began.
    pub ignored: BTreeMap<String, u64>,
}

#[derive(Default)]
struct Counting {
    ended: u64,
    sampled_tokens: u64,
    rollouts: BTreeMap<(Ended, String), DroppedRollouts>,
    groups: BTreeMap<VoidReason, DroppedGroups>,
}

fn keep<T>(last: &mut VecDeque<T>, item: T) {
    if last.len() == LAST {
        last.pop_front();
    }
    last.push_back(item);
}

impl DroppedRollout {
    fn of(fate: &Fate, core: &Core) -> DroppedRollout {
        let life = &fate.life;
        DroppedRollout {
            rollout: life.rollout,
            group: life.group,
            environment: environment_name(core, life.environment),
            example: life.example,
            at_s: seconds(fate.at),
            message: fate.end.message().map(str::to_owned),
        }
    }
}

impl Counting {
    fn saw_fate(&mut self, fate: &Fate, core: &Core) {
        let life = &fate.life;
        self.ended += 1;
        self.sampled_tokens += life.sampled_tokens;
        let Some(reason) = fate.end.reason() else {
            return;
        };
        let ended = fate.end.ended();
        let key = (ended, reason.clone());
        let dropped = self.rollouts.entry(key).or_insert_with(|| DroppedRollouts {
            ended,
            reason,
            count: 0,
            sampled_tokens: 0,
            last: VecDeque::new(),
        });
        dropped.count += 1;
        dropped.sampled_tokens += life.sampled_tokens;
        keep(&mut dropped.last, DroppedRollout::of(fate, core));
    }
}

impl Observer for Counting {
    fn saw(&mut self, moment: &Moment<'_>) {
        for fate in moment.ended {
            self.saw_fate(fate, moment.core);
        }
        for effect in moment.effects {
            let Effect::GroupDropped { group, reason, why } = effect else {
                continue;
            };
            let dropped = self.groups.entry(*reason).or_insert_with(|| DroppedGroups {
                reason: *reason,
                count: 0,
                last: VecDeque::new(),
            });
            dropped.count += 1;
            let one = DroppedGroup {
                group: *group,
                at_s: seconds(moment.now),
                why: why.clone(),
            };
            keep(&mut dropped.last, one);
        }
    }
}

/// What was sampled and not trained, by reason; the most frequent first.
///
/// # Errors
/// The journal cannot be read.
pub fn dropped(output_dir: &Path) -> Result<DroppedReport, InspectError> {
    let played = play(output_dir, |_| Counting::default())?;
    let counting = played.observer;
    let mut rollouts: Vec<DroppedRollouts> = counting.rollouts.into_values().collect();
    rollouts.sort_by_key(|dropped| std::cmp::Reverse(dropped.count));
    let mut groups: Vec<DroppedGroups> = counting.groups.into_values().collect();
    groups.sort_by_key(|dropped| std::cmp::Reverse(dropped.count));
    let status = played.core.status();
    Ok(DroppedReport {
        story: played.story,
        rollouts_ended: counting.ended,
        sampled_tokens: counting.sampled_tokens,
        rollouts,
        groups,
        slots_refilled: played.core.discards().slots_refilled,
        slots_lost: played.core.discards().slots_lost,
        failures: status.failures,
        errors: status.errors,
        ignored: status.ignored,
    })
}
