//! Observability of a run for people and tools: metrics, the trainer's waits, CPU time.

mod metrics;
mod trainer;

pub use metrics::Telemetry;
pub use trainer::{Overdue as TrainerOverdue, TrainerClock};
