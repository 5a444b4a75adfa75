//! The tokio shell around primerl-core: everything of a run that has a socket, a clock, a file or a thread.
//!
//! * [`gateway`]: an OpenAI server for environments, per rollout, over token ids.
//! * [`engines`]: the inference engines, their weights and the choice among them.
//! * [`clients`]: other servers, which give text.
//! * [`envs`]: environment workers and their leases (both ends).
//! * [`trainer`]: which trainer has the run.
//! * [`driver`]: the thread that owns the core.
//! * [`page`]: what a run does, in a browser.
//! * [`telemetry`]: metrics.
//!
//! [`run`] is one orchestrator from start to end; [`run_command`] is the command line around it.

#![forbid(unsafe_code)]

mod address;
mod app;
mod batches;
mod command;
pub mod config;
mod custom;
pub mod driver;
mod effects;
mod endpoints;
pub mod envs;
mod failure;
pub mod gateway;
mod going_back;
pub mod in_process;
mod log;
mod monitor;
pub mod page;
mod recorder;
mod resumed_run;
mod run;
mod runtime;
mod server;
mod teacher;
pub mod telemetry;
pub mod trainer;
mod unknown;

pub use app::App;
pub use command::{EXIT_FAILED, EXIT_FINISHED, EXIT_INPUT, run_command};
pub use config::Config;
pub use custom::CustomAdvantages;
pub use failure::RunError;
pub use gateway::{RUN_KEY_FILE, RUN_KEY_VARIABLE};
pub use run::{ExitReason, Prepared, Running, run};
