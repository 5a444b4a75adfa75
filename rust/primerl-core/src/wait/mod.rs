//! Waits that no request stands for: each has an owner, a reason, and a deadline at which it is warned about, and again
//! after the same span for as long as it lasts. None of them ends the run: the core cannot know whether a step takes a
//! second or an hour, but nothing waits in silence.

mod current;
mod words;

use crate::deadlines::{Deadlines, Due};
use crate::ids::*;
use crate::time::{Duration, Time};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Who waits for what. Texts are made where they are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Key {
    /// There is no engine that could serve.
    NoEngine,
    /// An engine was told to load this version and has not reported.
    EngineUpdate(EngineId, PolicyVersion),
    /// An environment has work to do, and nobody who does it.
    NoWorker(EnvironmentId),
    /// The trainer has not published this version.
    Weights(PolicyVersion),
    /// The trainer has not asked for this step's batch.
    BatchRequest(Step),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Armed {
    pub since: Time,
    pub deadline: Time,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Waits {
    armed: BTreeMap<Key, Armed>,
}

impl Waits {
    /// Makes `current` the waits there are, in the order of their keys. One that goes on keeps its start and its deadline.
    pub fn update(&mut self, current: &[(Key, Duration)], now: Time, deadlines: &mut Deadlines) {
        if self.armed.keys().eq(current.iter().map(|(key, _)| key)) {
            return;
        }
        self.armed.retain(|key, armed| {
            let goes_on = current.iter().any(|(other, _)| other == key);
            if !goes_on {
                deadlines.clear(armed.deadline, Due::Wait(*key));
            }
            goes_on
        });
        for (key, span) in current {
            self.armed.entry(*key).or_insert_with(|| {
                deadlines.set(now + *span, Due::Wait(*key));
                Armed {
                    since: now,
                    deadline: now + *span,
                }
            });
        }
    }

    /// A deadline passed: sets the next one. Returns since when the wait has lasted.
    pub fn rearm(
        &mut self,
        key: Key,
        span: Duration,
        now: Time,
        deadlines: &mut Deadlines,
    ) -> Option<Time> {
        let armed = self.armed.get_mut(&key)?;
        armed.deadline = now + span;
        deadlines.set(armed.deadline, Due::Wait(key));
        Some(armed.since)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&Key, &Armed)> {
        self.armed.iter()
    }
}
