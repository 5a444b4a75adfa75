//! The gateway: environments and agents use it as a server with OpenAI's and Anthropic's APIs; it is a client of the
//! engines and sends them token ids.
//!
//! ```text
//! request ─ dialect ─> messages ─ prompt ─> extend: recorded ids + suffix ┐
//!                                   └─────> fork: full render             ├─> engine ─> turn recorded ─> reply
//! ```
//! A turn's ids are recorded exactly as the engine received and sampled them. Text is only ever made from ids, never
//! ids from sampled text.
//!
//! | module | what |
//! |---|---|
//! | `access` | keys |
//! | `count` | tokens without an answer: counts, tokens of a text and back |
//! | `endpoints`, `headers` | one request from its headers to its response |
//! | `begin`, `attempts` | retries and repeats |
//! | `notes`, `restore` | what a restart needs in addition to the turns, and how it is restored |
//! | `budget`, `limits` | how many tokens one rollout may use, and what it may hold in memory |
//! | `dialect` | bodies, answers and events of each API; `fields` and `sampling` are shared by them |
//! | `seen` | the part of a body that the last request had, too, and that is not read again |
//! | `prompt` | messages to the prompt's ids |
//! | `continued` | answers that came back with more text appended |
//! | `client_type` | prompts that the engine renders; rollouts that another server answers with text |
//! | `turn`, `live` | the engine's request, the recorded turn, and the clients that wait for it |
//! | `unanswered` | the server that did not answer a rollout whose time is up |
//! | `events`, `text`, `body` | sending the answer to the client |
//! | `rollouts` | open rollouts, their recorded turns, and how many turns and how much time they may use |

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod access;
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
mod metrics;
mod notes;
mod prompt;
mod request;
mod restore;
mod rollout_limits;
mod rollout_sampling;
mod rollouts;
mod routes;
mod sampling;
mod seen;
mod structure;
#[cfg(feature = "testing")]
pub mod testing;
mod text;
mod turn;
mod unanswered;

pub use access::{
    Access, AccessError, RUN_KEY_FILE, RUN_KEY_VARIABLE, SECRET_FILE, guard, run_key,
};
pub use metrics::{GatewayMetrics, MICROSECONDS};
pub use rollout_limits::RolloutLimits;
pub use rollout_sampling::Sampling;
pub use rollouts::{Rollout, Rollouts};
pub use routes::routes;

use primerl_core::machine::OpenRollout;
use primerl_engines::Engines;
use primerl_engines::clients::{ClientType, Endpoint, Unanswered};
use primerl_render::Renderer;
use primerl_service::http::{ApiError, Bodies, ReadsBodies};
use primerl_service::inbox::DriverHandle;
use primerl_service::waits::Waits;
use std::sync::Arc;
use std::time::Duration;

/// The gateway and everything that its requests need. Every field is immutable or has its own lock.
pub struct Service {
    pub gateway: Gateway,
    pub engines: Arc<Engines>,
    pub driver: DriverHandle,
    pub bodies: Arc<Bodies>,
    pub metrics: Arc<GatewayMetrics>,
    pub waits: Waits,
    pub run: Arc<dyn RunEnd>,
    /// Whether the run only evaluates.
    pub only_evaluates: bool,
    /// How long a server may answer no one before the run ends, if the run cannot continue without it.
    pub no_engine: Duration,
}

/// How the run that the gateway belongs to ends.
pub trait RunEnd: Send + Sync {
    /// The error that callers get once the driver is gone: a failed run must not look like a finished one.
    fn over(&self) -> ApiError;

    /// The run cannot continue without this server. The first such failure counts.
    fn fail(&self, unanswered: Unanswered);
}

impl ReadsBodies for Service {
    fn bodies(&self) -> &Bodies {
        &self.bodies
    }
}

impl Service {
    /// Longest prompt and answer together, in tokens.
    fn context_limit(&self, evaluation: bool) -> u32 {
        let gateway = &self.gateway;
        let context = self
            .engines
            .max_model_len()
            .or(gateway.renderer.max_positions())
            .unwrap_or(u32::MAX);
        // A longer training sample than seq_len could not be trained.
        match evaluation {
            true => context,
            false => context.min(gateway.seq_len),
        }
    }
}

/// What a request needs in addition to the engines and the driver. All fields are immutable.
pub struct Gateway {
    pub access: Access,
    pub renderer: Arc<Renderer>,
    pub rollouts: Arc<Rollouts>,
    model: String,
    /// Longest prompt and answer of a training rollout's turn, in tokens.
    seq_len: u32,
    client_type: ClientType,
}

impl Gateway {
    pub fn new(renderer: Arc<Renderer>, access: Access, model: String, seq_len: u32) -> Gateway {
        Gateway {
            access,
            renderer,
            rollouts: Arc::default(),
            model,
            seq_len,
            client_type: ClientType::Renderer,
        }
    }

    /// `endpoints`: for each environment, the server that answers instead of the engines; `limits` likewise, and
    /// `spans`: the time from a rollout's lease to its report.
    pub fn with_clients(
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

    /// Restores a rollout as it was before a restart.
    pub fn restore(&self, open: &OpenRollout<'_>, sampling: Sampling) {
        self.rollouts.open(&open.lease, open.worker, sampling);
        if let Some(rollout) = self.rollouts.get(open.lease.rollout) {
            restore::restore(self, &rollout, open);
        }
    }
}
