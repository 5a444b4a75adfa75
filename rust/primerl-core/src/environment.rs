//! What the core knows of each environment, training or evaluated.

use crate::counters::Attempts;
use crate::curriculum::Rest;
use crate::failure::{ErrorCounts, ErrorKind, FirstError};
use crate::ids::*;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut, Index, IndexMut};

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct EnvironmentState {
    pub examples: Option<u32>,
    /// Groups are run whole, each by one worker ([`crate::group`]).
    #[serde(default)]
    pub whole_groups: bool,
    /// Slots of training groups that wait for a worker. The oldest group is served first, so retries go before what
    /// was drawn later.
    pub queue: BTreeSet<(GroupId, usize)>,
    /// Lease requests that wait, by their order of arrival.
    pub requests: BTreeMap<u64, RequestId>,
    pub in_flight: usize,
    pub workers: usize,
    /// When work last waited for a worker without one asking: no one has asked since then.
    pub unasked_since: Time,
    /// No worker asked for its work for too long: it gives up its turns until one does.
    pub absent: bool,
    /// Groups taken out of the queue meanwhile. They hold no place; they resume when the environment has its turn.
    pub set_aside: BTreeSet<GroupId>,
    /// Training groups dropped since the last one that was completed.
    pub failed_groups: u32,
    /// Groups dropped in a row because their first prompts are longer than the context.
    #[serde(default)]
    pub too_long_groups: u32,
    /// Set while the environment rests and the others continue.
    #[serde(default)]
    pub rest: Option<Rest>,
    #[serde(default)]
    pub attempts: Attempts,
    /// Since the run began.
    #[serde(default)]
    pub errors: ErrorCounts,
    /// The first of each kind that was reported.
    #[serde(default)]
    pub first_errors: BTreeMap<ErrorKind, FirstError>,
}

impl EnvironmentState {
    /// The request that has waited longest.
    pub fn first_request(&self) -> Option<RequestId> {
        self.requests.first_key_value().map(|(_, request)| *request)
    }

    /// Makes a request of one of its workers wait to be served.
    pub fn add_request(&mut self, place: u64, request: RequestId) {
        self.requests.insert(place, request);
        self.absent = false;
    }

    /// Whether a group of it may be begun, as far as workers and rests go.
    pub fn may_draw(&self, now: Time) -> bool {
        !self.absent && self.rest.as_ref().is_none_or(|rest| rest.is_due(now))
    }

    /// Whether training work waits, queued or set aside.
    pub fn has_queued(&self) -> bool {
        !self.queue.is_empty() || !self.set_aside.is_empty()
    }
}

/// By [`EnvironmentId`].
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Environments(Vec<EnvironmentState>);

impl Environments {
    pub fn new(count: usize) -> Self {
        Environments(vec![EnvironmentState::default(); count])
    }

    pub fn contains(&self, id: EnvironmentId) -> bool {
        (id.0 as usize) < self.len()
    }

    /// Not borrowed from the states, which may be changed on the way.
    pub fn ids(&self) -> impl Iterator<Item = EnvironmentId> + use<> {
        (0..self.len() as u32).map(EnvironmentId)
    }
}

impl Deref for Environments {
    type Target = [EnvironmentState];

    fn deref(&self) -> &[EnvironmentState] {
        &self.0
    }
}

impl DerefMut for Environments {
    fn deref_mut(&mut self) -> &mut [EnvironmentState] {
        &mut self.0
    }
}

impl Index<EnvironmentId> for Environments {
    type Output = EnvironmentState;

    fn index(&self, id: EnvironmentId) -> &EnvironmentState {
        &self.0[id.0 as usize]
    }
}

impl IndexMut<EnvironmentId> for Environments {
    fn index_mut(&mut self, id: EnvironmentId) -> &mut EnvironmentState {
        &mut self.0[id.0 as usize]
    }
}
