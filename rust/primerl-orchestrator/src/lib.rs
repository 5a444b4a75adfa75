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
pub mod batch;
mod batches;
pub mod clients;
mod command;
pub mod config;
pub mod config_error;
mod custom;
pub mod driver;
mod effects;
mod endpoints;
pub mod engines;
pub mod envs;
mod failure;
pub mod files;
pub mod gateway;
mod going_back;
pub mod http;
pub mod in_process;
pub mod inbox;
pub mod inspect;
pub mod journal;
mod kept_state;
mod log;
mod monitor;
pub mod page;
mod recorder;
mod resumed_run;
mod run;
mod runtime;
pub mod secret;
mod server;
mod spool;
mod teacher;
pub mod telemetry;
pub mod tls;
pub mod trainer;
mod unknown;
pub mod waits;

pub use app::App;
pub use command::{EXIT_FAILED, EXIT_FINISHED, EXIT_INPUT, run_command};
pub use config::Config;
pub use config_error::ConfigError;
pub use custom::CustomAdvantages;
pub use failure::RunError;
pub use gateway::{RUN_KEY_FILE, RUN_KEY_VARIABLE};
pub use http::{BodyLimits, Limits};
pub use run::{ExitReason, Prepared, Running, run};
