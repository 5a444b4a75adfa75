//! Lists of rollouts: filtered, sorted, one page at a time.

use super::{Fate, Index, Record};
use primerl_core::{EnvironmentId, RolloutId};
use serde::Deserialize;
use std::cmp::{Ordering, Reverse};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    #[default]
    Newest,
    HighestReward,
    LowestReward,
}

/// The filter of a list, where `None` takes all; and which page of it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Filter {
    pub step: Option<u32>,
    pub environment: Option<String>,
    pub fate: Option<Fate>,
    pub group: Option<u64>,
    /// Number of the example in its environment.
    pub example: Option<u32>,
    /// If either is given, rollouts without a reward do not match.
    pub min_reward: Option<f32>,
    pub max_reward: Option<f32>,
    #[serde(default)]
    pub order: Order,
    /// The page after this rollout.
    pub cursor: Option<u64>,
    /// The page before this rollout.
    pub until: Option<u64>,
    pub limit: Option<usize>,
}

/// One page of a list.
pub struct Listed<'a> {
    pub rollouts: Vec<&'a Record>,
    /// Number of all matches.
    pub matching: usize,
    /// Number of matches on earlier pages.
    pub before: usize,
}

impl Listed<'_> {
    /// The cursor of the next page.
    pub fn next(&self) -> Option<RolloutId> {
        let last = self.rollouts.last()?;
        let is_more = self.before + self.rollouts.len() < self.matching;
        is_more.then_some(last.rollout)
    }

    /// The `until` of the previous page.
    pub fn previous(&self) -> Option<RolloutId> {
        let first = self.rollouts.first()?;
        (self.before > 0).then_some(first.rollout)
    }
}

/// Its place in an order, the first one the least. Among equal rewards, the newest is first.
#[derive(Clone, Copy)]
struct Rank(f32, Reverse<u64>);

impl Rank {
    fn new(order: Order, reward: Option<f32>, rollout: u64) -> Rank {
        let by = match (order, reward) {
            (Order::Newest, _) => 0.0,
            (Order::HighestReward, Some(reward)) => -reward,
            (Order::LowestReward, Some(reward)) => reward,
            // Last, in either direction.
            (_, None) => f32::INFINITY,
        };
        Rank(by, Reverse(rollout))
    }

    fn of(order: Order, record: &Record) -> Rank {
        Rank::new(order, record.reward(), record.rollout.0)
    }

    fn cmp(&self, other: &Rank) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.cmp(&other.1))
    }
}

impl Index {
    /// One page of the matches. A page before another is full: if fewer are before it, it is the first page.
    pub fn list(&self, filter: &Filter, limit: usize) -> Listed<'_> {
        let found = self.matches(filter);
        let rank_of = |rollout: u64| self.rank_of(filter.order, rollout);
        let behind = filter.cursor.and_then(rank_of).map(|cursor| {
            found.partition_point(|(rank, _)| rank.cmp(&cursor) != Ordering::Greater)
        });
        let before = filter.until.and_then(rank_of).map(|until| {
            let end = found.partition_point(|(rank, _)| rank.cmp(&until) == Ordering::Less);
            end.saturating_sub(limit)
        });
        let begin = behind.or(before).unwrap_or(0);
        let page = found.iter().skip(begin).take(limit);
        Listed {
            rollouts: page.map(|(_, at)| &self.records[*at as usize]).collect(),
            matching: found.len(),
            before: begin,
        }
    }

    /// All matches in the filter's order, with their places among the records.
    fn matches(&self, filter: &Filter) -> Vec<(Rank, u32)> {
        let order = filter.order;
        // The newest first.
        let records = self.records.iter().enumerate().rev();
        let mut found: Vec<(Rank, u32)> = records
            .filter(|(_, record)| self.passes(filter, record))
            .map(|(at, record)| (Rank::of(order, record), at as u32))
            .collect();
        if order != Order::Newest {
            found.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        }
        found
    }

    fn rank_of(&self, order: Order, rollout: u64) -> Option<Rank> {
        match (order, self.get(RolloutId(rollout))) {
            (Order::Newest, _) => Some(Rank::new(order, None, rollout)),
            (_, Some(record)) => Some(Rank::of(order, record)),
            // It is no longer kept: start from the beginning.
            (_, None) => None,
        }
    }

    fn passes(&self, filter: &Filter, record: &Record) -> bool {
        filter.step.is_none_or(|step| record.step == Some(step))
            && filter.fate.is_none_or(|fate| record.fate == fate)
            && filter.group.is_none_or(|group| record.group == group)
            && filter
                .example
                .is_none_or(|example| record.example == example)
            && filter
                .environment
                .as_ref()
                .is_none_or(|name| self.environment(record.environment) == Some(name))
            && filter
                .min_reward
                .is_none_or(|least| record.reward().is_some_and(|reward| reward >= least))
            && filter
                .max_reward
                .is_none_or(|most| record.reward().is_some_and(|reward| reward <= most))
    }

    pub fn environment(&self, id: EnvironmentId) -> Option<&String> {
        self.environments.get(id.0 as usize)
    }
}
