//! Every deadline the core has set, in order of time.

use crate::ids::*;
use crate::time::Time;
use crate::wait::Wait;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Due {
    Rollout(RolloutId),
    Worker(WorkerId),
    Lease(RequestId),
    Batch(RequestId),
    Evaluation,
    Advantages(GroupId),
    Teacher(GroupId),
    Wait(Wait),
    /// An environment that rests may be tried again.
    Rest(EnvironmentId),
}

/// The owner of a deadline remembers its time, by which it clears it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Deadlines {
    queue: BTreeSet<(Time, Due)>,
}

impl Deadlines {
    pub fn set(&mut self, at: Time, due: Due) {
        self.queue.insert((at, due));
    }

    pub fn clear(&mut self, at: Time, due: Due) {
        self.queue.remove(&(at, due));
    }

    pub fn next(&self) -> Option<Time> {
        self.queue.first().map(|(at, _)| *at)
    }

    /// Takes out the first deadline that is not after `now`.
    pub fn pop(&mut self, now: Time) -> Option<Due> {
        let first = self.queue.first().filter(|(at, _)| *at <= now).copied()?;
        self.queue.remove(&first);
        Some(first.1)
    }
}
