//! The same plan with one knob turned: what it would bring, measured and not guessed.

use crate::plan::Plan;
use crate::report::Report;
use crate::simulate;
use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub struct WhatIf {
    pub change: String,
    pub steps_per_hour: f64,
    /// Relative change of steps an hour: 0.1 is a tenth more.
    pub gain: f64,
}

type Change = (String, fn(&mut Plan));

fn changes(plan: &Plan) -> Vec<Change> {
    let (orchestrator, inference) = (&plan.orchestrator, &plan.inference);
    let environment = &plan.environment;
    vec![
        (
            format!("twice the engines ({})", inference.engines * 2),
            |plan| plan.inference.engines *= 2,
        ),
        (
            format!("max_num_seqs {}", inference.max_num_seqs * 2),
            |plan| {
                plan.inference.max_num_seqs *= 2;
                let least = plan.inference.max_num_seqs;
                plan.inference.max_num_batched_tokens =
                    plan.inference.max_num_batched_tokens.max(least);
            },
        ),
        (
            format!("kv_cache_tokens {}", inference.kv_cache_tokens * 2),
            |plan| plan.inference.kv_cache_tokens *= 2,
        ),
        (
            format!("max_async_level {}", orchestrator.max_async_level + 1),
            |plan| {
                let orchestrator = &mut plan.orchestrator;
                orchestrator.max_async_level += 1;
                let least = orchestrator.max_async_level;
                orchestrator.max_off_policy_steps = orchestrator.max_off_policy_steps.max(least);
            },
        ),
        (
            format!(
                "oversampling_factor {}",
                orchestrator.oversampling_factor * 1.5
            ),
            |plan| {
                plan.orchestrator.oversampling_factor *= 1.5;
                // More of them need places, too.
                let most =
                    plan.orchestrator.oversampling_factor * f64::from(plan.orchestrator.batch_size);
                let places = (most / f64::from(plan.environment.num_workers)).ceil() as u32;
                plan.environment.max_concurrent = plan.environment.max_concurrent.max(places);
            },
        ),
        (
            format!("twice the workers ({})", environment.num_workers * 2),
            |plan| plan.environment.num_workers *= 2,
        ),
        ("trainer steps in half the time".to_owned(), |plan| {
            plan.trainer.step_s /= 2.0;
            plan.trainer.step_per_token_s /= 2.0;
        }),
        ("weight updates in half the time".to_owned(), |plan| {
            plan.trainer.publish_s /= 2.0;
            plan.inference.update_s /= 2.0;
        }),
    ]
}

/// Every change, the best first. A change that makes the plan invalid is skipped.
pub fn what_if(plan: &Plan, report: &Report) -> Vec<WhatIf> {
    let mut cases: Vec<WhatIf> = Vec::new();
    for (change, turn) in changes(plan) {
        let mut turned = plan.clone();
        turn(&mut turned);
        let Ok((after, _)) = simulate(&turned) else {
            continue;
        };
        let steps_per_hour = match after.completed {
            true => after.throughput.steps_per_hour,
            false => 0.0,
        };
        let before = report.throughput.steps_per_hour.max(1e-12);
        cases.push(WhatIf {
            change,
            steps_per_hour,
            gain: steps_per_hour / before - 1.0,
        });
    }
    cases.sort_by(|a, b| b.gain.total_cmp(&a.gain));
    cases
}
