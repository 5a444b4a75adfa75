//! Builders and a simulator for tests, here and in the crates above. Feature `testing`.

pub mod observer;
pub mod simulator;
pub mod witness;

use crate::config::OnCancel;
use crate::config::*;
use crate::event::{Outcome, Trace};
use crate::ids::*;
use crate::time::Duration;
use crate::turn::{TextAnswer, Turn, VersionRun, VersionRuns};
use smallvec::smallvec;
use std::sync::Arc;

/// A small valid run: 2 groups of 2 a step, one training environment. Change it with struct update.
pub fn config() -> Config {
    Config {
        run: RunConfig {
            seed: 0,
            max_steps: 3,
            batch_size: 4,
            token_batch_size: None,
            group_size: 2,
            min_group_size: None,
            group_on_cancel: OnCancel::Refill,
            seq_len: 64,
            data_ranks: 1,
            max_async_level: 1,
            max_off_policy_steps: 2,
            oversampling_factor: 1.0,
            admission: admission(),
            trajectory_strategy: TrajectoryStrategy::Interleaved,
            truncated_rollouts: TruncatedRollouts::Train,
            long_samples: LongSamples::Drop,
            training_mode: TrainingMode::Rl,
            shared_prefixes: false,
        },
        spool_steps: 100,
        buffer: buffer(),
        environments: vec![environment("train")],
        without_engines: false,
        timeouts: Timeouts {
            rollout: Duration::from_secs(120),
            worker: Duration::from_secs(15),
            long_poll: Duration::from_secs(10),
            evaluation: Duration::from_secs(600),
            evaluation_progress: None,
            weights: Duration::from_secs(300),
            teacher: Duration::from_secs(30),
            rollout_of: Vec::new(),
        },
        flops: FlopsModel {
            linear: 1.0,
            quadratic: 0.001,
        },
    }
}

/// An adaptive limit that begins high. Change it with struct update.
pub fn admission() -> Admission {
    Admission {
        limit: LimitRule::Adaptive,
        start_per_engine: 256,
        min_per_engine: 8,
        max_per_engine: 4096,
        kv_cache_target: 0.9,
        increase: 16,
        decrease_factor: 0.8,
        evaluation_share: 0.5,
    }
}

/// Nothing is filtered; thresholds are set. Change it with struct update.
pub fn buffer() -> Buffer {
    Buffer {
        easy_threshold: 0.8,
        hard_threshold: 0.2,
        ..Buffer::off()
    }
}

/// A training environment.
pub fn environment(name: &str) -> Environment {
    Environment {
        name: name.to_owned(),
        role: Role::Train,
        ratio: 1.0,
        algorithm: grpo(),
        own: EnvironmentConfig {
            max_retries: 2,
            group_size: None,
            training_mode: None,
        },
    }
}

/// A training environment that tries a failed rollout again so often.
pub fn retried(name: &str, max_retries: u32) -> Environment {
    let mut environment = environment(name);
    environment.own.max_retries = max_retries;
    environment
}

/// Plain GRPO. Change it with struct update.
pub fn grpo() -> Algorithm {
    Algorithm::plain()
}

/// An evaluation environment, evaluated at version 0, every `interval` versions, and at the end.
pub fn evaluation(name: &str, interval: Option<u64>) -> Environment {
    let evaluation = Evaluation {
        num_examples: Some(3),
        rollouts_per_example: 2,
        interval,
        base_model: true,
        pass_threshold: Evaluation::usual_threshold(),
    };
    Environment {
        role: Role::Evaluate(evaluation),
        ..environment(name)
    }
}

/// A turn of the unnamed session, all of it sampled by one version; log-probabilities are -1.
pub fn turn(parent: Option<u32>, prompt_suffix: &[u32], sampled: &[u32], version: u64) -> Turn {
    let versions = smallvec![VersionRun {
        version: PolicyVersion(version),
        n_tokens: sampled.len() as u32,
    }];
    Turn::of_ids(
        "".into(),
        parent.map(TurnIndex),
        prompt_suffix.into(),
        sampled.into(),
        vec![-1.0; sampled.len()].into(),
        versions,
    )
}

/// A turn that a teacher answered: text, and how the policy's model writes it.
pub fn taught_turn(prompt_suffix: &[u32], sampled: &[u32]) -> Turn {
    Turn {
        logprobs: Arc::default(),
        versions: VersionRuns::default(),
        text: Some(Arc::new(TextAnswer {
            model: "teacher".into(),
            message: "{}".into(),
            stop: None,
            prompt_tokens: 7,
            completion_tokens: 9,
        })),
        ..turn(None, prompt_suffix, sampled, 0)
    }
}

/// A good end of a rollout with one seat.
pub fn outcome(reward: f64) -> Outcome {
    Outcome {
        ok: true,
        traces: vec![trace("", reward)],
        error: None,
        refusal: None,
    }
}

/// A trainable seat that went well.
pub fn trace(session: &str, reward: f64) -> Trace {
    Trace {
        session: session.to_owned(),
        trainable: true,
        ok: true,
        reward,
        ..Trace::default()
    }
}
