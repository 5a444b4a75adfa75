//! What people and tools see of a run: metrics, the trainer's waiting, CPU time.

mod metrics;
mod trainer;

pub use metrics::Telemetry;
pub use trainer::{Overdue as TrainerOverdue, TrainerClock};
