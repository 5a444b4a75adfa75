//! Reports of the buffer: for people, for `/status`, for the metrics of a step.

use super::deck::Pool;
use crate::ids::*;
use serde::{Deserialize, Serialize};

/// One number for each pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pools {
    pub easy: u32,
    pub normal: u32,
    pub hard: u32,
}

impl Pools {
    pub fn of(&self, pool: Pool) -> u32 {
        match pool {
            Pool::Easy => self.easy,
            Pool::Normal => self.normal,
            Pool::Hard => self.hard,
        }
    }

    pub fn of_mut(&mut self, pool: Pool) -> &mut u32 {
        match pool {
            Pool::Easy => &mut self.easy,
            Pool::Normal => &mut self.normal,
            Pool::Hard => &mut self.hard,
        }
    }

    pub fn sum(&self) -> u64 {
        u64::from(self.easy) + u64::from(self.normal) + u64::from(self.hard)
    }
}

/// What moved in one environment over a span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Movement {
    /// Examples that came into each pool from another one.
    pub into: Pools,
    /// Groups that were not trained because all of their rewards were equal.
    pub filtered: u32,
    /// How often all examples were made normal because none with weight was left.
    pub returned: u32,
}

/// The buffer of one environment when a step was cut.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EnvironmentStep {
    pub environment: EnvironmentId,
    /// Examples in each pool at the cut.
    pub pools: Pools,
    /// Since the cut before.
    pub movement: Movement,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BufferStep {
    pub step: Step,
    /// The buffer of each training environment whose examples are known.
    pub environments: Vec<EnvironmentStep>,
}

/// What draws are taken from: a pool, or all examples where nothing is filtered.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DeckReport {
    /// `None`: all examples.
    pub pool: Option<Pool>,
    /// Weight of one of its examples when the pool is chosen; 0 is never.
    pub weight: f64,
    pub examples: u32,
    /// Drawn in the present epoch.
    pub drawn: u32,
    /// Epochs that ended.
    pub epochs: u64,
}

/// The buffer of one training environment whose examples are known.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EnvironmentBuffer {
    pub environment: EnvironmentId,
    pub name: String,
    pub examples: u32,
    /// Examples of which a group was completed.
    pub seen: u32,
    /// Examples that are drawn no more, as their prompts are longer than the context; in none of the pools.
    pub resting: u32,
    pub pools: Pools,
    pub decks: Vec<DeckReport>,
    /// Groups that were not trained because all of their rewards were equal, since the run began.
    pub filtered_groups: u64,
    /// Their rollouts; part of the counter `filtered`.
    pub filtered_rollouts: u64,
    /// How many of these came in a row, up to now.
    pub filtered_in_a_row: u64,
    /// How often all examples were made normal because none with weight was left.
    pub returned: u64,
}

/// What `primerl buffer` shows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BufferReport {
    pub online_difficulty_filtering: bool,
    pub environments: Vec<EnvironmentBuffer>,
    /// The last 1000 steps, oldest first.
    pub steps: Vec<BufferStep>,
}

/// One complete group of an example.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Seen {
    /// The step that was to be cut next when the group was complete.
    pub step: Step,
    /// Over the traces of the group.
    pub mean_reward: f32,
    /// Where the example was filed.
    pub pool: Pool,
}

/// What became of one example.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExampleHistory {
    pub environment: EnvironmentId,
    pub example: ExampleIndex,
    /// Where it is now.
    pub pool: Pool,
    /// Complete groups.
    pub groups: u32,
    /// How often it changed its pool by its rewards.
    pub moves: u32,
    pub last_mean_reward: Option<f32>,
    /// The last 4 groups, oldest first.
    pub recent: Vec<Seen>,
}
