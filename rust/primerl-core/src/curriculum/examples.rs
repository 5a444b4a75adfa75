//! The difficulty buffer of one environment: which of its examples comes next, and what is known of each.
//!
//! Everything here costs memory for examples that were drawn, not for those that exist.

use super::deck::{Deck, Pool};
use super::record::Record;
use super::report::{DeckReport, EnvironmentBuffer, ExampleHistory, Movement, Pools, Seen};
use super::sparse::{IndexMap, by_key};
use crate::advantage::SMALLEST_DIFFERENCE;
use crate::config::Buffer;
use crate::ids::*;
use rand::Rng;
use serde::{Deserialize, Serialize};

/// Up to this many examples, [`Examples::check`] looks at each: it runs after every event in debug builds.
const CHECKED_ONE_BY_ONE: u32 = 1000;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Examples {
    /// While nothing is filtered all stay in its normal pool: one deck, plain epochs.
    deck: Deck,
    #[serde(serialize_with = "by_key")]
    records: IndexMap<Record>,
    pools: Pools,
    since_cut: Movement,
    #[serde(default)]
    pub drawn: u64,
    filtered_groups: u64,
    filtered_rollouts: u64,
    pub filtered_in_a_row: u64,
    returned: u64,
}

/// A complete group, as its example is filed by it.
#[derive(Clone, Copy, Debug)]
pub struct Filing {
    /// The step to be cut next.
    pub step: Step,
    pub mean_reward: f64,
    pub rollouts: usize,
    /// Not all of its advantages would be 0.
    pub has_signal: bool,
}

impl Examples {
    pub fn new(examples: u32) -> Self {
        Examples {
            deck: Deck::new(examples),
            records: IndexMap::default(),
            pools: Pools {
                normal: examples,
                ..Pools::default()
            },
            since_cut: Movement::default(),
            drawn: 0,
            filtered_groups: 0,
            filtered_rollouts: 0,
            filtered_in_a_row: 0,
            returned: 0,
        }
    }

    /// The next example. The second is how often pools were returned to normal, if they were for this draw.
    pub fn draw(&mut self, rules: &Buffer, rng: &mut impl Rng) -> Option<(u32, Option<u64>)> {
        if self.is_exhausted() {
            return None;
        }
        let returned = (self.total_weight(rules) <= 0.0).then(|| self.return_all());
        let pool = self.choose(rules, rng);
        let example = self.deck.draw(pool, rng)?;
        self.drawn += 1;
        Some((example, returned))
    }

    pub fn count(&self) -> u32 {
        self.deck.examples()
    }

    /// All of them rest.
    pub fn is_exhausted(&self) -> bool {
        self.deck.drawable() == 0
    }

    /// An example that cannot be used, whatever the policy: it is drawn no more. Returns how many rest by now, if it did
    /// not before.
    pub fn rest(&mut self, example: u32, rules: &Buffer) -> Option<u32> {
        if example >= self.deck.examples() || self.deck.is_resting(example) {
            return None;
        }
        *self.pools.of_mut(self.pool_of(example, rules)) -= 1;
        self.deck.rest(example);
        Some(self.deck.resting())
    }

    /// All examples may be drawn again.
    pub fn end_rests(&mut self, rules: &Buffer) {
        for example in self.deck.end_rests() {
            *self.pools.of_mut(self.pool_of(example, rules)) += 1;
        }
    }

    /// Files an example by the mean reward of its group. Returns whether the group is to be trained.
    pub fn file(&mut self, example: u32, filing: &Filing, rules: &Buffer) -> bool {
        let pool = class(filing.mean_reward, rules);
        let before = self.pool_of(example, rules);
        // A group of it may have been under way when it came to rest.
        let rests = self.deck.is_resting(example);
        if rules.online_difficulty_filtering && !rests {
            self.deck.file(example, pool);
        }
        if before != pool && !rests {
            *self.pools.of_mut(before) -= 1;
            *self.pools.of_mut(pool) += 1;
            *self.since_cut.into.of_mut(pool) += 1;
        }
        let record = self.records.entry(example).or_default();
        record.add(filing.step, filing.mean_reward, pool, before != pool);
        let trains = filing.has_signal || !rules.online_difficulty_filtering;
        match trains {
            true => self.filtered_in_a_row = 0,
            false => self.count_filtered(filing.rollouts as u64),
        }
        trains
    }

    fn count_filtered(&mut self, rollouts: u64) {
        self.filtered_in_a_row += 1;
        self.filtered_groups += 1;
        self.filtered_rollouts += rollouts;
        self.since_cut.filtered += 1;
    }

    /// The pools now, and what moved since the last call.
    pub fn end_step(&mut self) -> (Pools, Movement) {
        (self.pools, std::mem::take(&mut self.since_cut))
    }

