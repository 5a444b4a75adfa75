//! Whole plans: the numbers agree with each other, and the limit that is named is the one whose mend helps.

use primerl_simulate::*;
use std::collections::BTreeMap;

fn log_normal(mean: f64, sigma: f64, max: f64) -> Distribution {
    Distribution::LogNormal { mean, sigma, max }
}

/// Two engines, one worker with many places, a quick trainer.
fn plan() -> Plan {
    Plan {
        seed: 7,
        max_steps: 12,
        seq_len: 2048,
        data_ranks: 1,
        orchestrator: Orchestration {
            batch_size: 64,
            group_size: 8,
            max_async_level: 2,
            max_off_policy_steps: 4,
            oversampling_factor: 2.0,
            rollout_s: 3600.0,
        },
        inference: Inference {
            engines: 2,
            max_num_seqs: 32,
            kv_cache_tokens: 65_536,
            max_num_batched_tokens: 2048,
            step_s: 0.02,
            step_per_sequence_s: 0.001,
            step_per_prefill_token_s: 0.00002,
            update_s: 1.0,
            prefix_cache_hit: 0.5,
        },
        environment: EnvironmentPlan {
            num_workers: 2,
            max_concurrent: 256,
            examples: 1000,
            turns: Distribution::Uniform { min: 1.0, max: 3.0 },
            cpu_s: 0.002,
            setup_s: Distribution::constant(0.1),
            turn_s: log_normal(0.5, 1.0, 10.0),
            prompt_tokens: Distribution::Uniform {
                min: 50.0,
                max: 150.0,
            },
            answer_tokens: log_normal(200.0, 1.0, 1000.0),
            observation_tokens: Distribution::constant(30.0),
            failure_probability: 0.0,
        },
        trainer: TrainerPlan {
            step_s: 1.0,
            step_per_token_s: 0.00002,
            publish_s: 0.5,
        },
    }
}

fn report(plan: &Plan) -> Report {
    let (report, _) = simulate(plan).expect("a valid plan");
    assert!(report.completed, "{}", report.reason);
    report
}

fn check_consistent(plan: &Plan, report: &Report) {
    let shares: [&BTreeMap<&str, f64>; 4] = [
        &report.trainer,
        &report.engines.shares,
        &report.workers,
        &report.admission,
    ];
    for shares in shares {
        let sum: f64 = shares.values().sum();
        assert!((sum - 1.0).abs() < 1e-9, "{shares:?}");
    }
    let trained = plan.max_steps * u64::from(plan.orchestrator.batch_size);
    assert_eq!(report.rollouts.trained, trained);
    assert_eq!(report.throughput.steps, plan.max_steps);
    let samples: u64 = report.staleness.histogram.values().sum();
    assert_eq!(samples, trained, "one conversation is one sample");
    assert!(report.staleness.max <= plan.orchestrator.max_off_policy_steps);
    let rate = trained as f64 / report.seconds;
    assert!((report.throughput.rollouts_per_s - rate).abs() < 1e-9);
    assert!(report.engines.slots_used <= 1.0 && report.engines.kv_used_max <= 1.0 + 1e-3);
    assert!(report.engines.shares["working"] > 0.0);
}

#[test]
fn numbers_agree_with_each_other() {
    for seed in 0..5 {
        for level in 0..3 {
            let mut plan = plan();
            plan.seed = seed;
            plan.max_steps = 5;
            plan.data_ranks = 2;
            plan.orchestrator.max_async_level = level;
            plan.environment.failure_probability = 0.05;
            let report = report(&plan);
            check_consistent(&plan, &report);
            assert!(report.rollouts.failed > 0);
            assert!(level > 0 || report.staleness.max == 0);
        }
    }
}

#[test]
fn the_same_plan_gives_the_same_report_and_picture() {
    let json = |plan: &Plan| {
        let (report, world) = simulate(plan).expect("a valid plan");
        let numbers = serde_json::to_string(&report).expect("a report is JSON");
        (numbers, table(&report), picture(&world, &report))
    };
    let plan = plan();
    assert_eq!(json(&plan), json(&plan));
    let mut other = plan.clone();
    other.seed += 1;
    assert_ne!(json(&plan).0, json(&other).0);
}

