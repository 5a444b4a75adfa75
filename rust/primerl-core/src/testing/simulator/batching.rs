//! What an engine does with its requests: the rules of the simulator's own, or a scheduler from a crate above.

use crate::event::EngineLoad;
use crate::ids::*;
use crate::time::{Duration, Time};
use crate::turn::{VersionRun, VersionRuns};
use std::collections::BTreeMap;
use std::fmt;

/// A request for the next turn of a rollout, of which there is one at a time.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub rollout: RolloutId,
    /// Lengths, tokens.
    pub prompt: u32,
    pub answer: u32,
    /// On an engine with nothing else to do, if that goes by time.
    pub takes: Duration,
}

/// A request that ended: which version sampled which of its tokens.
#[derive(Clone, Debug)]
pub struct Sampled {
    pub rollout: RolloutId,
    pub versions: VersionRuns,
}

/// An engine's inside. Nothing looks at it between the moments that [`Batching::next`] names.
pub trait Batching: fmt::Debug {
    fn submit(&mut self, request: Request, now: Time);
    /// Forgets a request that it has, if it has.
    fn abort(&mut self, rollout: RolloutId, now: Time);
    /// Begins nothing more until [`Batching::load`]. Requests stay.
    fn pause(&mut self, now: Time);
    fn stands_still(&self) -> bool;
    /// Samples with `version` from now on.
    fn load(&mut self, version: PolicyVersion, now: Time);
    /// When it may have something to tell.
    fn next(&self) -> Option<Time>;
    /// It is that time: what ended.
    fn advance(&mut self, now: Time) -> Vec<Sampled>;
    /// Since the report before; `None`: it does not say.
    fn report(&mut self) -> Option<EngineLoad>;
}

/// Makes the engines of a scenario, from its seed; whether this one is to be slow.
pub type MakeEngine = fn(seed: u64, slow: bool) -> Box<dyn Batching>;

#[derive(Clone, Copy, Debug)]
pub enum EngineModel {
    /// A request takes its time, whatever else there is; with more requests than `capacity` all take proportionally
    /// longer. Load is reported by it; `None`: nothing is reported and no engine gets slower.
    Timed {
        capacity: Option<u32>,
    },
    Made(MakeEngine),
}

impl EngineModel {
    pub fn make(self, seed: u64, slow: bool) -> Box<dyn Batching> {
        match self {
            EngineModel::Timed { capacity } => Box::new(Timed {
                capacity,
                requests: BTreeMap::new(),
                versions: Vec::new(),
            }),
            EngineModel::Made(make) => make(seed, slow),
        }
    }
}

/// An update holds nothing up, and tokens come at an even pace.
#[derive(Debug)]
struct Timed {
    capacity: Option<u32>,
    requests: BTreeMap<RolloutId, Span>,
    /// What it samples with, and since when.
    versions: Vec<(Time, PolicyVersion)>,
}

#[derive(Clone, Copy, Debug)]
struct Span {
    began: Time,
    ends: Time,
    answer: u32,
}

impl Batching for Timed {
    fn submit(&mut self, request: Request, now: Time) {
        let capacity = f64::from(self.capacity.unwrap_or(u32::MAX));
        let crowded = ((self.requests.len() + 1) as f64 / capacity).max(1.0);
        let takes = Duration::from_secs_f64(request.takes.as_secs_f64() * crowded);
        let span = Span {
            began: now,
            ends: now + takes,
            answer: request.answer,
        };
        let before = self.requests.insert(request.rollout, span);
        assert!(
            before.is_none(),
            "{} samples one turn at a time",
            request.rollout
        );
    }

    fn abort(&mut self, rollout: RolloutId, _now: Time) {
        self.requests.remove(&rollout);
    }

    fn pause(&mut self, _now: Time) {}

    fn stands_still(&self) -> bool {
        true
    }

    fn load(&mut self, version: PolicyVersion, now: Time) {
        self.versions.push((now, version));
    }

    fn next(&self) -> Option<Time> {
        self.requests.values().map(|span| span.ends).min()
    }

    fn advance(&mut self, now: Time) -> Vec<Sampled> {
        let ended = self.requests.iter().filter(|(_, span)| span.ends <= now);
        let ended = ended.map(|(rollout, span)| Sampled {
            rollout: *rollout,
            versions: span.versions(&self.versions),
        });
        let ended: Vec<Sampled> = ended.collect();
        self.requests.retain(|_, span| span.ends > now);
        ended
    }

    fn report(&mut self) -> Option<EngineLoad> {
        let capacity = self.capacity?;
        let requests = self.requests.len() as u32;
        let running = requests.min(capacity);
        Some(EngineLoad {
            running,
            waiting: requests - running,
            kv_cache_usage: f64::from(running) / f64::from(capacity),
            preemptions: 0,
        })
    }
}

impl Span {
    /// By the moment at which each token is there.
    fn versions(self, loads: &[(Time, PolicyVersion)]) -> VersionRuns {
        let takes = self.ends.since(self.began).as_secs_f64();
        let mut runs = VersionRuns::new();
        for token in 1..=self.answer {
            let share = f64::from(token) / f64::from(self.answer);
            let at = self.began + Duration::from_secs_f64(takes * share);
            let loaded = loads.iter().rev().find(|(since, _)| *since <= at);
            let (_, version) = *loaded.expect("it serves a version");
            match runs.last_mut() {
                Some(run) if run.version == version => run.n_tokens += 1,
                _ => runs.push(VersionRun {
                    version,
                    n_tokens: 1,
                }),
            }
        }
        runs
    }
}
