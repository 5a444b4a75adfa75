//! The traces of one group, and which of them are compared with each other. Traces of another seat are another task: what
//! compares within the group compares traces of one seat.

use super::spread::differ;
use super::{Algorithm, TraceLength, penalise};
use crate::ids::{EnvironmentId, RolloutId};
use std::collections::BTreeMap;

/// The traces of one group.
#[derive(Clone, Debug)]
pub struct ScoredGroup<'a> {
    pub algorithm: &'a Algorithm,
    pub environment: EnvironmentId,
    pub rewards: Vec<f64>,
    /// The seat of each reward's trace; empty: all are of one seat, whose name the algorithm does not look at.
    pub seats: Vec<&'a str>,
    /// The rollout of each reward's trace, where the algorithm compares within rollouts; empty: each is one of its own.
    pub rollouts: Vec<RolloutId>,
    /// What each reward's trace took; looked at where there is a length penalty.
    pub lengths: Vec<TraceLength>,
}

impl<'a> ScoredGroup<'a> {
    /// A group of one seat, without lengths.
    pub fn plain(algorithm: &'a Algorithm, rewards: Vec<f64>) -> Self {
        ScoredGroup {
            algorithm,
            environment: EnvironmentId(0),
            rewards,
            seats: Vec::new(),
            rollouts: Vec::new(),
            lengths: Vec::new(),
        }
    }

    pub(super) fn seat(&self, place: usize) -> &'a str {
        self.seats.get(place).copied().unwrap_or_default()
    }

    /// The rewards of each seat by themselves, put together again.
    pub(super) fn by_seat(&self, advantages: impl Fn(&[f64]) -> Vec<f32>) -> Vec<f32> {
        match self.seats.iter().all(|seat| *seat == self.seats[0]) {
            true => self.compare(0..self.rewards.len(), &advantages),
            false => self.by_peers(|place| self.seat(place), advantages),
        }
    }

    /// The rewards of traces with one key by themselves, put together again.
    pub(super) fn by_peers<K: Ord>(
        &self,
        key: impl Fn(usize) -> K,
        advantages: impl Fn(&[f64]) -> Vec<f32>,
    ) -> Vec<f32> {
        let mut peers: BTreeMap<K, Vec<usize>> = BTreeMap::new();
        for place in 0..self.rewards.len() {
            peers.entry(key(place)).or_default().push(place);
        }
        let mut found = vec![0.0; self.rewards.len()];
        for places in peers.values() {
            let own = self.compare(places.iter().copied(), &advantages);
            for (place, advantage) in places.iter().zip(own) {
                found[*place] = advantage;
            }
        }
        found
    }

    /// Advantages of traces that are compared with each other. Where their rewards, less the length penalty, do not
    /// differ, all are 0, whatever the algorithm would make of their rounding.
    fn compare(
        &self,
        places: impl Iterator<Item = usize> + Clone,
        advantages: &impl Fn(&[f64]) -> Vec<f32>,
    ) -> Vec<f32> {
        let mut rewards: Vec<f64> = places.clone().map(|place| self.rewards[place]).collect();
        if let Some(penalty) = &self.algorithm.length_penalty {
            let length = |place: usize| self.lengths.get(place).copied().unwrap_or_default();
            let lengths: Vec<TraceLength> = places.map(length).collect();
            rewards = penalise(penalty, &rewards, &lengths);
        }
        match differ(rewards.iter().copied()) {
            true => advantages(&rewards),
            false => vec![0.0; rewards.len()],
        }
    }
}