/// The plan is limited by `what`; with `mend` it makes at least so much more steps an hour.
fn limited(plan: Plan, what: &str, gain: f64, mend: impl Fn(&mut Plan)) {
    let before = report(&plan);
    assert_eq!(
        before.limit.what,
        what,
        "{}\n{}",
        before.limit.sentence,
        table(&before)
    );
    let mut mended = plan;
    mend(&mut mended);
    let after = report(&mended);
    let ratio = after.throughput.steps_per_hour / before.throughput.steps_per_hour;
    assert!(
        ratio > gain,
        "{what}: {ratio}\n{}\n{}",
        table(&before),
        table(&after)
    );
}

#[test]
fn engines_limit_and_more_of_them_help() {
    let mut plan = plan();
    plan.orchestrator.max_async_level = 4;
    plan.orchestrator.max_off_policy_steps = 8;
    plan.orchestrator.oversampling_factor = 3.0;
    plan.max_steps = 24;
    limited(plan, "engines", 1.4, |plan| plan.inference.engines *= 2);
}

#[test]
fn too_few_slots_limit_where_the_cache_has_room() {
    let mut plan = plan();
    plan.inference.max_num_seqs = 8;
    limited(plan, "max_num_seqs", 1.5, |plan| {
        plan.inference.max_num_seqs = 32
    });
}

#[test]
fn a_small_cache_limits_and_a_larger_one_helps() {
    let mut plan = plan();
    plan.inference.kv_cache_tokens = 5_000;
    limited(plan, "kv_cache", 1.2, |plan| {
        plan.inference.kv_cache_tokens *= 4
    });
}

#[test]
fn the_trainer_limits_and_a_faster_one_helps() {
    let mut plan = plan();
    plan.trainer.step_s = 60.0;
    limited(plan, "trainer", 1.5, |plan| plan.trainer.step_s = 30.0);
}

#[test]
fn synchrony_limits_and_asynchrony_helps() {
    let mut plan = plan();
    plan.orchestrator.max_async_level = 0;
    plan.inference.engines = 8;
    plan.trainer.step_s = 8.0;
    limited(plan, "max_async_level", 1.2, |plan| {
        plan.orchestrator.max_async_level = 2
    });
}

#[test]
fn slow_weight_updates_limit() {
    let mut plan = plan();
    plan.orchestrator.max_async_level = 0;
    plan.inference.engines = 8;
    plan.inference.update_s = 60.0;
    limited(plan, "weight_update", 1.5, |plan| {
        plan.inference.update_s = 10.0
    });
}

#[test]
fn few_places_limit_and_more_of_them_help() {
    let mut plan = plan();
    plan.inference.engines = 8;
    plan.environment.max_concurrent = 8;
    limited(plan, "worker_slots", 1.5, |plan| {
        plan.environment.max_concurrent = 64
    });
}

#[test]
fn the_in_flight_limit_limits_where_environments_are_slow() {
    let mut plan = plan();
    plan.inference.engines = 8;
    plan.orchestrator.oversampling_factor = 1.0;
    plan.environment.turn_s = Distribution::constant(30.0);
    limited(plan, "oversampling_factor", 1.2, |plan| {
        plan.orchestrator.oversampling_factor = 2.0
    });
}

#[test]
fn busy_worker_processes_limit() {
    let mut plan = plan();
    plan.inference.engines = 8;
    plan.environment.cpu_s = 0.4;
    plan.environment.max_concurrent = 64;
    limited(plan, "worker_cpu", 1.5, |plan| {
        plan.environment.num_workers *= 4;
        plan.environment.max_concurrent /= 4;
    });
}

#[test]
fn a_plan_that_leads_nowhere_says_so() {
    let mut plan = plan();
    plan.orchestrator.rollout_s = 0.5;
    let (report, _) = simulate(&plan).expect("a valid plan");
    assert!(!report.completed);
    assert_eq!(report.limit.what, "run");
    assert!(report.reason.contains("timeout"), "{}", report.reason);
}

