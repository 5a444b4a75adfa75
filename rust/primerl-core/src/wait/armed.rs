//! Waits with a deadline at which a warning is logged.

use super::Wait;
use crate::deadlines::{Deadlines, Due};
use crate::time::{Duration, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A wait with a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Armed {
    pub since: Time,
    pub deadline: Time,
}

impl Armed {
    pub fn new(now: Time, span: Duration) -> Self {
        Armed {
            since: now,
            deadline: now + span,
        }
    }
}

/// The waits that are warned about.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Waits {
    armed: BTreeMap<Wait, Armed>,
}

impl Waits {
    /// Replaces the waits by `current`, which is in ascending order. One that lasts keeps its start and its deadline.
    pub fn update(&mut self, current: &[(Wait, Duration)], now: Time, deadlines: &mut Deadlines) {
        if self.armed.keys().eq(current.iter().map(|(wait, _)| wait)) {
            return;
        }
        self.armed.retain(|wait, armed| {
            let lasts = current.iter().any(|(other, _)| other == wait);
            if !lasts {
                deadlines.clear(armed.deadline, Due::Wait(*wait));
            }
            lasts
        });
        for (wait, span) in current {
            self.armed.entry(*wait).or_insert_with(|| {
                let armed = Armed::new(now, *span);
                deadlines.set(armed.deadline, Due::Wait(*wait));
                armed
            });
        }
    }

    /// A deadline passed: sets the next one. Returns since when the wait has lasted.
    pub fn rearm(
        &mut self,
        wait: Wait,
        span: Duration,
        now: Time,
        deadlines: &mut Deadlines,
    ) -> Option<Time> {
        let armed = self.armed.get_mut(&wait)?;
        armed.deadline = now + span;
        deadlines.set(armed.deadline, Due::Wait(wait));
        Some(armed.since)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Wait, &Armed)> {
        self.armed.iter()
    }
}
