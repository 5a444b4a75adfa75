//! Every decision of a reinforcement-learning run, as a deterministic state machine.
//!
//! [`Core::handle`] takes an [`Event`] and the time, and returns the [`Effect`]s the shell has to carry out.
//! There is no clock, socket, thread or Python in this crate: time is passed in, randomness is one seeded
//! generator that is part of the state. So a run can be replayed from its events, and simulated.
//!
//! The modules are the stages of a rollout's way; `docs/architecture.md` has them in order.

pub mod admission;
pub mod advantage;
pub mod batch;
mod column;
pub mod config;
pub mod conversation;
pub mod counters;
pub mod curriculum;
pub mod deadlines;
pub mod effect;
mod environment;
pub mod evaluation;
pub mod event;
pub mod experts;
pub mod failure;
pub mod group;
pub mod ids;
pub mod machine;
pub mod metrics;
pub mod pack;
pub mod policy;
pub mod rollout;
pub mod sample;
pub mod signal;
pub mod status;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod time;
pub mod turn;
pub mod wait;
mod worker;

pub use config::{Config, ConfigError};
pub use conversation::Conversation;
pub use effect::Effect;
pub use event::Event;
pub use experts::Experts;
pub use failure::ErrorKind;
pub use ids::*;
pub use machine::Core;
pub use status::Status;
pub use time::{Duration, Time};
pub use turn::{Grammar, Truncation, Turn, VersionRun, VersionRuns};
