//! From lease to end: every rollout that has started, and how each one ends.

use primerl_core::counters::{CancelReason, Ended, VoidReason};
use primerl_core::effect::LeasedRollout;
use primerl_core::event::Outcome;
use primerl_core::failure::RolloutError;
use primerl_core::pack::PackedBatch;
use primerl_core::rollout::Rollout;
use primerl_core::*;
use std::collections::{BTreeMap, BTreeSet};

/// The data of a rollout that has started and not ended.
#[derive(Clone, Debug)]
pub struct Life {
    pub rollout: RolloutId,
    pub group: GroupId,
    pub slot: usize,
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    pub evaluates: Option<PolicyVersion>,
    pub worker: WorkerId,
    pub leased_at: Time,
    /// It ended well and waits for its group, or for a batch.
    pub is_finished: bool,
    /// `None` also if that was before the played part begins.
    pub finished_at: Option<Time>,
    pub turns: u32,
    pub sampled_tokens: u64,
    /// Rewards of all traces it reported.
    pub rewards: Vec<f64>,
}

/// How a rollout ended.
#[derive(Clone, Debug)]
pub enum End {
    Trained(Step),
    /// It had ended well.
    Voided(VoidReason),
    Failed(RolloutError),
    Cancelled(CancelReason),
    /// Lost with its worker: how the worker ended, and what else it ran.
    Lost(String),
    Evaluated,
}

#[derive(Clone, Debug)]
pub struct Fate {
    pub life: Life,
    pub at: Time,
    pub end: End,
}

impl End {
    /// The name in the core's counters.
    pub fn ended(&self) -> Ended {
        match self {
            End::Trained(_) => Ended::Trained,
            End::Voided(reason) => reason.ended(),
            End::Failed(_) => Ended::Failed,
            End::Cancelled(CancelReason::TooManyPolicies | CancelReason::TooOld) => Ended::Stale,
            End::Cancelled(_) | End::Lost(_) => Ended::Cancelled,
            End::Evaluated => Ended::Evaluated,
        }
    }

    /// The reason in one word; `None` if nothing went wrong.
    pub fn reason(&self) -> Option<String> {
        match self {
            End::Trained(_) | End::Evaluated => None,
            End::Voided(reason) => Some(super::name_of(reason)),
            End::Failed(error) => Some(error.kind.clone()),
            End::Cancelled(reason) => Some(super::name_of(reason)),
            End::Lost(_) => Some(super::name_of(&CancelReason::WorkerLost)),
        }
    }

    pub fn message(&self) -> Option<&str> {
        match self {
            End::Failed(error) => Some(&error.message),
            End::Lost(how) => Some(how),
            _ => None,
        }
    }

    /// Who is to blame for a failure.
    pub fn error(&self) -> Option<ErrorKind> {
        match self {
            End::Failed(error) => Some(ErrorKind::of(error)),
            End::Cancelled(CancelReason::WorkerLost) | End::Lost(_) => {
                Some(ErrorKind::Infrastructure)
            }
            _ => None,
        }
    }

    pub fn step(&self) -> Option<Step> {
        match self {
            End::Trained(step) => Some(*step),
            _ => None,
        }
    }
}

impl Life {
    fn leased(rollout: &Rollout, leased_at: Time) -> Life {
        let tokens = rollout.turns().iter().map(|turn| turn.sampled.len() as u64);
        Life {
            rollout: rollout.id,
            group: rollout.group,
            slot: rollout.slot,
            environment: rollout.environment,
            example: rollout.example,
            evaluates: rollout.evaluates,
            worker: rollout.worker,
            leased_at,
            is_finished: false,
            finished_at: None,
            turns: rollout.turns().len() as u32,
            sampled_tokens: tokens.sum(),
            rewards: Vec::new(),
        }
    }

    fn finished(rollout: &Rollout, leased_at: Time) -> Life {
        let samples = rollout.samples.iter();
        Life {
            is_finished: true,
            turns: rollout.traces.iter().map(|trace| trace.turns).sum(),
            sampled_tokens: samples.map(|sample| sample.loss_tokens).sum(),
            rewards: rollout.traces.iter().map(|trace| trace.reward).collect(),
            ..Life::leased(rollout, leased_at)
        }
    }
}

/// What the effects of one event say about rollouts.
#[derive(Default)]
struct Said<'a> {
    leased: Vec<&'a LeasedRollout>,
    closed: Vec<RolloutId>,
    failed: BTreeMap<RolloutId, &'a RolloutError>,
    cancelled: BTreeMap<RolloutId, CancelReason>,
    /// How workers with rollouts ended.
    gone: BTreeMap<WorkerId, &'a str>,
    voided: Vec<(RolloutId, VoidReason)>,
    cut: Vec<&'a PackedBatch>,
}

