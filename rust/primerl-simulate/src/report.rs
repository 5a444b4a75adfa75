//! What came out, in numbers.

mod limits;

pub use limits::Limit;

use crate::engine::Engine;
use crate::tracks::{Doing, Track};
use crate::world::{IN_FLIGHT, World};
use serde::Serialize;
use std::collections::BTreeMap;

/// Share of the measured time by what was done; they add up to 1.
pub type Shares = BTreeMap<&'static str, f64>;

/// All rates and shares are over the time from the first version proved to the end of the run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// All steps were trained.
    pub completed: bool,
    /// Why the run ended.
    pub reason: String,
    /// Virtual time, seconds.
    pub seconds: f64,
    pub throughput: Throughput,
    pub trainer: Shares,
    pub engines: Engines,
    /// Share of all places for rollouts in the workers.
    pub workers: Shares,
    /// Why no more rollouts were started.
    pub admission: Shares,
    /// What the rollouts in flight did while the trainer waited for rollouts.
    pub trainer_waited_for: Shares,
    pub rollouts: Rollouts,
    pub staleness: Staleness,
    pub limit: Limit,
    /// Warnings of the core, with `#` for numbers, and how often each came.
    pub warnings: BTreeMap<String, u64>,
    /// Calls of the core.
    pub events: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Throughput {
    pub steps: u64,
    pub steps_per_hour: f64,
    /// Trained rollouts.
    pub rollouts_per_s: f64,
    pub sampled_tokens_per_s: f64,
    pub trained_tokens_per_s: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Engines {
    /// Mean over the engines.
    pub shares: Shares,
    pub working_by_engine: Vec<f64>,
    /// Means over time in which an engine works.
    pub mean_running: f64,
    pub slots_used: f64,
    pub kv_used: f64,
    /// Share of their working time that comes from load (sequences and prompt tokens), beyond `step_s` a step.
    pub load: f64,
    /// Highest share of the KV cache in use at any time.
    pub kv_used_max: f64,
    pub preemptions: u64,
    pub steps: u64,
    pub prefill_tokens: u64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Rollouts {
    pub dispatched: u64,
    pub trained: u64,
    pub stale: u64,
    pub failed: u64,
    pub filtered: u64,
    pub cancelled: u64,
    pub mean_in_flight: f64,
}

#[derive(Clone, Debug, Serialize)]
pub struct Staleness {
    pub mean: f64,
    pub max: u64,
    /// Trained samples by staleness, steps.
    pub histogram: BTreeMap<u64, u64>,
}

pub(crate) fn shares(tracks: &[&Track]) -> Shares {
    let mut sums: BTreeMap<Doing, f64> = BTreeMap::new();
    for track in tracks {
        for doing in Doing::ALL {
            *sums.entry(doing).or_default() += track.seconds(doing);
        }
    }
    let total: f64 = sums.values().sum();
    let there = sums.into_iter().filter(|(_, seconds)| *seconds > 0.0);
    there
        .map(|(doing, seconds)| (doing.name(), seconds / total))
        .collect()
}

impl Report {
    /// The report of a run that was simulated to its end.
    pub fn of(world: &World) -> Report {
        let measured = &world.measured;
        let seconds = world.now.since(measured.began).as_secs_f64();
        let rate = |count: u64| {
            if seconds > 0.0 {
                count as f64 / seconds
            } else {
                0.0
            }
        };
        let counters = world.core.counters();
        let steps = measured.cuts.len() as u64;
        let (completed, reason) = measured.ended.clone().unwrap_or_default();
        let mut report = Report {
            completed,
            reason,
            seconds,
            throughput: Throughput {
                steps,
                steps_per_hour: rate(steps) * 3600.0,
                rollouts_per_s: rate(counters.trained),
                sampled_tokens_per_s: rate(measured.sampled_tokens),
                trained_tokens_per_s: rate(measured.trained_tokens),
            },
            trainer: shares(&[&measured.trainer]),
            engines: engines(world),
            workers: shares(&[&measured.slots]),
            admission: shares(&[&measured.admission]),
            trainer_waited_for: shares(&[&measured.while_waiting]),
            rollouts: Rollouts {
                dispatched: counters.dispatched,
                trained: counters.trained,
                stale: counters.stale,
                failed: counters.failed,
                filtered: counters.filtered,
                cancelled: counters.cancelled,
                mean_in_flight: mean_in_flight(&measured.slots, seconds),
            },
            staleness: staleness(&measured.staleness),
            limit: Limit::default(),
            warnings: measured.warnings.clone(),
            events: measured.events,
        };
        report.limit = limits::find(&world.plan, &report);
        report
    }
}

fn mean_in_flight(slots: &Track, seconds: f64) -> f64 {
    let sum: f64 = IN_FLIGHT
        .into_iter()
        .map(|doing| slots.seconds(doing))
        .sum();
    sum / seconds.max(1e-6)
}

fn engines(world: &World) -> Engines {
    let tracks: Vec<&Track> = world.measured.engines.iter().collect();
    let sum = |of: &dyn Fn(&Engine) -> f64| world.engines.iter().map(of).sum::<f64>();
    let count = |of: &dyn Fn(&Engine) -> u64| world.engines.iter().map(of).sum::<u64>();
    let busy_s = sum(&|engine| engine.measured.busy_s).max(1e-9);
    let mean_running = sum(&|engine| engine.measured.running) / busy_s;
    let kv_max = world.engines.iter();
    let kv_max = kv_max.map(|engine| engine.measured.kv_tokens_max).max();
    let inference = &world.plan.inference;
    let capacity = inference.kv_cache_tokens as f64;
    let steps = count(&|engine| engine.measured.steps);
    Engines {
        shares: shares(&tracks),
        working_by_engine: tracks.into_iter().map(share_of_work).collect(),
        mean_running,
        slots_used: mean_running / f64::from(inference.max_num_seqs),
        kv_used: sum(&|engine| engine.measured.kv_tokens) / busy_s / capacity,
        kv_used_max: kv_max.unwrap_or(0) as f64 / capacity,
        load: (1.0 - steps as f64 * inference.step_s / busy_s).clamp(0.0, 1.0),
        preemptions: count(&|engine| engine.preemptions()),
        steps,
        prefill_tokens: count(&|engine| engine.measured.prefill_tokens),
    }
}

fn share_of_work(track: &Track) -> f64 {
    let shares = shares(&[track]);
    shares.get(Doing::Working.name()).copied().unwrap_or(0.0)
}

fn staleness(histogram: &BTreeMap<u64, u64>) -> Staleness {
    let samples: u64 = histogram.values().sum();
    let weighted: u64 = histogram.iter().map(|(steps, count)| steps * count).sum();
    Staleness {
        mean: weighted as f64 / samples.max(1) as f64,
        max: histogram.keys().next_back().copied().unwrap_or(0),
        histogram: histogram.clone(),
    }
}
