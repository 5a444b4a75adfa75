//! Why something waits: one typed cause, [`Wait`], of which texts (`words`), warnings (`warned`), the list in `/status`
//! (`shown`) and what a trace counts (`trace`) are made.
//!
//! Some waits have no request that stands for them. Each of these has an owner, a reason, and a deadline at which a
//! warning is logged, and again after the same span for as long as it lasts. None of them ends the run: the core cannot
//! know whether a step takes a second or an hour, but nothing waits in silence.

mod armed;
mod causes;
mod shown;
mod trace;
mod warned;
mod words;

pub use armed::{Armed, Waits};
pub use trace::{BatchWait, NoRollouts};

use crate::ids::*;
use serde::{Deserialize, Serialize};

/// What someone waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Wait {
    // Waits that are warned about, under these names in snapshots and in this order.
    /// There is no engine that could serve.
    NoEngine,
    /// An engine was asked to load this version and has not reported.
    EngineUpdate(EngineId, PolicyVersion),
    /// An environment has work to do, and no worker that does it.
    NoWorker(EnvironmentId),
    /// The trainer has not published this version.
    Weights(PolicyVersion),
    /// The trainer has not asked for this step's batch.
    BatchRequest(Step),

    // What keeps a batch or a lease waiting.
    /// The trainer has not published version 0.
    FirstWeights,
    /// No engine has proved this version.
    Proof(PolicyVersion),
    /// An environment has no worker that listed its examples.
    Examples(EnvironmentId),
    /// Too few groups are ready for a batch.
    Groups,
    /// No steps are left to be cut.
    AllCut,
    /// The environment rests.
    Rest(EnvironmentId),
    /// As many rollouts are in flight as are allowed.
    Room,
    /// As many groups are under way as may be trained before the next version.
    NextVersion,
    /// All work is for other environments.
    OtherEnvironments,
    /// Every rollout of the evaluation of this version is handed out.
    HandedOut(PolicyVersion),
    /// The trainer went back, and has not published this version again, which is to be evaluated.
    Republication(PolicyVersion),
    /// No evaluation is due.
    NoEvaluation,

    // Waits with a deadline of their own.
    /// The evaluation of this version has not ended.
    Evaluation(PolicyVersion),
    /// The evaluation of this version has ended, and the trainer, which went back, has not published it again.
    EvaluationReport(PolicyVersion),
    /// A group lacks its custom advantages.
    Advantages(GroupId),
    /// A group lacks its teacher's log-probabilities.
    Teacher(GroupId),
    /// A worker's environment blocks it.
    Blocked(WorkerId),
}