impl<'a> Said<'a> {
    fn of(effects: &'a [Effect]) -> Said<'a> {
        let mut said = Said::default();
        for effect in effects {
            match effect {
                Effect::Lease { rollouts, .. } => said.leased.extend(rollouts),
                Effect::RolloutClosed { rollout } => said.closed.push(*rollout),
                Effect::RolloutFailed { rollout, error } => {
                    said.failed.insert(*rollout, error);
                }
                Effect::CancelRollout {
                    rollout, reason, ..
                } => {
                    said.cancelled.insert(*rollout, *reason);
                }
                Effect::WorkerGone { worker, why } => {
                    said.gone.insert(*worker, why);
                }
                Effect::RolloutVoided { rollout, reason } => said.voided.push((*rollout, *reason)),
                Effect::BatchCut { batch } => said.cut.push(batch),
                _ => {}
            }
        }
        said
    }
}

#[derive(Debug, Default)]
pub(super) struct Fates {
    pub lives: BTreeMap<RolloutId, Life>,
    /// Rollouts of an evaluation that wait for their groups.
    held: BTreeSet<RolloutId>,
}

impl Fates {
    /// Rollouts that had started when the played part begins.
    pub(super) fn begin(core: &Core) -> Fates {
        let leased_at = |rollout: &Rollout| core.leased_at(rollout);
        let in_flight = core
            .rollouts()
            .map(|rollout| Life::leased(rollout, leased_at(rollout)));
        let finished = core.groups().flat_map(|group| {
            let rollouts = group.finished();
            rollouts.map(|rollout| Life::finished(rollout, leased_at(rollout)))
        });
        let held = core.held();
        let held = held.map(|rollout| Life::finished(rollout, leased_at(rollout)));
        Fates {
            lives: in_flight
                .chain(finished)
                .chain(held)
                .map(|life| (life.rollout, life))
                .collect(),
            held: core.held().map(|rollout| rollout.id).collect(),
        }
    }

    /// Takes an event and its effects; `core` is the state after it.
    pub(super) fn take_in(&mut self, event: &Event, effects: &[Effect], core: &Core) -> Vec<Fate> {
        self.saw_event(event);
        let said = Said::of(effects);
        for leased in &said.leased {
            self.lease(leased.rollout, core);
        }
        let mut ended = Vec::new();
        for id in &said.closed {
            ended.extend(self.close(*id, &said, core.now()));
        }
        for (id, reason) in said.voided {
            ended.extend(self.end(id, End::Voided(reason), core.now()));
        }
        for batch in said.cut {
            for id in rollouts_of(batch) {
                ended.extend(self.end(id, End::Trained(batch.step), core.now()));
            }
        }
        self.count_held(core, &mut ended);
        ended
    }

    fn saw_event(&mut self, event: &Event) {
        match event {
            Event::TurnFinished { rollout, turn } => self.turn(*rollout, turn),
            Event::RolloutFinished {
                rollout,
                worker,
                outcome,
            } => self.report(*rollout, *worker, outcome),
            _ => {}
        }
    }

    /// A rollout whose group has ended, and was not started again, has been counted.
    fn count_held(&mut self, core: &Core, ended: &mut Vec<Fate>) {
        if self.held.is_empty() {
            return;
        }
        let held: BTreeSet<RolloutId> = core.held().map(|rollout| rollout.id).collect();
        for id in std::mem::replace(&mut self.held, held) {
            if !self.held.contains(&id) {
                ended.extend(self.end(id, End::Evaluated, core.now()));
            }
        }
    }

    /// It is no longer in flight: over, or finished and waiting for its group.
    fn close(&mut self, id: RolloutId, said: &Said<'_>, now: Time) -> Option<Fate> {
        let life = self.lives.get_mut(&id)?;
        let end = match (
            said.failed.get(&id),
            said.cancelled.get(&id),
            life.evaluates,
        ) {
            (Some(error), _, _) => End::Failed((*error).clone()),
            (None, Some(reason), _) => match said.gone.get(&life.worker) {
                Some(how) if *reason == CancelReason::WorkerLost => End::Lost((*how).to_owned()),
                _ => End::Cancelled(*reason),
            },
            (None, None, evaluates) => {
                life.is_finished = true;
                life.finished_at = Some(now);
                if evaluates.is_some() {
                    self.held.insert(id);
                }
                return None;
            }
        };
        self.end(id, end, now)
    }

    fn turn(&mut self, rollout: RolloutId, turn: &Turn) {
        if let Some(life) = self
            .lives
            .get_mut(&rollout)
            .filter(|life| !life.is_finished)
        {
            life.turns += 1;
            life.sampled_tokens += turn.sampled.len() as u64;
        }
    }

    fn report(&mut self, rollout: RolloutId, worker: WorkerId, outcome: &Outcome) {
        let life = self.lives.get_mut(&rollout);
        if let Some(life) = life.filter(|life| !life.is_finished && life.worker == worker) {
            life.rewards = outcome.traces.iter().map(|trace| trace.reward).collect();
        }
    }

    fn lease(&mut self, id: RolloutId, core: &Core) {
        if let Some(rollout) = core.rollout(id) {
            let life = Life::leased(rollout, core.now());
            self.lives.insert(id, life);
        }
    }

    fn end(&mut self, id: RolloutId, end: End, at: Time) -> Option<Fate> {
        let life = self.lives.remove(&id)?;
        Some(Fate { life, at, end })
    }
}

/// Rollouts with a sample in the batch, each once, in order.
pub(super) fn rollouts_of(batch: &PackedBatch) -> Vec<RolloutId> {
    let micro_batches = batch.ranks.iter().flatten();
    let mut rollouts: Vec<RolloutId> = micro_batches
        .flat_map(|micro_batch| micro_batch.sequences())
        .map(|weighted| weighted.sample.rollout)
        .collect();
    rollouts.sort_unstable();
    rollouts.dedup();
    rollouts
}

#[cfg(test)]
mod tests;
