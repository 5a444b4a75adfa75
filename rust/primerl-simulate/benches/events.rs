//! How many calls of the core the simulator makes in a second of CPU, for large plans. A release build, so the core's
//! invariants are not checked.
//!
//! `wide`: 10,000 rollouts in flight of short turns, where the core is most of the work. `long`: GPU-sized, long tail
//! up to 16,384 tokens, where the tokens of the batches are. Run: `cargo bench -p primerl-simulate`.

use primerl_simulate::*;

// As in the extension module, where the planner runs for users.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const REPEATS: usize = 3;

fn wide() -> Plan {
    Plan {
        seed: 0,
        max_steps: 60,
        seq_len: 1024,
        data_ranks: 8,
        orchestrator: Orchestration {
            batch_size: 4096,
            group_size: 8,
            max_async_level: 4,
            max_off_policy_steps: 8,
            oversampling_factor: 2.5,
            rollout_s: 3600.0,
        },
        inference: Inference {
            engines: 40,
            max_num_seqs: 256,
            kv_cache_tokens: 400_000,
            max_num_batched_tokens: 8192,
            step_s: 0.01,
            step_per_sequence_s: 0.00005,
            step_per_prefill_token_s: 0.00001,
            update_s: 2.0,
            prefix_cache_hit: 1.0,
        },
        environment: EnvironmentPlan {
            num_workers: 80,
            max_concurrent: 128,
            examples: 100_000,
            turns: Distribution::Uniform { min: 1.0, max: 8.0 },
            cpu_s: 0.001,
            setup_s: Distribution::constant(0.0),
            turn_s: Distribution::LogNormal {
                mean: 8.0,
                sigma: 1.0,
                max: 120.0,
            },
            prompt_tokens: Distribution::constant(40.0),
            answer_tokens: Distribution::LogNormal {
                mean: 20.0,
                sigma: 0.8,
                max: 200.0,
            },
            observation_tokens: Distribution::constant(10.0),
            failure_probability: 0.0,
        },
        trainer: TrainerPlan {
            step_s: 5.0,
            step_per_token_s: 0.00001,
            publish_s: 1.0,
        },
    }
}

fn long() -> Plan {
    let mut plan = wide();
    plan.max_steps = 100;
    plan.seq_len = 16_384;
    plan.orchestrator.batch_size = 512;
    plan.inference.engines = 8;
    plan.environment.turns = Distribution::constant(1.0);
    plan.environment.prompt_tokens = Distribution::Uniform {
        min: 100.0,
        max: 500.0,
    };
    plan.environment.answer_tokens = Distribution::LogNormal {
        mean: 2000.0,
        sigma: 1.0,
        max: 15_000.0,
    };
    plan
}

/// CPU time of this process, seconds: a shared machine's wall clock says little.
fn cpu_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").expect("this bench needs Linux's /proc");
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = after_name.split_whitespace().collect();
    let ticks = |index: usize| {
        fields[index]
            .parse::<f64>()
            .expect("a number of clock ticks")
    };
    (ticks(11) + ticks(12)) / 100.0
}

fn main() {
    for (name, plan) in [("wide", wide()), ("long", long())] {
        let mut best = f64::INFINITY;
        let mut last = None;
        for _ in 0..REPEATS {
            let began = cpu_s();
            let (report, _) = simulate(&plan).expect("a valid plan");
            best = best.min(cpu_s() - began);
            last = Some(report);
        }
        let report = last.expect("it was repeated");
        assert!(report.completed, "{}", report.reason);
        println!(
            "{name}: {:.0} events/s ({} events, {:.0} in flight, {} steps, {:.1} min of virtual time, {:.0} sampled \
             tokens/s, in {best:.2} s of CPU)",
            report.events as f64 / best,
            report.events,
            report.rollouts.mean_in_flight,
            report.throughput.steps,
            report.seconds / 60.0,
            report.throughput.sampled_tokens_per_s,
        );
    }
}
