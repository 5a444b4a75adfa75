//! What is said about a cut batch, by name. Means over nothing are left out rather than reported as 0.

use crate::algorithm::{mean, standard_deviation};
use crate::config::Config;
use crate::counters::Counters;
use crate::group::Group;
use crate::ids::Step;
use crate::pack::MicroBatch;
use crate::policy::staleness;
use crate::rollout::{LeftOut, TrainedTrace};
use crate::sample::Sample;
use std::collections::BTreeMap;

/// What was counted since the previous cut.
#[derive(Clone, Copy, Debug, Default)]
pub struct Interval {
    pub counters: Counters,
    pub groups_dropped: u64,
}

impl Interval {
    /// The difference of two readings.
    pub fn between(earlier: &Interval, later: &Interval) -> Interval {
        let (a, b) = (&earlier.counters, &later.counters);
        Interval {
            counters: Counters {
                dispatched: b.dispatched - a.dispatched,
                trained: b.trained - a.trained,
                filtered: b.filtered - a.filtered,
                stale: b.stale - a.stale,
                failed: b.failed - a.failed,
                cancelled: b.cancelled - a.cancelled,
                evaluated: b.evaluated - a.evaluated,
                truncated: b.truncated - a.truncated,
                empty: b.empty - a.empty,
                errored: b.errored - a.errored,
            },
            groups_dropped: later.groups_dropped - earlier.groups_dropped,
        }
    }
}

#[derive(Default)]
struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    fn set(&mut self, name: impl Into<String>, value: f64) {
        self.0.insert(name.into(), value);
    }

    fn mean(&mut self, name: impl Into<String>, values: &[f64]) {
        if !values.is_empty() {
            self.set(name, mean(values.iter().copied()));
        }
    }
}

pub fn batch_metrics(
    config: &Config,
    step: Step,
    groups: &[Group],
    advantages: &[Vec<f32>],
    ranks: &[Vec<MicroBatch>],
    interval: &Interval,
) -> BTreeMap<String, f64> {
    let mut metrics = Metrics::default();
    reward_metrics(&mut metrics, config, groups);
    let advantages: Vec<f64> = advantages
        .iter()
        .flatten()
        .map(|advantage| f64::from(*advantage))
        .collect();
    metrics.set("advantage/all/std", standard_deviation(&advantages));
    let micro_batches: Vec<&MicroBatch> = ranks.iter().flatten().collect();
    let samples = micro_batches
        .iter()
        .flat_map(|micro_batch| micro_batch.sequences());
    sample_metrics(
        &mut metrics,
        step,
        &samples.map(|weighted| &weighted.sample).collect::<Vec<_>>(),
    );
    left_out_metrics(&mut metrics, groups);
    let tokens: usize = micro_batches
        .iter()
        .map(|micro_batch| micro_batch.len())
        .sum();
    metrics.set("pack/micro_batches", micro_batches.len() as f64);
    metrics.set(
        "pack/fill",
        tokens as f64 / (micro_batches.len().max(1) * config.seq_len as usize) as f64,
    );
    metrics.set("rollouts/failed", interval.counters.failed as f64);
    metrics.set("rollouts/stale", interval.counters.stale as f64);
    metrics.set("rollouts/cancelled", interval.counters.cancelled as f64);
    metrics.set("rollouts/filtered", interval.counters.filtered as f64);
    metrics.set("rollouts/truncated", interval.counters.truncated as f64);
    metrics.set("rollouts/empty", interval.counters.empty as f64);
    metrics.set("rollouts/errored", interval.counters.errored as f64);
    metrics.set("groups/dropped", interval.groups_dropped as f64);
    metrics.0
}

/// Over traces, which are rollouts where each has one seat.
fn reward_metrics(metrics: &mut Metrics, config: &Config, groups: &[Group]) {
    let traces = |groups: &[&Group]| -> Vec<TrainedTrace> {
        groups
            .iter()
            .flat_map(|group| group.finished())
            .flat_map(|rollout| rollout.traces.clone())
            .collect()
    };
    let all = traces(&groups.iter().collect::<Vec<_>>());
    let column = |traces: &[TrainedTrace], of: &dyn Fn(&TrainedTrace) -> f64| {
        traces.iter().map(of).collect::<Vec<f64>>()
    };
    let rewards = column(&all, &|trace| trace.reward);
    metrics.mean("reward/all/mean", &rewards);
    metrics.set("reward/all/std", standard_deviation(&rewards));
    metrics.mean(
        "num_turns/all/mean",
        &column(&all, &|trace| f64::from(trace.turns)),
    );
    metrics.mean(
        "is_truncated/all/mean",
        &column(&all, &|trace| f64::from(u8::from(trace.truncated))),
    );
    for (id, environment) in config.environment_ids() {
        let own: Vec<&Group> = groups
            .iter()
            .filter(|group| group.environment == id)
            .collect();
        let own = traces(&own);
        let name = &environment.name;
        metrics.mean(
            format!("reward/{name}/mean"),
            &column(&own, &|trace| trace.reward),
        );
        let mut named: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        for (metric, value) in own.iter().flat_map(|trace| &trace.metrics) {
            named.entry(metric).or_default().push(*value);
        }
        named.iter().for_each(|(metric, values)| {
            metrics.mean(format!("metric/{name}/{metric}/mean"), values)
        });
    }
}

/// Samples of the batch's rollouts that are not in it, or not whole.
fn left_out_metrics(metrics: &mut Metrics, groups: &[Group]) {
    let left_out = || {
        let rollouts = groups.iter().flat_map(|group| group.finished());
        rollouts.map(|rollout| rollout.left_out)
    };
    let total = |of: fn(LeftOut) -> u32| left_out().map(of).sum::<u32>() as f64;
    metrics.set("samples/too_long", total(|left_out| left_out.too_long));
    metrics.set("samples/cut", total(|left_out| left_out.cut));
    metrics.set("samples/masked", total(|left_out| left_out.masked));
}

fn sample_metrics(metrics: &mut Metrics, step: Step, samples: &[&Sample]) {
    let lengths: Vec<f64> = samples.iter().map(|sample| sample.len() as f64).collect();
    metrics.set("samples/count", samples.len() as f64);
    metrics.mean("seq_len/all/mean", &lengths);
    metrics.set(
        "seq_len/all/max",
        lengths.iter().copied().fold(0.0, f64::max),
    );
    let staleness: Vec<u64> = samples
        .iter()
        .map(|sample| staleness(step, sample.oldest))
        .collect();
    metrics.mean(
        "staleness/mean",
        &staleness
            .iter()
            .map(|steps| *steps as f64)
            .collect::<Vec<_>>(),
    );
    metrics.set(
        "staleness/max",
        staleness.iter().max().map_or(0.0, |steps| *steps as f64),
    );
    for steps in staleness {
        *metrics.0.entry(format!("staleness/{steps}")).or_default() += 1.0;
    }
    if let Some(oldest) = samples.iter().map(|sample| sample.oldest).min() {
        metrics.set("version/min", oldest.0 as f64);
    }
}