    pub fn report(
        &self,
        environment: EnvironmentId,
        name: &str,
        rules: &Buffer,
    ) -> EnvironmentBuffer {
        let deck = |pool: Pool| DeckReport {
            pool: rules.online_difficulty_filtering.then_some(pool),
            weight: weight(pool, rules),
            examples: self.deck.len(pool),
            drawn: self.deck.drawn(pool),
            epochs: self.deck.epochs(pool),
        };
        EnvironmentBuffer {
            environment,
            name: name.to_owned(),
            examples: self.deck.examples(),
            seen: self.records.len() as u32,
            resting: self.deck.resting(),
            pools: self.pools,
            decks: match rules.online_difficulty_filtering {
                true => Pool::ALL.map(deck).into(),
                false => vec![deck(Pool::Normal)],
            },
            filtered_groups: self.filtered_groups,
            filtered_rollouts: self.filtered_rollouts,
            filtered_in_a_row: self.filtered_in_a_row,
            returned: self.returned,
        }
    }

    pub fn history(
        &self,
        environment: EnvironmentId,
        example: ExampleIndex,
        rules: &Buffer,
    ) -> Option<ExampleHistory> {
        if example.0 >= self.deck.examples() {
            return None;
        }
        let record = self.records.get(&example.0);
        let recent: Vec<Seen> = record.map_or_else(Vec::new, Record::seen);
        Some(ExampleHistory {
            environment,
            example,
            pool: self.pool_of(example.0, rules),
            groups: record.map_or(0, |record| record.groups),
            moves: record.map_or(0, |record| record.moves),
            last_mean_reward: recent.last().map(|seen| seen.mean_reward),
            recent,
        })
    }

    /// # Errors
    /// What is wrong with the pools, in words.
    pub fn check(&self, rules: &Buffer) -> Result<(), String> {
        self.deck.check()?;
        let (examples, resting) = (self.deck.examples(), self.deck.resting());
        let sum = self.pools.sum() + u64::from(resting);
        if sum != u64::from(examples) {
            return Err(format!("{examples} examples are {sum} in the pools"));
        }
        let differs = |pool: Pool| self.deck.len(pool) != self.pools.of(pool);
        if rules.online_difficulty_filtering && Pool::ALL.into_iter().any(differs) {
            return Err(format!("{:?} differ from the deck's", self.pools));
        }
        if examples > CHECKED_ONE_BY_ONE {
            return Ok(());
        }
        let counted = self.counted(rules)?;
        match counted == self.pools {
            true => Ok(()),
            false => Err(format!("{:?} are filed as {counted:?}", self.pools)),
        }
    }

    /// The pools, by looking at each example.
    fn counted(&self, rules: &Buffer) -> Result<Pools, String> {
        let mut counted = Pools::default();
        for example in 0..self.deck.examples() {
            if !self.deck.knows(example) {
                return Err(format!("example {example} is lost"));
            }
            if !self.deck.is_resting(example) {
                *counted.of_mut(self.pool_of(example, rules)) += 1;
            }
        }
        Ok(counted)
    }

    /// The pool of an example; of one that rests, the pool that its last group filed it in.
    fn pool_of(&self, example: u32, rules: &Buffer) -> Pool {
        if rules.online_difficulty_filtering && !self.deck.is_resting(example) {
            return self.deck.pool_of(example);
        }
        let record = self.records.get(&example);
        record.map_or(Pool::Normal, Record::pool)
    }

    fn total_weight(&self, rules: &Buffer) -> f64 {
        let of = |pool| weight(pool, rules) * f64::from(self.deck.len(pool));
        Pool::ALL.into_iter().map(of).sum()
    }

    /// A pool, with probability proportional to its examples' weight in all.
    fn choose(&self, rules: &Buffer, rng: &mut impl Rng) -> Pool {
        if !rules.online_difficulty_filtering {
            return Pool::Normal;
        }
        let mut left = rng.random::<f64>() * self.total_weight(rules);
        let mut chosen = Pool::Normal;
        for pool in Pool::ALL {
            let own = weight(pool, rules) * f64::from(self.deck.len(pool));
            if own <= 0.0 {
                continue;
            }
            // Rounding may leave a rest behind the last one: then it is the last one's.
            chosen = pool;
            if left < own {
                break;
            }
            left -= own;
        }
        chosen
    }

    fn return_all(&mut self) -> u64 {
        let examples = self.deck.drawable();
        self.since_cut.into.normal += examples - self.pools.normal;
        self.since_cut.returned += 1;
        self.returned += 1;
        self.deck.return_all();
        self.pools = Pools {
            normal: examples,
            ..Pools::default()
        };
        self.returned
    }
}

/// A mean that a threshold is missed by rounding alone reaches it: `0.7 + 0.2 + 0.1` is below 1.
fn class(mean_reward: f64, rules: &Buffer) -> Pool {
    if mean_reward >= rules.easy_threshold - SMALLEST_DIFFERENCE {
        Pool::Easy
    } else if mean_reward <= rules.hard_threshold + SMALLEST_DIFFERENCE {
        Pool::Hard
    } else {
        Pool::Normal
    }
}

/// The weight of one example when a pool is chosen.
fn weight(pool: Pool, rules: &Buffer) -> f64 {
    match pool {
        _ if !rules.online_difficulty_filtering => 1.0,
        Pool::Easy => rules.easy_fraction,
        Pool::Normal => 1.0,
        Pool::Hard => rules.hard_fraction,
    }
}

#[cfg(test)]
mod tests;
