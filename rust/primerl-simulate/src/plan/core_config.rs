//! The config of the core that a plan drives.

use super::Plan;
use primerl_core::config::*;
use primerl_core::{Config, Duration};

impl Plan {
    /// The config of the core that is driven: that of a run with one training environment.
    pub fn core_config(&self) -> Config {
        Config {
            run: self.run_config(),
            spool_steps: u64::MAX,
            buffer: Buffer::off(),
            environments: vec![Environment {
                name: "plan".to_owned(),
                role: Role::Train,
                ratio: 1.0,
                algorithm: Algorithm::plain(),
                own: EnvironmentConfig {
                    max_retries: 2,
                    group_size: None,
                    training_mode: None,
                },
            }],
            without_engines: false,
            timeouts: timeouts(self.orchestrator.rollout_s),
            flops: FlopsModel {
                linear: 1.0,
                quadratic: 0.0,
            },
        }
    }

    fn run_config(&self) -> RunConfig {
        let orchestrator = &self.orchestrator;
        RunConfig {
            seed: self.seed,
            max_steps: self.max_steps,
            batch_size: orchestrator.batch_size,
            token_batch_size: None,
            group_size: orchestrator.group_size,
            seq_len: self.seq_len,
            data_ranks: self.data_ranks,
            max_async_level: orchestrator.max_async_level,
            max_off_policy_steps: orchestrator.max_off_policy_steps,
            oversampling_factor: orchestrator.oversampling_factor,
            min_group_size: None,
            group_on_cancel: OnCancel::Refill,
            admission: unlimited(),
            trajectory_strategy: TrajectoryStrategy::Interleaved,
            truncated_rollouts: TruncatedRollouts::Train,
            long_samples: LongSamples::Drop,
            training_mode: TrainingMode::Rl,
            shared_prefixes: false,
        }
    }
}

/// Engines queue what is too much for them: the plan shows it.
fn unlimited() -> Admission {
    Admission {
        limit: LimitRule::Fixed,
        start_per_engine: u32::MAX,
        min_per_engine: 1,
        max_per_engine: u32::MAX,
        kv_cache_target: 1.0,
        increase: 1,
        decrease_factor: 0.5,
        evaluation_share: 0.5,
    }
}

/// In virtual time no worker is ever silent, and a long step is no reason for a warning.
fn timeouts(rollout_s: f64) -> Timeouts {
    let never = Duration::from_secs(1_000_000_000);
    Timeouts {
        rollout: Duration::from_secs_f64(rollout_s),
        rollout_of: Vec::new(),
        worker: Duration::from_secs(15),
        long_poll: Duration::from_secs(10),
        evaluation: never,
        evaluation_progress: None,
        weights: never,
        teacher: never,
    }
}
