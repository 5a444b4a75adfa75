//! What people and tools see of a run: metrics, status, CPU time.

mod cpu;
mod exposition;
mod metrics;
mod rollouts;
pub mod status;
mod trainer;
mod waits;

pub use cpu::process_cpu_seconds;
pub use metrics::{Outcome, Telemetry, TurnEnd};
pub use trainer::{Overdue as TrainerOverdue, TrainerClock};
pub use waits::{Overdue, Wait, Waiting, Waits};
