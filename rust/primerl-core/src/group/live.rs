//! The training groups that are begun and not cut.

use super::Group;
use crate::ids::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default)]
pub(crate) struct Groups {
    pub live: BTreeMap<GroupId, Group>,
    /// Complete groups with all that their advantages need, in the order in which they became so.
    pub ready: BTreeSet<(u64, GroupId)>,
    pub next_ready: u64,
    pub next: u64,
    pub usual: UsualTokens,
    sums: Sums,
}

/// How long rollouts are: the mean of the last ones, by which it is known how many a step of so many tokens needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct UsualTokens {
    tokens: f64,
    rollouts: u64,
}

/// So many rollouts, or about, are remembered.
const REMEMBERED: u64 = 256;

impl UsualTokens {
    pub fn note(&mut self, tokens: usize) {
        self.rollouts = (self.rollouts + 1).min(REMEMBERED);
        self.tokens += (tokens as f64 - self.tokens) / self.rollouts as f64;
    }

    /// Tokens of so many rollouts; where none is known, each is as long as a sample may be.
    pub fn of(&self, rollouts: usize, seq_len: u32) -> u64 {
        let each = match self.rollouts {
            0 => f64::from(seq_len),
            _ => self.tokens.max(1.0),
        };
        (each * rollouts as f64) as u64
    }
}

/// Rollouts that groups are begun for, lost ones included: a group takes the place in its batch that it was begun with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sums {
    /// The number of groups in `live`.
    pub live: usize,
    /// The number of those that are ready.
    pub ready: usize,
    /// Tokens of these when they became ready.
    pub ready_tokens: u64,
}

impl Groups {
    /// Numbers for that many new groups; returns the first.
    pub fn number(&mut self, count: u32) -> GroupId {
        let first = GroupId(self.next);
        self.next += u64::from(count);
        first
    }

    pub fn sums(&self) -> Sums {
        self.sums
    }

    /// What `sums` has to be.
    pub fn counted(&self) -> Sums {
        let size = |group: &Group| group.slots.len();
        let ready = || self.ready.iter().filter_map(|(_, id)| self.live.get(id));
        Sums {
            live: self.live.values().map(size).sum(),
            ready: ready().map(size).sum(),
            ready_tokens: ready().map(|group| group.ready_tokens).sum(),
        }
    }

    /// After `live` and `ready` were read from a snapshot.
    pub fn count_again(&mut self) {
        self.sums = self.counted();
    }

    pub fn insert(&mut self, group: Group) {
        self.sums.live += group.slots.len();
        self.live.insert(group.id, group);
    }

    /// A complete group, with all that its advantages need, waits for its batch.
    pub fn set_ready(&mut self, id: GroupId) {
        let since = self.next_ready;
        self.next_ready += 1;
        if let Some(group) = self.live.get_mut(&id) {
            group.ready_since = Some(since);
            let samples = group.samples();
            group.ready_tokens = samples.map(|(_, sample)| sample.len() as u64).sum();
            self.sums.ready += group.slots.len();
            self.sums.ready_tokens += group.ready_tokens;
        }
        self.ready.insert((since, id));
    }

    /// Takes out the groups that became ready first, until they have so many rollouts, or tokens, in the order in which they
    /// were begun: which groups are trained depends on when they became ready, how they are packed does not.
    pub fn take_ready(&mut self, needed: u64, of_tokens: bool) -> Vec<Group> {
        let (mut chosen, mut found) = (Vec::new(), 0);
        for (_, id) in &self.ready {
            if found >= needed {
                break;
            }
            found += self
                .live
                .get(id)
                .map_or(0, |group| group.ready_size(of_tokens));
            chosen.push(*id);
        }
        chosen.sort_unstable();
        let groups = chosen.into_iter().filter_map(|id| self.remove(id));
        groups.collect()
    }

    pub fn remove(&mut self, id: GroupId) -> Option<Group> {
        let group = self.live.remove(&id)?;
        self.sums.live -= group.slots.len();
        if let Some(since) = group.ready_since {
            self.ready.remove(&(since, id));
            self.sums.ready -= group.slots.len();
            self.sums.ready_tokens -= group.ready_tokens;
        }
        Some(group)
    }

    /// Takes all of them out.
    pub fn take_all(&mut self) -> impl Iterator<Item = Group> + use<> {
        self.ready.clear();
        self.sums = Sums::default();
        std::mem::take(&mut self.live).into_values()
    }
}
