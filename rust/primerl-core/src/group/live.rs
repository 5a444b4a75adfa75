//! The training groups that are begun and not cut.

use super::Group;
use crate::ids::*;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Clone, Debug, Default)]
pub(crate) struct Groups {
    pub live: BTreeMap<GroupId, Group>,
    /// Complete groups with all that their advantages need, in the order in which they became so.
    pub ready: BTreeSet<(u64, GroupId)>,
    pub next_ready: u64,
    pub next: u64,
}

impl Groups {
    /// Numbers for that many new groups; returns the first.
    pub fn number(&mut self, count: u32) -> GroupId {
        let first = GroupId(self.next);
        self.next += u64::from(count);
        first
    }

    /// A complete group, with all that its advantages need, waits for its batch.
    pub fn set_ready(&mut self, id: GroupId) {
        let since = self.next_ready;
        self.next_ready += 1;
        if let Some(group) = self.live.get_mut(&id) {
            group.ready_since = Some(since);
        }
        self.ready.insert((since, id));
    }

    /// Takes out the `count` groups that became ready first, in the order in which they were begun: which groups are
    /// trained depends on when they became ready, how they are packed does not.
    pub fn take_ready(&mut self, count: usize) -> Vec<Group> {
        let mut chosen = Vec::with_capacity(count);
        for _ in 0..count {
            chosen.extend(self.ready.pop_first().map(|(_, id)| id));
        }
        chosen.sort_unstable();
        let groups = chosen.iter().filter_map(|id| self.live.remove(id));
        groups.collect()
    }

    pub fn remove(&mut self, id: GroupId) -> Option<Group> {
        let group = self.live.remove(&id)?;
        if let Some(since) = group.ready_since {
            self.ready.remove(&(since, id));
        }
        Some(group)
    }
}
