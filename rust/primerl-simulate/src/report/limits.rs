//! What limits a run, read off the shares that were measured.
//!
//! The trainer is the limit where it rarely waits. Else whatever its waits are spent on: weight updates, or rollouts. Those
//! are held up by what they did meanwhile. Time in an engine's queue, and the part of sampling that comes from sharing
//! the engine, is the engines' fault; the rest of sampling, and environments, is latency, which more rollouts side by
//! side would hide: then the limit is what kept more of them from being started.

use super::{Report, Shares};
use crate::plan::Plan;
use serde::Serialize;

/// A trainer that works more than this leaves little to be gained elsewhere.
const TRAINER_IS_FULL: f64 = 0.9;
#[derive(Clone, Debug, Default, Serialize)]
pub struct Limit {
    /// `trainer`, `weight_update`, `engines`, `kv_cache`, `max_num_seqs`, `environment`, `worker_cpu`, `worker_slots`,
    /// `max_async_level`, `oversampling_factor`, `latency` or `run`.
    pub what: &'static str,
    pub sentence: String,
}

fn of(shares: &Shares, name: &str) -> f64 {
    shares.get(name).copied().unwrap_or(0.0)
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

pub(crate) fn find(plan: &Plan, report: &Report) -> Limit {
    if !report.completed {
        return Limit {
            what: "run",
            sentence: format!("The run does not come to its end: {}.", report.reason),
        };
    }
    let trainer = &report.trainer;
    let works = of(trainer, "working") + of(trainer, "publishing");
    let (updates, rollouts) = (of(trainer, "weight_update"), of(trainer, "rollouts"));
    if works >= TRAINER_IS_FULL {
        return trainer_limits(report, works);
    }
    if updates > rollouts {
        return Limit {
            what: "weight_update",
            sentence: format!(
                "Weight updates limit: the trainer waits {} of the time until engines have proved what it published \
                 ({} s each); raise max_async_level (now {}) or make updates faster.",
                percent(updates),
                plan.inference.update_s,
                plan.orchestrator.max_async_level
            ),
        };
    }
    rollouts_limit(plan, report, rollouts)
}

fn trainer_limits(report: &Report, works: f64) -> Limit {
    let idle =
        1.0 - of(&report.engines.shares, "working") - of(&report.engines.shares, "weight_update");
    Limit {
        what: "trainer",
        sentence: format!(
            "The trainer limits: it works {} of the time and engines are idle {}; make its step faster (more data \
             ranks, fewer tokens a step){}.",
            percent(works),
            percent(idle),
            if idle > 0.3 {
                ", or give up some engines"
            } else {
                ""
            }
        ),
    }
}

/// The trainer waits for rollouts.
fn rollouts_limit(plan: &Plan, report: &Report, waits: f64) -> Limit {
    let (engines, during) = (&report.engines, &report.trainer_waited_for);
    let (sampling, queued) = (of(during, "sampling"), of(during, "queued"));
    let (environment, cpu) = (of(during, "environment"), of(during, "worker_cpu"));
    let begin = format!(
        "the trainer waits for rollouts {} of the time",
        percent(waits)
    );
    let crowding = queued + sampling * engines.load;
    let latency = sampling * (1.0 - engines.load) + environment;
    if crowding > latency.max(cpu) {
        return engines_limit(plan, report, &begin);
    }
    if cpu > latency {
        return cpu_limit(plan, cpu, &begin);
    }
    let meanwhile = format!(
        "{} of the rollouts in flight then are being sampled and {} in their environment",
        percent(sampling),
        percent(environment)
    );
    too_few_limit(plan, report, &begin, &meanwhile)
}

fn cpu_limit(plan: &Plan, cpu: f64, begin: &str) -> Limit {
    Limit {
        what: "worker_cpu",
        sentence: format!(
            "The env workers' CPU limits: {begin}, and {} of the rollouts in flight then wait for their worker's \
             process; raise num_workers (now {}) and lower max_concurrent (now {}), so that rollouts are spread.",
            percent(cpu),
            plan.environment.num_workers,
            plan.environment.max_concurrent
        ),
    }
}

fn engines_limit(plan: &Plan, report: &Report, begin: &str) -> Limit {
    let engines = &report.engines;
    let state = format!(
        "{begin}; engines work {}, with {} of their slots and {} of their KV cache in use",
        percent(of(&engines.shares, "working")),
        percent(engines.slots_used),
        percent(engines.kv_used)
    );
    let (what, hint) = engines_hint(plan, report);
    Limit {
        what,
        sentence: format!("The engines limit: {state}; {hint}."),
    }
}

/// What limits the engines, and what to change.
fn engines_hint(plan: &Plan, report: &Report) -> (&'static str, String) {
    let (engines, inference) = (&report.engines, &plan.inference);
    if engines.preemptions as f64 > 0.05 * report.rollouts.dispatched as f64 {
        (
            "kv_cache",
            format!(
                "{} preemptions: raise kv_cache_tokens (now {}) or add engines (now {})",
                engines.preemptions, inference.kv_cache_tokens, inference.engines
            ),
        )
    } else if engines.slots_used > 0.7 && engines.kv_used < 0.6 && engines.load < 0.5 {
        (
            "max_num_seqs",
            format!(
                "raise max_num_seqs (now {}), the KV cache has room; or add engines (now {})",
                inference.max_num_seqs, inference.engines
            ),
        )
    } else {
        (
            "engines",
            format!("add engines (now {})", inference.engines),
        )
    }
}

/// Engines have room: what keeps more rollouts from being under way?
fn too_few_limit(plan: &Plan, report: &Report, begin: &str, meanwhile: &str) -> Limit {
    let admission = &report.admission;
    let run_end = of(admission, "run_end");
    let reasons = ["async_level", "in_flight_limit", "worker_slots"];
    let highest = reasons
        .into_iter()
        .max_by(|a, b| of(admission, a).total_cmp(&of(admission, b)))
        .unwrap_or("async_level");
    let share = percent(of(admission, highest) / (1.0 - run_end).max(1e-9));
    let (what, why) = too_few_hint(plan, highest, &share);
    Limit {
        what,
        sentence: format!("Too few rollouts are under way: {begin}; {meanwhile}; {why}."),
    }
}

/// What keeps rollouts from being started for `share` of the time, and what to change.
fn too_few_hint(plan: &Plan, reason: &str, share: &str) -> (&'static str, String) {
    let (orchestrator, environment) = (&plan.orchestrator, &plan.environment);
    match reason {
        "in_flight_limit" => ("oversampling_factor", in_flight_hint(plan, share)),
        "worker_slots" => (
            "worker_slots",
            format!(
                "no more are started because every worker runs as many as it may ({share} of the time): raise max_concurrent (now {}) or num_workers (now {})",
                environment.max_concurrent, environment.num_workers
            ),
        ),
        _ => (
            "max_async_level",
            format!(
                "no more are started because generation is as far ahead of the trainer as it may be ({share} of the time): raise max_async_level (now {})",
                orchestrator.max_async_level
            ),
        ),
    }
}

fn in_flight_hint(plan: &Plan, share: &str) -> String {
    let (orchestrator, environment) = (&plan.orchestrator, &plan.environment);
    let limit = orchestrator.oversampling_factor * f64::from(orchestrator.batch_size);
    let places = u64::from(environment.num_workers) * u64::from(environment.max_concurrent);
    let and_places = match places as f64 <= limit {
        true => format!(
            ", and max_concurrent (now {}) with it",
            environment.max_concurrent
        ),
        false => String::new(),
    };
    format!(
        "no more are started because oversampling_factor x batch_size are in flight ({share} of the time): raise \
         oversampling_factor (now {}){and_places}",
        orchestrator.oversampling_factor
    )
}
