//! What must hold of a batch's tokens.

use crate::inspect::step::oldest_versions;
use primerl_core::pack::{MicroBatch, PackedBatch, Weighted};
use primerl_core::{Config, PolicyVersion, policy};

pub(super) fn check_tokens(batch: &PackedBatch, config: &Config) -> Result<(), String> {
    check_staleness(batch, config.run.max_off_policy_steps)?;
    check_loss_tokens(batch)?;
    check_scores(batch, config)
}

fn check_staleness(batch: &PackedBatch, bound: u64) -> Result<(), String> {
    let step = batch.step;
    let micro_batches = batch.ranks.iter().flatten();
    for oldest in micro_batches.flat_map(oldest_versions).flatten() {
        if policy::staleness(step, PolicyVersion(oldest)) > bound {
            return Err(format!(
                "a sample of version {oldest} is trained at step {step}, more than max_off_policy_steps = {bound} steps \
                 late"
            ));
        }
    }
    Ok(())
}

fn sequences_of(batch: &PackedBatch) -> impl Iterator<Item = &Weighted> {
    let micro_batches = batch.ranks.iter().flatten();
    micro_batches.flat_map(MicroBatch::sequences)
}

fn check_loss_tokens(batch: &PackedBatch) -> Result<(), String> {
    let segments = sequences_of(batch).flat_map(|weighted| weighted.sample.segments());
    let learnt = segments.filter(|segment| segment.is_learnt());
    let trained: u64 = learnt.map(|segment| segment.len() as u64).sum();
    match trained == batch.loss_tokens {
        true => Ok(()),
        false => Err(format!(
            "the batch of step {} has {trained} tokens to train, and reports {}",
            batch.step, batch.loss_tokens
        )),
    }
}

fn check_scores(batch: &PackedBatch, config: &Config) -> Result<(), String> {
    let is_scored = |weighted: &Weighted| {
        weighted.teacher_logprobs.is_some()
            || !config.training_mode(weighted.environment).is_scored()
    };
    match sequences_of(batch).all(is_scored) {
        true => Ok(()),
        false => Err(format!(
            "the batch of step {} has tokens that no teacher scored",
            batch.step
        )),
    }
}
