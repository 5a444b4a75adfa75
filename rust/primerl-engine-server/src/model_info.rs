//! What is known of a model: its limits, and which checkpoints it can load.

use serde::{Deserialize, Serialize};

/// Name, dtype (safetensors' names: `F32`, `BF16`) and shape of one tensor of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorSpec {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
}

/// Which checkpoints a model can load: these names and shapes, exactly, in any of these dtypes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Loadable {
    pub tensors: Vec<(String, Vec<u64>)>,
    pub dtypes: Vec<String>,
}

/// What the HTTP side and the scheduler must know of the model.
#[derive(Clone, Debug, Default)]
pub struct ModelInfo {
    pub vocab_size: u32,
    /// Longest sequence the backend can hold, tokens.
    pub max_model_len: u32,
    /// KV slots: one running sequence each.
    pub slots: u32,
    /// The first one ends a sequence with `stop_reason: null`, the others with their id, as vLLM does with the
    /// end-of-sequence list of a generation config.
    pub eos_token_ids: Vec<u32>,
    /// `None` takes any checkpoint.
    pub loadable: Option<Loadable>,
}
