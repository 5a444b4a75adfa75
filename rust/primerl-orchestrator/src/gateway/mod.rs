//! The gateway: to environments and agents an OpenAI server, to engines a client of token ids.
//!
//! ```text
//! request ─ dialect ─> messages ─ prompt ─> extend: recorded ids + suffix ┐
//!                                   └─────> fork: full render             ├─> engine ─> turn recorded ─> reply
//! ```
//! A turn's ids are recorded as the engine took and gave them; text is only ever made from ids, never the reverse.
//!
//! | module | what |
//! |---|---|
//! | `access` | keys |
//! | `endpoints` | one request from its headers to its response; retries and repeats |
//! | `dialect` | bodies, answers and events of each protocol; `fields` and `sampling` are what they share |
//! | `prompt` | messages to the prompt's ids |
//! | `turn`, `live` | the engine's request, the record, and who waits for it |
//! | `events`, `text`, `body` | the answer on its way to the client |
//! | `rollouts` | what is open, and what was recorded |

pub(crate) mod access;
mod answer;
mod body;
mod dialect;
mod endpoints;
mod events;
mod fields;
mod live;
mod prompt;
mod request;
pub(crate) mod rollouts;
mod sampling;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod turn;

pub use endpoints::{chat_completions, models, rollout_models};

use self::access::Access;
use crate::app::App;
use crate::config::Sampling;
use primerl_core::conversation::message_hash;
use primerl_core::core::OpenRollout;
use primerl_render::Renderer;
use rollouts::Rollouts;
use std::sync::Arc;

/// What a request needs besides the engines and the driver. All immutable.
pub struct Gateway {
    pub(crate) access: Access,
    pub(crate) renderer: Arc<Renderer>,
    pub(crate) rollouts: Arc<Rollouts>,
    pub(crate) model: String,
    /// Longest prompt and answer of a training rollout's turn, tokens.
    seq_len: u32,
}

impl Gateway {
    pub(crate) fn new(
        renderer: Arc<Renderer>,
        access: Access,
        model: String,
        seq_len: u32,
    ) -> Gateway {
        Gateway {
            access,
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
            turn::restore(&rollout, open.turns);
        }
    }

    /// Longest prompt and answer together, tokens.
    fn context_limit(&self, app: &App, evaluation: bool) -> u32 {
        let context = app
            .engines
            .max_model_len()
            .or(self.renderer.max_positions())
            .unwrap_or(u32::MAX);
        // A training sample longer than seq_len could not be trained.
        match evaluation {
            true => context,
            false => context.min(self.seq_len),
        }
    }
}

/// The id of a tool call that the model gave none: the same whenever the same answer is shown. Nine letters and digits,
/// for some templates insist on them.
fn call_id(sampled: &[u32], index: usize) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut bytes: Vec<u8> = sampled.iter().flat_map(|id| id.to_le_bytes()).collect();
    bytes.extend(index.to_le_bytes());
    let mut hash = message_hash(&bytes);
    let mut digit = || {
        let digit = DIGITS[(hash % 36) as usize];
        hash /= 36;
        char::from(digit)
    };
    (0..9).map(|_| digit()).collect()
}
