//! The tokio shell around primerl-core: everything of a run that has a socket, a clock, a file or a thread.
//!
//! * [`gateway`]: an OpenAI server for environments, per rollout, over token ids.
//! * [`engines`]: the inference engines, their weights and the choice among them.
//! * [`clients`]: other servers, which give text.
//! * [`envs`]: environment workers and their leases (both ends).
//! * [`trainer`]: batches out, weights in.
//! * [`journal`]: every event on disk; [`driver`]: the task that owns the core.
//! * [`inspect`]: reading what a journal tells, for people; [`page`]: the same in a browser.
//! * [`telemetry`]: metrics and status.
//!
//! [`run`] is one orchestrator from start to end; [`run_command`] is the command line around it.

#![forbid(unsafe_code)]

mod address;
mod app;
mod batches;
pub mod clients;
mod command;
pub mod config;
mod connections;
mod custom;
pub mod driver;
mod effects;
pub mod engines;
pub mod envs;
mod failure;
pub mod files;
pub mod gateway;
mod going_back;
pub mod http;
pub mod in_process;
pub mod inspect;
pub mod journal;
mod kept_state;
mod log;
mod monitor;
pub mod page;
mod recorder;
mod routes;
mod run;
mod runtime;
pub mod secret;
mod server;
mod spool;
mod story;
mod teacher;
pub mod telemetry;
pub mod tls;
pub mod trainer;
mod unknown;

pub use app::App;
pub use command::{EXIT_FAILED, EXIT_FINISHED, EXIT_INPUT, run_command};
pub use config::{Config, ConfigError};
pub use connections::{BodyLimits, Limits};
pub use custom::CustomAdvantages;
pub use failure::RunError;
pub use gateway::access::{RUN_KEY_FILE, RUN_KEY_VARIABLE};
pub use run::{ExitReason, Prepared, Running, run};
