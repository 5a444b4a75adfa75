//! What a model has to offer to be served.

use crate::batch::Batch;
use crate::checkpoint::Checkpoint;
use crate::experts::ExpertRows;
use crate::model_info::ModelInfo;
use std::path::{Path, PathBuf};

/// One token with its log-probability (nats, natural logarithm) and rank (1 = most likely).
#[derive(Clone, Debug, PartialEq)]
pub struct ScoredToken {
    pub token_id: u32,
    pub logprob: f32,
    pub rank: u32,
    /// The most likely tokens in rank order, as many as were asked for; empty when none was.
    pub top: Vec<TopToken>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopToken {
    pub token_id: u32,
    pub logprob: f32,
    pub rank: u32,
}

/// The answer to one [`Batch`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepOutput {
    /// One for each sequence with [`crate::batch::BatchSequence::sample`], in batch order.
    pub sampled: Vec<ScoredToken>,
    /// One for each target of [`crate::batch::BatchSequence::prompt_targets`], in batch order.
    pub prompt: Vec<ScoredToken>,
    /// The experts that were chosen for each token of the batch, where the backend reports them.
    pub experts: Option<ExpertRows>,
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// Refused before the model was changed: it keeps serving the same weights.
    #[error("{0}")]
    Refused(String),
    /// The model cannot be used any more. The engine answers what is in flight with errors and ends.
    #[error("{0}")]
    Failed(String),
}

/// A model that computes one step for a whole batch. Its methods block and are called on one dedicated thread, in turn.
pub trait Backend: Send + 'static {
    fn info(&self) -> &ModelInfo;

    /// Computes the KV of every token of the batch and samples where asked.
    ///
    /// # Errors
    /// Any error ends the engine: after half a step it is unknown which KV entries are right.
    fn forward(&mut self, batch: &Batch) -> Result<StepOutput, BackendError>;

    /// Where the folder of a version, which the orchestrator names by its own path, is on this machine: it may have to
    /// be fetched.
    ///
    /// # Errors
    /// [`BackendError::Refused`] where it cannot be had.
    fn locate(&mut self, folder: &Path) -> Result<PathBuf, BackendError> {
        Ok(folder.to_owned())
    }

    /// Replaces the weights, between two steps. The checkpoint has been validated against its manifest and
    /// [`ModelInfo::loadable`].
    ///
    /// # Errors
    /// [`BackendError::Refused`] if and only if the model is as it was before the call.
    fn load_weights(&mut self, checkpoint: &Checkpoint) -> Result<(), BackendError>;

    /// Digest of the tensors as they are loaded now (`digest` of the manifest format), computed from the model's memory.
    fn digest(&mut self) -> Result<String, BackendError>;
}
