//! Inference engines: how one is spoken to ([`client`]), brought up to date ([`supervisor`]), and chosen
//! ([`pool`], [`routing`]).
//!
//! ```text
//! joins ──> supervisor: health + model card ──> core: EngineJoined ──> UpdateEngine ──> pause, load, prove, resume
//!             ^                                                                              │ EngineProved: traffic
//!             │                                                                            probe: answers are taken
//!             └────────────── EngineLost (no traffic): health lost, update failed, unproved weights, other log-probabilities
//! ```
//! When it is lost for its health, and when it may come back, are rules of [`health`]; what a run needs of an engine that
//! others have started is asked at the first look ([`fitness`]). A run that does not sample at temperature 1 from all
//! tokens also has it prove what its log-probabilities are of
//! ([`meaning`]), once a join.
//! An engine that loads adapters beside each other is not paused, and its probe comes first ([`adapters`]).
//! Each engine has one task that owns its health checks and updates, so the two never overlap.

mod adapters;
mod attempts;
mod body;
mod chat;
pub mod client;
mod error;
mod fitness;
mod generate;
mod health;
mod ids;
mod load;
mod looks;
pub mod manifest;
mod meaning;
mod named;
mod part;
mod pool;
mod probe;
mod request;
mod routing;
pub(crate) mod seats;
mod slot;
mod state;
mod stream;
mod supervisor;
#[cfg(feature = "testing")]
pub mod testing;
mod weights;

pub use body::RequestBody;
pub use chat::ChatMessages;
pub(crate) use generate::GenerateAnswer;
pub use generate::{Generated, Progress, TokenLogprob};
pub use ids::{PromptIds, WrittenIds};
pub(crate) use named::Named;
pub use pool::{BrokenWeights, EngineStatus, Engines, EnginesConfig};
pub use request::{GenerateError, SampleRequest, Sampled};
pub use routing::Resident;
