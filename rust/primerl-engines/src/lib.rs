//! The inference engines of a run, and other servers that answer ([`clients`]): the HTTP client of an engine
//! ([`client`]), its updates ([`supervisor`]), and the choice of an engine for a request ([`pool`], [`routing`]).
//!
//! ```text
//! joins ──> supervisor: health + model card ──> core: EngineJoined ──> UpdateEngine ──> pause, load, prove, resume
//!             ^                                                                              │ EngineProved: traffic
//!             │                                                                            probe: answers are taken
//!             └────────────── EngineLost (no traffic): health lost, update failed, unproved weights, other log-probabilities
//! ```
//! [`health`] has the rules for when an engine is lost, and when it may return; [`fitness`] checks at the first look
//! what a run needs of an engine that others have started. In a run that does not sample at temperature 1 from all
//! tokens, an engine also proves which distribution its log-probabilities come from ([`logprob_kind`]), once per join.
//! An engine that holds several adapters is not paused, and its probe comes first ([`adapters`]). Each engine has one
//! task that owns its health checks and updates, so the two never overlap.

#![forbid(unsafe_code)]
#![warn(unreachable_pub)]

mod adapters;
mod attempts;
mod body;
mod chat;
pub mod client;
pub mod clients;
mod config;
pub mod engine_records;
mod error;
mod experts;
mod failover;
mod fitness;
mod generate;
mod health;
mod health_check;
mod ids;
mod joining;
mod load;
mod logprob_kind;
pub mod manifest;
mod pool;
mod probe;
mod request;
mod routing;
mod score;
mod served_version;
mod slot;
mod state;
mod stream;
mod supervisor;
#[cfg(feature = "testing")]
pub mod testing;
mod update;
mod weights;

pub use body::RequestBody;
pub use config::EnginesConfig;
pub use generate::{GenerateAnswer, Generated, Progress, TokenLogprob};
pub use ids::{PromptIds, WrittenIds};
pub use pool::{BrokenWeights, EngineStatus, Engines};
pub use request::{ChatMessages, GenerateError, SampleRequest, Sampled};
pub use routing::Resident;
pub use served_version::Named;
