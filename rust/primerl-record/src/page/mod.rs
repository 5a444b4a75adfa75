//! The page's data, from the run's files: rollouts and their turns, curves, the end of a run.

mod advantages;
pub mod curves;
pub mod health;
pub mod index;
mod line;
pub mod over;
pub mod reader;
pub mod rollout;
