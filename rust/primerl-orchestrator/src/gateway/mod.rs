//! The gateway: to environments and agents a server of OpenAI's and Anthropic's protocols, to engines a client of token ids.
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
//! | `count` | tokens without an answer: counts, tokens of a text and back |
//! | `endpoints`, `headers` | one request from its headers to its response |
//! | `begin`, `attempts`, `restore` | retries and repeats; what of them a restart has to know |
//! | `allowance`, `budget`, `limits` | how much one rollout may take, sample, and hold |
//! | `dialect` | bodies, answers and events of each protocol; `fields` and `sampling` are what they share |
//! | `prompt` | messages to the prompt's ids |
//! | `continued` | answers that came back with more text behind them |
//! | `client_type` | the same, where the engine renders; rollouts that another server answers, with text |
//! | `turn`, `live` | the engine's request, the record, and who waits for it |
//! | `unanswered` | who did not answer a rollout whose time is up |
//! | `events`, `text`, `body` | the answer on its way to the client |
//! | `rollouts` | what is open, and what was recorded |

pub(crate) mod access;
pub(crate) mod allowance;
mod answer;
mod attempts;
mod begin;
mod body;
mod budget;
mod client_type;
mod continued;
mod count;
mod dialect;
mod endpoints;
mod events;
mod fields;
mod headers;
#[cfg(test)]
mod histories;
mod limits;
mod live;
#[doc(hidden)]
pub mod measure;
mod prompt;
mod request;
mod restore;
pub(crate) mod rollouts;
mod sampling;
mod structure;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod turn;
pub(crate) mod unanswered;

pub use allowance::tighten;
pub use count::{count_tokens, detokenize, tokenize};
pub use dialect::{delete_response, response_input_items, retrieve_response};
pub use endpoints::{
    chat_completions, completions, messages, models, responses, rollout_model, rollout_models,
};

use self::access::Access;
use crate::app::App;
use crate::clients::Endpoint;
use crate::config::{ClientType, RolloutLimits, Sampling};
use primerl_core::machine::OpenRollout;
use primerl_render::Renderer;
pub(crate) use rollouts::Rollout;
use rollouts::Rollouts;
use std::sync::Arc;
use std::time::Duration;

/// What a request needs besides the engines and the driver. All immutable.
pub struct Gateway {
    pub(crate) access: Access,
    pub(crate) renderer: Arc<Renderer>,
    pub(crate) rollouts: Arc<Rollouts>,
    pub(crate) model: String,
    /// Longest prompt and answer of a training rollout's turn, tokens.
    seq_len: u32,
    client_type: ClientType,
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
            client_type: ClientType::Renderer,
        }
    }

    /// `endpoints`: by environment, who answers in place of the engines; `limits` likewise, and `spans`,
    /// what a rollout has from its lease to its report.
    pub(crate) fn with_clients(
        self,
        client_type: ClientType,
        endpoints: Vec<Option<Arc<Endpoint>>>,
        limits: Vec<RolloutLimits>,
        spans: Vec<Duration>,
    ) -> Gateway {
        let rollouts = Rollouts::with_endpoints(endpoints).with_limits(limits, spans);
        Gateway {
            client_type,
            rollouts: Arc::new(rollouts),
            ..self
        }
    }

    /// Take up a rollout as it was before a restart.
    pub fn restore(&self, open: &OpenRollout<'_>, sampling: Sampling) {
        self.rollouts.open(&open.lease, open.worker, sampling);
        if let Some(rollout) = self.rollouts.get(open.lease.rollout) {
            restore::restore(self, &rollout, open);
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
