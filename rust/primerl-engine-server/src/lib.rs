//! The engine side of vLLM's HTTP surface, over a pure batching scheduler and a [`Backend`] trait.
//!
//! ```text
//!  HTTP (axum, tokio)            one engine thread                        model
//!  generate, abort, pause ──commands──> Scheduler ──Batch──> Backend::forward
//!  update_weights, metrics <──answers── Scheduler <──ids, logprobs──┘
//! ```
//! - [`scheduler`] decides: who runs, with which tokens, who is preempted, who has ended. No clock, no thread, no IO.
//! - [`engine`] is the loop of the one thread that owns the scheduler and the backend; [`handle`] is what others have of it.
//! - [`http`] speaks the wire; it only sends commands, so a slow step never blocks `/health`.
//! - [`grammar`] computes what structured outputs allow next, on threads of its own, while the model computes.
//! - [`mock`] is a seeded backend without a model; the torch backend lives in the Python bindings.
//!
//! Scheduler and engine know token ids only: text is what the HTTP side makes of them.

#![cfg_attr(test, expect(clippy::unwrap_used, reason = "a test may panic"))]

pub mod backend;
pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod engine;
pub mod experts;
pub mod grammar;
pub mod handle;
pub mod http;
pub mod metrics;
pub mod mock;
pub mod model_info;
pub mod numbered;
pub mod request;
pub mod schedulable;
pub mod scheduler;
pub mod sequence;
pub mod server;
pub mod versions;

pub use backend::{Backend, BackendError, ScoredToken, StepOutput};
pub use batch::Batch;
pub use checkpoint::{Checkpoint, CheckpointError};
pub use config::{Config, ConfigError};
pub use mock::{MockBackend, MockConfig};
pub use model_info::{Loadable, ModelInfo, TensorSpec};
pub use server::{ServerError, run};
