//! Time by state, so that the states add up to the whole time.

use primerl_core::{Duration, Time};
use serde::Serialize;
use std::collections::BTreeMap;

/// A state that something was in.
pub(super) trait State: Copy + Ord {
    /// Name in JSON.
    fn name(self) -> String;
    /// Name for people.
    fn in_words(self) -> &'static str;
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Share {
    pub state: String,
    /// What the state is, in words.
    pub what: &'static str,
    pub seconds: f64,
    /// Share of the whole, 0 to 1.
    pub share: f64,
}

/// How long each state lasted.
#[derive(Clone, Debug)]
pub(super) struct Spans<S> {
    spent: BTreeMap<S, u64>,
}

impl<S> Default for Spans<S> {
    fn default() -> Self {
        Spans {
            spent: BTreeMap::new(),
        }
    }
}

impl<S: State> Spans<S> {
    pub(super) fn add(&mut self, state: S, span: Duration, times: u64) {
        if span.0 > 0 && times > 0 {
            *self.spent.entry(state).or_default() += span.0 * times;
        }
    }

    pub(super) fn seconds(&self) -> f64 {
        self.spent.values().sum::<u64>() as f64 / 1e6
    }

    /// The longest first.
    pub(super) fn shares(&self) -> Vec<Share> {
        let whole = self.spent.values().sum::<u64>().max(1) as f64;
        let mut spent: Vec<(S, u64)> = self
            .spent
            .iter()
            .map(|(state, span)| (*state, *span))
            .collect();
        spent.sort_by_key(|(state, span)| (std::cmp::Reverse(*span), *state));
        let share = |(state, span): (S, u64)| Share {
            state: state.name(),
            what: state.in_words(),
            seconds: span as f64 / 1e6,
            share: span as f64 / whole,
        };
        spent.into_iter().map(share).collect()
    }
}

/// Something that is in one state at a time.
#[derive(Clone, Debug)]
pub(super) struct Timeline<S> {
    pub spans: Spans<S>,
    state: S,
    since: Time,
}

impl<S: State> Timeline<S> {
    pub(super) fn new(state: S, since: Time) -> Self {
        Timeline {
            spans: Spans::default(),
            state,
            since,
        }
    }

    /// From `now` on it is in `state`.
    pub(super) fn turn_to(&mut self, state: S, now: Time) {
        self.spans.add(self.state, now.since(self.since), 1);
        (self.state, self.since) = (state, now);
    }
}
