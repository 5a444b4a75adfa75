//! One orchestrator: the process that joins the core, the gateway, the engines and the run's files.
//!
//! * [`driver`]: the thread that owns the core.
//! * [`envs`]: environment workers and their leases (both ends).
//! * [`trainer`]: which trainer has the run.
//! * [`page`]: a run's page in the browser.
//! * [`telemetry`]: a run's metrics.
//!
//! [`run`] is one orchestrator from start to end; [`run_command`] is the command line around it.

#![forbid(unsafe_code)]

mod address;
mod app;
mod batches;
mod changed;
mod command;
pub mod config;
mod custom;
pub mod driver;
mod effects;
mod endpoints;
pub mod envs;
mod failure;
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
pub use run::{ExitReason, Prepared, Running, run};
