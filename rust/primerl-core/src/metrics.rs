//! Metrics of a cut batch, by name. Means over nothing are omitted rather than reported as 0.

use crate::advantage::{mean, standard_deviation};
use crate::config::{Config, Role};
use crate::counters::{Attempts, CancelReason, Interval, VoidReason};
use crate::curriculum::{BufferStep, Pool};
use crate::failure::ErrorKind;
use crate::group::Group;
use crate::ids::{RolloutId, Step};
use crate::pack::MicroBatch;
use crate::policy::staleness;
use crate::rollout::{LeftOut, Rollout};
use crate::sample::{Sample, TrainedTrace};
use std::collections::BTreeMap;

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

    /// `<name>/{mean,max,min}`
    fn spread(&mut self, name: &str, values: &[f64]) {
        self.mean(format!("{name}/mean"), values);
        if let Some(largest) = values.iter().copied().reduce(f64::max) {
            self.set(format!("{name}/max"), largest);
        }
        if let Some(smallest) = values.iter().copied().reduce(f64::min) {
            self.set(format!("{name}/min"), smallest);
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
    let weighted = ranks.iter().flatten().flat_map(MicroBatch::sequences);
    let samples: Vec<&Sample> = weighted.map(|weighted| &weighted.sample).collect();
    rollout_metrics(&mut metrics, config, groups, &lengths(&samples));
    let advantages = advantages.iter().flatten().copied();
    let advantages: Vec<f64> = advantages.map(f64::from).collect();
    metrics.set("advantage/all/std", standard_deviation(&advantages));
    sample_metrics(&mut metrics, step, &samples);
    left_out_metrics(&mut metrics, groups);
    pack_metrics(&mut metrics, config, ranks);
    let partial = groups.iter().filter(|group| group.lost_count() > 0);
    metrics.set("groups/partial", partial.count() as f64);
    discard_metrics(&mut metrics, interval);
    metrics.set("rollouts/truncated", interval.counters.truncated as f64);
    metrics.0
}

/// How the samples fill the micro-batches.
fn pack_metrics(metrics: &mut Metrics, config: &Config, ranks: &[Vec<MicroBatch>]) {
    let micro_batches = || ranks.iter().flatten();
    let count = micro_batches().count();
    let computed: usize = micro_batches().map(MicroBatch::unique_tokens).sum();
    if config.run.shared_prefixes {
        let tokens: usize = micro_batches().map(MicroBatch::len).sum();
        let share = computed as f64 / tokens.max(1) as f64;
        metrics.set("perf/shared_tokens", share);
    }
    metrics.set("pack/micro_batches", count as f64);
    let room = count.max(1) * config.run.seq_len as usize;
    metrics.set("pack/fill", computed as f64 / room as f64);
}

/// What was discarded since the previous cut. Every reason is named, so that a reader can add up over steps; failures by
/// kind only where there were any.
fn discard_metrics(metrics: &mut Metrics, Interval { counters, discards }: &Interval) {
    metrics.set("rollouts/failed", counters.failed as f64);
    metrics.set("rollouts/stale", counters.stale as f64);
    metrics.set("rollouts/cancelled", counters.cancelled as f64);
    metrics.set("rollouts/filtered", counters.filtered as f64);
    for reason in CancelReason::ALL {
        let count = discards.cancelled.get(&reason).copied().unwrap_or(0);
        metrics.set(format!("cancelled/{}", reason.name()), count as f64);
    }
    for reason in VoidReason::ALL {
        let count = discards.voided.get(&reason).copied().unwrap_or(0);
        metrics.set(format!("voided/{}", reason.name()), count as f64);
    }
    for (kind, count) in &discards.failed {
        metrics.set(format!("failed/{kind}"), *count as f64);
    }
    metrics.set("slots/refilled", discards.slots_refilled as f64);
    metrics.set("slots/lost", discards.slots_lost as f64);
    metrics.set("groups/dropped", discards.groups_dropped as f64);
    metrics.set("groups/set_aside", discards.groups_set_aside as f64);
    metrics.set("groups/restarted", discards.groups_restarted as f64);
}

/// Tokens that the batch has of each rollout; a rollout without any has no entry.
fn lengths(samples: &[&Sample]) -> BTreeMap<RolloutId, usize> {
    let mut lengths = BTreeMap::new();
    for sample in samples {
        *lengths.entry(sample.rollout).or_default() += sample.len();
    }
    lengths
}

/// Metrics of the whole batch, as `all`, and of each environment by its name.
fn rollout_metrics(
    metrics: &mut Metrics,
    config: &Config,
    groups: &[Group],
    lengths: &BTreeMap<RolloutId, usize>,
) {
    let rewards = groups.iter().flat_map(Group::traces);
    let rewards: Vec<f64> = rewards.map(|trace| trace.reward).collect();
    metrics.set("reward/all/std", standard_deviation(&rewards));
    metrics_of(metrics, "all", &groups.iter().collect::<Vec<_>>(), lengths);
    for (id, environment) in config.environment_ids() {
        let own = groups.iter().filter(|group| group.environment == id);
        let own: Vec<&Group> = own.collect();
        let name = &environment.name;
        metrics_of(metrics, name, &own, lengths);
        let mut named: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
        let traces = own.iter().flat_map(|group| group.traces());
        for (metric, value) in traces.flat_map(|trace| &trace.metrics) {
            named.entry(metric).or_default().push(*value);
        }
        named.iter().for_each(|(metric, values)| {
            metrics.mean(format!("metric/{name}/{metric}/mean"), values)
        });
    }
}

/// Rewards are those of traces, which are rollouts where each has one seat; all else is of rollouts. A rollout
/// without tokens in the batch has turns, and may be truncated, but has no length.
fn metrics_of(
    metrics: &mut Metrics,
    name: &str,
    groups: &[&Group],
    lengths: &BTreeMap<RolloutId, usize>,
) {
    let traces = groups.iter().flat_map(|group| group.traces());
    let rewards: Vec<f64> = traces.map(|trace| trace.reward).collect();
    metrics.mean(format!("reward/{name}/mean"), &rewards);
    let rollouts: Vec<&Rollout> = groups.iter().flat_map(|group| group.finished()).collect();
    let of_each = |of: &dyn Fn(&[TrainedTrace]) -> f64| -> Vec<f64> {
        rollouts.iter().map(|rollout| of(&rollout.traces)).collect()
    };
    let turns = of_each(&|traces| traces.iter().map(|trace| f64::from(trace.turns)).sum());
    metrics.spread(&format!("num_turns/{name}"), &turns);
    let truncated = of_each(&|traces| {
        let any = traces.iter().any(|trace| trace.truncated);
        f64::from(u8::from(any))
    });
    metrics.mean(format!("is_truncated/{name}/mean"), &truncated);
    let tokens = rollouts
        .iter()
        .filter_map(|rollout| lengths.get(&rollout.id));
    let tokens: Vec<f64> = tokens.map(|tokens| *tokens as f64).collect();
    metrics.spread(&format!("seq_len/{name}"), &tokens);
}

/// Counts and shares of the rollouts that ended since the previous cut, of `all` and of each training environment:
/// `empty_rollouts/<name>/count` and `errored_rollouts/<name>/count`, and as a share of them `.../mean`. Where no rollout
/// of an environment ended there is no share; that of all is 0 then. In the same way `errors/<kind>` of all and
/// `errors/<environment>/<kind>`: the share of them that failed so, or (`infrastructure`) was lost with its worker.
pub fn attempt_metrics(config: &Config, attempts: &[Attempts]) -> BTreeMap<String, f64> {
    let mut metrics = Metrics::default();
    let mut all = Attempts::default();
    for ((_, environment), own) in config.environment_ids().zip(attempts) {
        all.add(own);
        if environment.role == Role::Train {
            share_metrics(&mut metrics, &environment.name, own);
            error_metrics(&mut metrics, &format!("errors/{}", environment.name), own);
        }
    }
    for kind in ErrorKind::ALL {
        metrics.set(format!("errors/{}", kind.name()), 0.0);
    }
    error_metrics(&mut metrics, "errors", &all);
    metrics.set("empty_rollouts/all/mean", 0.0);
    metrics.set("errored_rollouts/all/mean", 0.0);
    share_metrics(&mut metrics, "all", &all);
    metrics.0
}

fn error_metrics(metrics: &mut Metrics, prefix: &str, of: &Attempts) {
    if of.ended == 0 {
        return;
    }
    for kind in ErrorKind::ALL {
        let share = of.errors.of(kind) as f64 / of.ended as f64;
        metrics.set(format!("{prefix}/{}", kind.name()), share);
    }
}

fn share_metrics(metrics: &mut Metrics, name: &str, of: &Attempts) {
    for (kind, count) in [("empty", of.empty), ("errored", of.errored)] {
        metrics.set(format!("{kind}_rollouts/{name}/count"), count as f64);
        if of.ended > 0 {
            let share = count as f64 / of.ended as f64;
            metrics.set(format!("{kind}_rollouts/{name}/mean"), share);
        }
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
    metrics.set("samples/count", samples.len() as f64);
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

/// Metrics of each training environment, at the cut: `buffer/<pool>/<environment>`, the examples in the pool; since the cut
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
