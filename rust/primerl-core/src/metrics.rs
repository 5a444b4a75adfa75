//! What is said about a cut batch, by name. Means over nothing are left out rather than reported as 0.

use crate::algorithm::{mean, standard_deviation};
use crate::config::Config;
use crate::counters::{Counters, Losses, VoidReason};
use crate::curriculum::{BufferStep, Pool};
use crate::effect::CancelReason;
use crate::group::Group;
use crate::ids::Step;
use crate::pack::MicroBatch;
use crate::policy::staleness;
use crate::rollout::{LeftOut, TrainedTrace};
use crate::sample::Sample;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What was counted since the previous cut.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    pub counters: Counters,
    pub losses: Losses,
}

impl Interval {
    /// The difference of two readings.
    pub fn between(earlier: &Interval, later: &Interval) -> Interval {
        let (a, b) = (&earlier.counters, &later.counters);
        let (c, d) = (&earlier.losses, &later.losses);
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
            losses: Losses {
                cancelled: grown(&c.cancelled, &d.cancelled),
                voided: grown(&c.voided, &d.voided),
                failed: grown(&c.failed, &d.failed),
                slots_refilled: d.slots_refilled - c.slots_refilled,
                slots_lost: d.slots_lost - c.slots_lost,
                groups_dropped: d.groups_dropped - c.groups_dropped,
                groups_set_aside: d.groups_set_aside - c.groups_set_aside,
            },
        }
    }
}

/// By how much each count grew; what did not grow is left out.
fn grown<K: Ord + Clone>(earlier: &BTreeMap<K, u64>, later: &BTreeMap<K, u64>) -> BTreeMap<K, u64> {
    later
        .iter()
        .map(|(key, count)| (key.clone(), count - earlier.get(key).unwrap_or(&0)))
        .filter(|(_, grown)| *grown > 0)
        .collect()
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
    metrics.set(
        "groups/partial",
        groups.iter().filter(|group| group.lost_count() > 0).count() as f64,
    );
    loss_metrics(&mut metrics, interval);
    metrics.set("rollouts/truncated", interval.counters.truncated as f64);
    metrics.set("rollouts/empty", interval.counters.empty as f64);
    metrics.set("rollouts/errored", interval.counters.errored as f64);
    metrics.0
}

/// What was lost since the previous cut. Every reason is named, so that a reader can add up over steps; failures by
/// kind only where there were any.
fn loss_metrics(metrics: &mut Metrics, Interval { counters, losses }: &Interval) {
    metrics.set("rollouts/failed", counters.failed as f64);
    metrics.set("rollouts/stale", counters.stale as f64);
    metrics.set("rollouts/cancelled", counters.cancelled as f64);
    metrics.set("rollouts/filtered", counters.filtered as f64);
    for reason in CancelReason::ALL {
        let count = losses.cancelled.get(&reason).copied().unwrap_or(0);
        metrics.set(format!("cancelled/{}", reason.name()), count as f64);
    }
    for reason in VoidReason::ALL {
        let count = losses.voided.get(&reason).copied().unwrap_or(0);
        metrics.set(format!("voided/{}", reason.name()), count as f64);
    }
    for (kind, count) in &losses.failed {
        metrics.set(format!("failed/{kind}"), *count as f64);
    }
    metrics.set("slots/refilled", losses.slots_refilled as f64);
    metrics.set("slots/lost", losses.slots_lost as f64);
    metrics.set("groups/dropped", losses.groups_dropped as f64);
    metrics.set("groups/set_aside", losses.groups_set_aside as f64);
}

/// Over traces, which are rollouts where each has one seat.
fn reward_metrics(metrics: &mut Metrics, config: &Config, groups: &[Group]) {
    let all: Vec<&TrainedTrace> = groups.iter().flat_map(Group::traces).collect();
    let column = |traces: &[&TrainedTrace], of: &dyn Fn(&TrainedTrace) -> f64| {
        traces.iter().map(|trace| of(trace)).collect::<Vec<f64>>()
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
        let own = groups.iter().filter(|group| group.environment == id);
        let own: Vec<&TrainedTrace> = own.flat_map(Group::traces).collect();
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
        .filter_map(|sample| Some(staleness(step, sample.oldest?)))
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
    if let Some(oldest) = samples.iter().filter_map(|sample| sample.oldest).min() {
        metrics.set("version/min", oldest.0 as f64);
    }
}

/// Of each training environment, at the cut: `buffer/<pool>/<environment>`, the examples in the pool; since the cut
/// before: `buffer/into_<pool>/<environment>`, the examples that came into it, `buffer/filtered/<environment>`, the
/// groups that were not trained because all of their rewards were equal (their rollouts are in `rollouts/filtered`),
/// and `buffer/returned/<environment>`, how often all examples were made normal because none with weight was left.
pub fn buffer_metrics(config: &Config, moved: &BufferStep) -> BTreeMap<String, f64> {
    let mut metrics = Metrics::default();
    for of in &moved.environments {
        let name = &config.environment(of.environment).name;
        for pool in Pool::ALL {
            let (word, into) = (pool.name(), of.movement.into.of(pool));
            metrics.set(
                format!("buffer/{word}/{name}"),
                f64::from(of.pools.of(pool)),
            );
            metrics.set(format!("buffer/into_{word}/{name}"), f64::from(into));
        }
        let (filtered, returned) = (of.movement.filtered, of.movement.returned);
        metrics.set(format!("buffer/filtered/{name}"), f64::from(filtered));
        metrics.set(format!("buffer/returned/{name}"), f64::from(returned));
    }
    metrics.0
}
