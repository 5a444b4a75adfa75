//! What people and tools see of a run: metrics, the trainer's waiting, CPU time.

mod cpu;
mod metrics;
mod trainer;

pub use cpu::process_cpu_seconds;
pub use metrics::Telemetry;
pub use trainer::{Overdue as TrainerOverdue, TrainerClock};
