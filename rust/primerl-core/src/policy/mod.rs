//! Policy versions: which were published, which engine has proved which, and how old is too old.
//!
//! - An engine serves version v only after it proved v by hash. One that joins or comes back gets the current weights
//!   first.
//! - The newest published version wins: one that was overtaken while engines loaded another is skipped. Only a version
//!   that is to be evaluated is not: the engines stay at it until the evaluation has ended.
//! - Staleness of a sample at step k is `(k - 1) - v`, v the oldest version that sampled one of its trained tokens.

mod engines;
mod ledger;

pub use ledger::{Engine, Ledger, Published, Update};

use crate::ids::*;

/// Steps between the policy that step `step` trains and `oldest`. 0 is on-policy.
pub fn staleness(step: Step, oldest: PolicyVersion) -> u64 {
    step.trains().0.saturating_sub(oldest.0)
}

/// The oldest version that step `step` may still train.
pub fn oldest_trainable(step: Step, max_off_policy_steps: u64) -> PolicyVersion {
    PolicyVersion(step.trains().0.saturating_sub(max_off_policy_steps))
}

/// Whether a rollout in flight to which this many policies contributed is given up: it spans so many versions that it
/// would be voided at the cut. A single policy is never too many.
pub fn too_many_policies(policies: usize, max_off_policy_steps: u64) -> bool {
    policies as u64 > max_off_policy_steps.max(1)
}
