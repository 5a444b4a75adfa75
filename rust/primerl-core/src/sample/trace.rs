//! What is known of the trace that a sample is of.

use crate::advantage::TraceLength;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;

/// A seat with something to train on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrainedTrace {
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub seat: String,
    pub reward: f64,
    pub metrics: BTreeMap<String, f64>,
    pub truncated: bool,
    pub turns: u32,
    /// Tokens sampled in all of its turns, also those that are not trained. 0 in snapshots that did not say.
    #[serde(default)]
    pub output_tokens: u64,
    /// Tokens of its prompts, each once. 0 in snapshots that did not say.
    #[serde(default)]
    pub input_tokens: u64,
    /// [`crate::event::Trace::demonstration`]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub demonstration: Option<Arc<str>>,
}

impl TrainedTrace {
    pub fn length(&self) -> TraceLength {
        TraceLength {
            output_tokens: self.output_tokens,
            input_tokens: self.input_tokens,
            turns: self.turns,
        }
    }
}
