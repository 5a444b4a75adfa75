//! The history of one group.

use super::fates::{Fate, Life};
use super::play::{Beginning, JournalSummary, Moment, Observer, play};
use super::rollout::Known;
use super::{InspectError, environment_name, seconds};
use primerl_core::counters::{Ended, VoidReason};
use primerl_core::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// One rollout of a group or a batch, in one line.
#[derive(Clone, Debug, Serialize)]
pub struct RolloutLine {
    pub rollout: RolloutId,
    pub group: GroupId,
    pub slot: usize,
    pub worker: WorkerId,
    pub leased_s: f64,
    /// When it ended well and began to wait for its group.
    pub finished_s: Option<f64>,
    /// When it was cut or lost.
    pub ended_s: Option<f64>,
    pub turns: u32,
    pub sampled_tokens: u64,
    pub rewards: Vec<f64>,
    /// `None` while it is in flight or waits.
    pub ended: Option<Ended>,
    pub reason: Option<String>,
    pub message: Option<String>,
}

impl RolloutLine {
    pub(super) fn living(life: &Life) -> RolloutLine {
        RolloutLine {
            rollout: life.rollout,
            group: life.group,
            slot: life.slot,
            worker: life.worker,
            leased_s: seconds(life.leased_at),
            finished_s: life.finished_at.map(seconds),
            ended_s: None,
            turns: life.turns,
            sampled_tokens: life.sampled_tokens,
            rewards: life.rewards.clone(),
            ended: None,
            reason: None,
            message: None,
        }
    }

    pub(super) fn ended(fate: &Fate) -> RolloutLine {
        RolloutLine {
            ended_s: Some(seconds(fate.at)),
            ended: Some(fate.end.ended()),
            reason: fate.end.reason(),
            message: fate.end.message().map(str::to_owned),
            ..RolloutLine::living(&fate.life)
        }
    }
}

/// Why a group was dropped.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Dropped {
    pub at_s: f64,
    pub reason: VoidReason,
    pub why: String,
}

#[derive(Clone, Debug, Serialize)]
pub struct GroupTrace {
    pub story: JournalSummary,
    pub group: GroupId,
    pub environment: String,
    pub example: ExampleIndex,
    /// The version that it evaluates.
    pub evaluates: Option<PolicyVersion>,
    /// When its first rollout was leased.
    pub began_s: f64,
    /// Every attempt, in the order of leases.
    pub rollouts: Vec<RolloutLine>,
    pub complete_s: Option<f64>,
    /// The step whose batch it is in, and when that batch was cut.
    pub step: Option<Step>,
    pub cut_s: Option<f64>,
    pub dropped: Option<Dropped>,
}

struct Seeker {
    id: GroupId,
    known: Known,
    first: Option<Life>,
    ended: Vec<RolloutLine>,
    complete_at: Option<Time>,
    cut: Option<(Step, Time)>,
    dropped: Option<Dropped>,
}

impl Seeker {
    fn begin(id: GroupId, beginning: &Beginning<'_>) -> Seeker {
        let mut seeker = Seeker {
            id,
            known: Known::default(),
            first: None,
            ended: Vec::new(),
            complete_at: None,
            cut: None,
            dropped: None,
        };
        beginning.lives.values().for_each(|life| seeker.began(life));
        seeker
    }

    fn began(&mut self, life: &Life) {
        self.known.add(life.group.0);
        if life.group == self.id && self.first.is_none() {
            self.first = Some(life.clone());
        }
    }

    fn saw_effect(&mut self, effect: &Effect, moment: &Moment<'_>) {
        match effect {
            Effect::Lease { rollouts, .. } => {
                let lives = rollouts
                    .iter()
                    .filter_map(|leased| moment.lives.get(&leased.rollout));
                lives.for_each(|life| self.began(life));
            }
            Effect::GroupDropped { group, reason, why } if *group == self.id => {
                self.dropped = Some(Dropped {
                    at_s: seconds(moment.now),
                    reason: *reason,
                    why: why.clone(),
                });
            }
            _ => {}
        }
    }

    /// All its rollouts, in the order of leases.
    fn rollouts(&mut self, lives: &BTreeMap<RolloutId, Life>) -> Vec<RolloutLine> {
        let mut rollouts = std::mem::take(&mut self.ended);
        let living = lives.values().filter(|life| life.group == self.id);
        rollouts.extend(living.map(RolloutLine::living));
        rollouts.sort_by_key(|line| line.rollout);
        rollouts
    }
}

impl Observer for Seeker {
    fn saw(&mut self, moment: &Moment<'_>) {
        for effect in moment.effects {
            self.saw_effect(effect, moment);
        }
        let fates = moment.ended.iter();
        for fate in fates.filter(|fate| fate.life.group == self.id) {
            self.ended.push(RolloutLine::ended(fate));
            if let Some(step) = fate.end.step() {
                self.cut = Some((step, moment.now));
            }
        }
        let is_complete = self.cut.is_some() || moment.core.is_group_complete(self.id);
        if is_complete && self.complete_at.is_none() {
            self.complete_at = Some(moment.now);
        }
    }
}

/// The history of one group.
///
/// # Errors
/// The journal cannot be read, or holds no such group.
pub fn group(output_dir: &Path, id: GroupId) -> Result<GroupTrace, InspectError> {
    let played = play(output_dir, |beginning| Seeker::begin(id, beginning))?;
    let (mut seeker, story) = (played.observer, played.story);
    let Some(first) = seeker.first.take() else {
        return Err(seeker.known.unknown("group", id.0, &story));
    };
    Ok(GroupTrace {
        story,
        group: id,
        environment: environment_name(&played.core, first.environment),
        example: first.example,
        evaluates: first.evaluates,
        began_s: seconds(first.leased_at),
        rollouts: seeker.rollouts(&played.lives),
        complete_s: seeker.complete_at.map(seconds),
        step: seeker.cut.map(|(step, _)| step),
        cut_s: seeker.cut.map(|(_, at)| seconds(at)),
        dropped: seeker.dropped,
    })
}
