//! A capacity planner: a run in virtual time, before there is a machine for it.
//!
//! ```text
//!  Plan ──> World: the real primerl_core::Core, driven by
//!             engines   the real scheduler of primerl-engine-server, each step priced by the plan
//!             workers   leases, turns, environment time, lengths drawn from the plan's distributions
//!             trainer   a step priced by its tokens, publishing, the next batch
//!           ──> Report (numbers), table (text), picture (SVG)
//! ```
//! No clock, no thread, no IO: the same plan gives the same report.

mod distribution;
mod engine;
mod picture;
mod plan;
mod report;
mod sequence;
mod soonest;
mod stream;
mod table;
mod tracks;
mod what_if;
mod world;

pub use distribution::Distribution;
pub use engine::{Ended, Engine};
pub use picture::picture;
pub use plan::{EnvironmentPlan, Inference, Orchestration, Plan, PlanError, TrainerPlan};
pub use report::{Limit, Report};
pub use table::{table, what_if_table};
pub use tracks::Doing;
pub use what_if::{WhatIf, what_if};
pub use world::World;

/// Plays a plan to its end.
///
/// # Errors
/// The first field of the plan found wrong.
pub fn simulate(plan: &Plan) -> Result<(Report, World), PlanError> {
    let mut world = World::new(plan.clone())?;
    world.run();
    Ok((Report::of(&world), world))
}