#[test]
fn bad_plans_name_the_field() {
    let named = |change: fn(&mut Plan)| {
        let mut plan = plan();
        change(&mut plan);
        simulate(&plan).err().map(|error| error.field)
    };
    type Case = (fn(&mut Plan), &'static str);
    let cases: [Case; 8] = [
        (|plan| plan.max_steps = 0, "max_steps"),
        (|plan| plan.inference.engines = 0, "inference.engines"),
        (|plan| plan.inference.step_s = f64::NAN, "inference.step_s"),
        (
            |plan| plan.inference.kv_cache_tokens = 10,
            "inference.kv_cache_tokens",
        ),
        (
            |plan| plan.orchestrator.batch_size = 63,
            "orchestrator.batch_size",
        ),
        (
            |plan| plan.orchestrator.max_off_policy_steps = 0,
            "orchestrator.max_off_policy_steps",
        ),
        (
            |plan| plan.environment.turns = Distribution::constant(0.0),
            "environment.turns",
        ),
        (
            |plan| plan.environment.prompt_tokens = Distribution::constant(4096.0),
            "environment.prompt_tokens",
        ),
    ];
    for (change, field) in cases {
        assert_eq!(named(change).as_deref(), Some(field));
    }
}

#[test]
fn the_picture_has_a_row_for_each_engine() {
    let plan = plan();
    let (report, world) = simulate(&plan).expect("a valid plan");
    let svg = picture(&world, &report);
    assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
    for label in ["trainer", "engine 0", "engine 1", "in flight"] {
        assert!(svg.contains(&format!(">{label}")), "{label}");
    }
}

#[test]
fn what_if_turns_one_knob_at_a_time() {
    let mut plan = plan();
    plan.trainer.step_s = 60.0;
    let base = report(&plan);
    let cases = what_if(&plan, &base);
    assert!(
        cases.windows(2).all(|pair| pair[0].gain >= pair[1].gain),
        "the best comes first"
    );
    assert_eq!(cases[0].change, "trainer steps in half the time");
    let same = |case: &WhatIf| {
        let rate = base.throughput.steps_per_hour * (1.0 + case.gain);
        (rate - case.steps_per_hour).abs() < 1e-9 * rate
    };
    assert!(cases[0].gain > 0.5 && cases.iter().all(same));
    let engines = cases
        .iter()
        .find(|case| case.change.starts_with("twice the engines"));
    assert!(
        engines.is_some_and(|case| case.gain.abs() < 0.1),
        "{engines:?}"
    );
}

/// Each time of a plan, the most it may be, and how it is set.
type Time = (&'static str, f64, fn(&mut Plan, f64));
const TIMES: [Time; 11] = [
    ("orchestrator.rollout_s", 86_400.0, |plan, value| {
        plan.orchestrator.rollout_s = value
    }),
    ("inference.step_s", 60.0, |plan, value| {
        plan.inference.step_s = value
    }),
    ("inference.step_per_sequence_s", 1.0, |plan, value| {
        plan.inference.step_per_sequence_s = value
    }),
    ("inference.step_per_prefill_token_s", 1.0, |plan, value| {
        plan.inference.step_per_prefill_token_s = value
    }),
    ("inference.update_s", 86_400.0, |plan, value| {
        plan.inference.update_s = value
    }),
    ("environment.cpu_s", 86_400.0, |plan, value| {
        plan.environment.cpu_s = value
    }),
    ("environment.setup_s", 86_400.0, |plan, value| {
        plan.environment.setup_s = Distribution::constant(value)
    }),
    ("environment.turn_s", 86_400.0, |plan, value| {
        plan.environment.turn_s = log_normal(value, 1.0, value)
    }),
    ("trainer.step_s", 86_400.0, |plan, value| {
        plan.trainer.step_s = value
    }),
    ("trainer.step_per_token_s", 1.0, |plan, value| {
        plan.trainer.step_per_token_s = value
    }),
    ("trainer.publish_s", 86_400.0, |plan, value| {
        plan.trainer.publish_s = value
    }),
];

#[test]
fn a_time_without_end_is_refused() {
    for (field, most, set) in TIMES {
        for value in [most * 1.001, 1e12] {
            let mut plan = plan();
            set(&mut plan, value);
            let error = plan.validate().expect_err(field).to_string();
            let words = [field, &most.to_string(), &value.to_string()];
            assert!(words.iter().all(|word| error.contains(word)), "{error}");
        }
    }
}
