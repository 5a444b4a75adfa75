//! The gateway: to environments and agents an OpenAI server, to engines a client of token ids.
//!
//! ```text
//! chat request ─ dialect ─> messages ─ plan ─> extend: recorded ids + suffix ┐
//!                                        └──> fork: full render              ├─> engine ─> turn recorded ─> answer
//! ```
//! A turn's ids are recorded as the engine took and gave them; text is only ever made from ids, never the reverse.

mod answer;
mod body;
mod dialect;
mod endpoints;
pub(crate) mod rollouts;
mod turn;

pub use endpoints::{chat_completions, models, rollout_models};

use crate::config::Sampling;
use primerl_core::core::OpenRollout;
use primerl_render::Renderer;
use rollouts::Rollouts;
use std::sync::Arc;

/// What a request needs besides the engines and the driver. All immutable.
pub struct Gateway {
    pub(crate) renderer: Arc<Renderer>,
    pub(crate) rollouts: Arc<Rollouts>,
    pub(crate) model: String,
    /// Longest prompt and answer of a training rollout's turn, tokens.
    pub(crate) seq_len: u32,
}

impl Gateway {
    pub fn new(renderer: Arc<Renderer>, model: String, seq_len: u32) -> Gateway {
        Gateway {
            renderer,
            rollouts: Arc::default(),
            model,
            seq_len,
        }
    }

    /// Take up a rollout as it was before a restart.
    pub fn restore(&self, open: &OpenRollout<'_>, sampling: Sampling) {
        self.rollouts.open(&open.lease, open.worker, sampling);
        if let Some(rollout) = self.rollouts.get(open.lease.rollout) {
            turn::restore(self, &rollout, open.turns);
        }
    }
}
