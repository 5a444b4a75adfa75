//! The examples of one environment in an order of segments, of which draws take without replacement.
//!
//! ```text
//! | easy            | normal          | hard            |
//! | undrawn | drawn | undrawn | drawn | undrawn | drawn | resting |
//! ```
//! Each pool is a deck with epochs of its own: a draw takes one of its undrawn examples at random, and when none is left
//! all of the pool are undrawn again. All pools together are one permutation, cut by six ends: an example is always in
//! exactly one of them, and which one shows in its position. Moving it moves one other for each end it crosses, and
//! a new epoch moves none, so neither depends on the number of examples. Behind all pools are those that are drawn no
//! more.

use super::sparse::Permutation;
use rand::Rng;
use serde::{Deserialize, Serialize};

/// How hard an example was when it was last tried; see `[buffer]` of the config.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pool {
    Easy,
    /// Also an example that was never tried.
    Normal,
    Hard,
}

impl Pool {
    pub const ALL: [Pool; 3] = [Pool::Easy, Pool::Normal, Pool::Hard];

    pub fn name(self) -> &'static str {
        match self {
            Pool::Easy => "easy",
            Pool::Normal => "normal",
            Pool::Hard => "hard",
        }
    }
}

const SEGMENTS: usize = 2 * Pool::ALL.len();

#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Deck {
    order: Permutation,
    /// Where each segment ends and the next begins; the last one is the number of examples that may be drawn.
    ends: [u32; SEGMENTS],
    /// Examples behind these.
    #[serde(default)]
    resting: u32,
    /// Epochs that ended, of each pool.
    epochs: [u64; 3],
}

impl Deck {
    /// All examples are normal and undrawn.
    pub fn new(examples: u32) -> Self {
        let mut deck = Deck {
            order: Permutation::default(),
            ends: [0; SEGMENTS],
            resting: 0,
            epochs: [0; 3],
        };
        deck.ends[undrawn(Pool::Normal)..].fill(examples);
        deck
    }

    /// Resting ones too.
    pub fn examples(&self) -> u32 {
        self.drawable() + self.resting
    }

    /// Examples of all pools.
    pub fn drawable(&self) -> u32 {
        self.ends[SEGMENTS - 1]
    }

    /// Examples that are drawn no more.
    pub fn resting(&self) -> u32 {
        self.resting
    }

    pub fn is_resting(&self, example: u32) -> bool {
        self.order.position_of(example) >= self.drawable()
    }

    /// Takes an example out of its pool for good. Returns whether it was in one.
    pub fn rest(&mut self, example: u32) -> bool {
        if self.is_resting(example) {
            return false;
        }
        let last = SEGMENTS - 1;
        let segment = self.segment_of(self.order.position_of(example));
        self.shift(example, segment, last);
        let (hole, end) = (self.order.position_of(example), self.ends[last] - 1);
        if hole != end {
            let other = self.order.example_at(end);
            self.order.put(hole, other);
            self.order.put(end, example);
        }
        self.ends[last] = end;
        self.resting += 1;
        true
    }

    /// How many examples are in the pool.
    pub fn len(&self, pool: Pool) -> u32 {
        self.ends[drawn(pool)] - self.start(undrawn(pool))
    }

    /// How many of those were drawn in its present epoch.
    pub fn drawn(&self, pool: Pool) -> u32 {
        self.ends[drawn(pool)] - self.ends[undrawn(pool)]
    }

    /// Epochs of the pool that ended.
    pub fn epochs(&self, pool: Pool) -> u64 {
        self.epochs[pool as usize]
    }

    /// Makes all that rest normal, drawn in the present epoch. Returns which they were.
    pub fn end_rests(&mut self) -> Vec<u32> {
        let last = SEGMENTS - 1;
        let positions = self.drawable()..self.examples();
        let resting: Vec<u32> = positions.map(|at| self.order.example_at(at)).collect();
        self.ends[last] += std::mem::take(&mut self.resting);
        for example in &resting {
            self.shift(*example, last, drawn(Pool::Normal));
        }
        resting
    }

    /// The pool of an example that does not rest.
    pub fn pool_of(&self, example: u32) -> Pool {
        Pool::ALL[self.segment_of(self.order.position_of(example)) / 2]
    }

    /// Takes one of the pool's undrawn examples; begins its next epoch first if there is none. `None` if it is empty.
    pub fn draw(&mut self, pool: Pool, rng: &mut impl Rng) -> Option<u32> {
        if self.len(pool) == 0 {
            return None;
        }
        let segment = undrawn(pool);
        if self.start(segment) == self.ends[segment] {
            self.ends[segment] = self.ends[drawn(pool)];
            self.epochs[pool as usize] += 1;
        }
        let position = rng.random_range(self.start(segment)..self.ends[segment]);
        let example = self.order.example_at(position);
        self.shift(example, segment, drawn(pool));
        Some(example)
    }

    /// Files an example that does not rest in a pool. If it comes from another one it counts as drawn in the present
    /// epoch.
    pub fn file(&mut self, example: u32, pool: Pool) {
        let segment = self.segment_of(self.order.position_of(example));
        if Pool::ALL[segment / 2] != pool {
            self.shift(example, segment, drawn(pool));
        }
    }

    /// Makes all examples normal and undrawn, but those that rest.
    pub fn return_all(&mut self) {
        let examples = self.drawable();
        self.ends[..undrawn(Pool::Normal)].fill(0);
        self.ends[undrawn(Pool::Normal)..].fill(examples);
        self.epochs[Pool::Normal as usize] += 1;
    }

    /// # Errors
    /// What is wrong with the segments, in words.
    pub fn check(&self) -> Result<(), String> {
        match self.ends.is_sorted() {
            true => Ok(()),
            false => Err(format!("the pools overlap: {:?}", self.ends)),
        }
    }

    /// Whether the order knows the example where it says that it is.
    pub fn knows(&self, example: u32) -> bool {
        self.order.example_at(self.order.position_of(example)) == example
    }

    fn start(&self, segment: usize) -> u32 {
        match segment {
            0 => 0,
            _ => self.ends[segment - 1],
        }
    }

    fn segment_of(&self, position: u32) -> usize {
        self.ends
            .iter()
            .position(|end| position < *end)
            .expect("an example's position is within the last segment's end")
    }

    /// Moves an example from one segment to another. At each end it crosses, the example next to that end goes where
    /// there is a hole, and the end moves over the hole it leaves; the last hole is the moved example's.
    fn shift(&mut self, example: u32, mut from: usize, to: usize) {
        let mut hole = self.order.position_of(example);
        while from != to {
            let next_to_end = if from < to {
                self.ends[from] -= 1;
                from += 1;
                self.ends[from - 1]
            } else {
                self.ends[from - 1] += 1;
                from -= 1;
                self.ends[from] - 1
            };
            if hole != next_to_end {
                let other = self.order.example_at(next_to_end);
                self.order.put(hole, other);
                hole = next_to_end;
            }
        }
        self.order.put(hole, example);
    }
}

fn undrawn(pool: Pool) -> usize {
    2 * pool as usize
}

fn drawn(pool: Pool) -> usize {
    2 * pool as usize + 1
}

#[cfg(test)]
mod tests;
