//! Which batches are kept, and which data ranks ask for one.

use super::PackedBatch;
use crate::ids::*;
use crate::time::Time;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A rank that waits.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct BatchRequest {
    pub step: Step,
    pub rank: u32,
    pub deadline: Time,
}

/// Which batches there are, and who asks for one. The batches themselves are the shell's, on disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Batches {
    pub requests: BTreeMap<RequestId, BatchRequest>,
    /// The first step whose batch is kept: a checkpoint of the trainer covers those before.
    kept_from: Step,
    /// The newest step that a checkpoint covers.
    checkpoint: Option<Step>,
    newest_fetched: Option<Step>,
    /// The last step cut before a restart, until the trainer reports where it resumes: its batch may have been fetched by
    /// then, because that event need not be durable before the answer is sent.
    #[serde(default)]
    perhaps_fetched: Option<Step>,
    last_metrics: Option<BTreeMap<String, f64>>,
    /// For each kept batch that is in the spool, the checksum of each rank's bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    checksums: BTreeMap<Step, Vec<u64>>,
}

impl Default for Batches {
    fn default() -> Self {
        Batches {
            requests: BTreeMap::new(),
            kept_from: Step(1),
            checkpoint: None,
            newest_fetched: None,
            perhaps_fetched: None,
            last_metrics: None,
            checksums: BTreeMap::new(),
        }
    }
}

impl Batches {
    pub fn add(&mut self, batch: &PackedBatch) {
        self.last_metrics = Some(batch.metrics.clone());
    }

    /// Metrics of the batch cut last.
    pub fn last_metrics(&self) -> Option<&BTreeMap<String, f64>> {
        self.last_metrics.as_ref()
    }

    /// The newest step of which some rank has its batch.
    pub fn newest_fetched(&self) -> Option<Step> {
        self.newest_fetched
    }

    pub fn fetched(&mut self, step: Step) {
        self.newest_fetched = self.newest_fetched.max(Some(step));
    }

    /// The newest step that the trainer can have trained, as far as is known.
    pub fn newest_trainable(&self) -> Option<Step> {
        self.newest_fetched.max(self.perhaps_fetched)
    }

    pub fn restarted(&mut self, next_step: Step) {
        self.perhaps_fetched = Some(Step(next_step.0 - 1)).filter(|step| step.0 > 0);
    }

    /// The first step whose batch can still be had.
    pub fn kept_from(&self) -> Step {
        self.kept_from
    }

    /// The trainer will never ask for `step` or an earlier one again. Returns whether that is news.
    pub fn cover(&mut self, step: Step) -> bool {
        self.checkpoint = self.checkpoint.max(Some(step));
        self.keep_from(step.next())
    }

    /// Without checkpoints a trainer can only begin again at the first step: at most `keep_steps` batches are kept for it.
    /// Returns whether one was given up.
    pub fn limit(&mut self, next_step: Step, keep_steps: u64) -> bool {
        let oldest = Step(next_step.0.saturating_sub(keep_steps).max(1));
        self.checkpoint.is_none() && self.keep_from(oldest)
    }

    /// The trainer resumes from its checkpoint after `step`.
    pub fn resume_after(&mut self, step: Step) {
        self.newest_fetched = Some(step).filter(|step| step.0 > 0);
        self.perhaps_fetched = None;
    }

    /// The batch of `step` is in the spool.
    pub fn written(&mut self, step: Step, checksums: Vec<u64>) {
        if step >= self.kept_from {
            self.checksums.insert(step, checksums);
        }
    }

    /// For each kept batch that is in the spool, the checksum of each rank's bytes.
    pub fn checksums(&self) -> &BTreeMap<Step, Vec<u64>> {
        &self.checksums
    }

    fn keep_from(&mut self, step: Step) -> bool {
        let is_news = step > self.kept_from;
        self.kept_from = self.kept_from.max(step);
        self.checksums = self.checksums.split_off(&self.kept_from);
        is_news
    }
}
