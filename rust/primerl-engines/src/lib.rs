//! The inference engines of a run, and other servers that answer ([`clients`]): how one is spoken to ([`client`]), brought up to date ([`supervisor`]), and chosen
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
//! ([`logprob_kind`]), once a join.
//! An engine that loads adapters beside each other is not paused, and its probe comes first ([`adapters`]).
//! Each engine has one task that owns its health checks and updates, so the two never overlap.

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
