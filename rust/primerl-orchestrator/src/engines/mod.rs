//! Inference engines: how one is spoken to ([`client`]), brought up to date ([`supervisor`]), and chosen
//! ([`pool`], [`routing`]).
//!
//! ```text
//! joins ──> supervisor: health + model card ──> core: EngineJoined ──> UpdateEngine ──> pause, load, prove, resume
//!             ^                                                                              │ EngineProved: traffic
//!             │                                                                            probe: answers are taken
//!             └────────────── EngineLost (no traffic): health lost, update failed, unproved weights, other log-probabilities
//! ```
//! A run that does not sample at temperature 1 from all tokens also has it prove what its log-probabilities are of
//! ([`meaning`]), once a join.
//! Each engine has one task that owns its health checks and updates, so the two never overlap.

mod attempts;
mod body;
mod chat;
pub mod client;
pub(crate) mod endpoints;
mod generate;
mod ids;
mod load;
mod meaning;
mod part;
mod pool;
mod probe;
mod request;
mod routing;
mod slot;
mod state;
mod stream;
mod supervisor;
#[cfg(feature = "testing")]
pub mod testing;

pub use body::RequestBody;
pub use chat::ChatMessages;
pub(crate) use generate::GenerateAnswer;
pub use generate::{Generated, Progress, TokenLogprob};
pub use ids::{PromptIds, WrittenIds};
pub use pool::{EngineStatus, Engines, EnginesConfig};
pub use request::{GenerateError, SampleRequest, Sampled};
pub use routing::Resident;
