//! Reading a run: a separate core plays the journal, and an observer notes what the question is about. Nothing is
//! written, so the run may still be in progress.
//!
//! ```text
//! journal ──> play: oldest snapshot, then event by event through `Core::handle`
//!               └─> Moment (event, effects, the core after it, rollouts that ended) ──> one observer a question
//! ```
//! One pass; memory for what is in flight and for the answer. Times are seconds of the run's own clock, which stops
//! while the orchestrator is down.

mod buffer;
mod check;
mod dropped;
mod evaluated;
mod fates;
mod follow;
mod group;
mod idle;
mod play;
mod rollout;
mod samples;
mod spans;
mod step;
mod summary;

use crate::journal::{ReadError, RestoreError};
use primerl_core::{EnvironmentId, ExampleIndex, GroupId, RolloutId, Step, Time};
use serde::Serialize;
use std::path::{Path, PathBuf};

pub use buffer::{BufferAnswer, buffer};
pub use check::{CheckReport, check};
pub use dropped::{DroppedReport, dropped};
pub use evaluated::{EvaluatedAnswer, MeasuredRollout, MeasuredTurn, evaluated};
pub use group::{GroupTrace, group};
pub use idle::{IdleReport, idle};
pub use play::JournalSummary;
pub use rollout::{RolloutTrace, rollout};
pub use samples::{SampleLine, SamplesAnswer, samples};
pub use step::{StepTrace, step};
pub use summary::{Summary, summary};

pub(crate) use fates::Fate;
pub use fates::Life;
pub use follow::Following;
pub use play::{Beginning, Moment};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum InspectError {
    #[error("{} holds no journal: it is written to <output_dir>/journal; give the output_dir of an RL run", folder.display())]
    NoJournal { folder: PathBuf },
    #[error(transparent)]
    Restore(#[from] RestoreError),
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("there is no {what} {number} in the journal: {known}")]
    Unknown {
        what: &'static str,
        number: u64,
        /// The existing numbers.
        known: String,
    },
    #[error("there is no training environment {name:?} in the journal; there are: {known}")]
    UnknownEnvironment { name: String, known: String },
    #[error("cannot read the spool: {0}")]
    Spool(std::io::Error),
}

/// A question about a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Question {
    Summary,
    Rollout(RolloutId),
    Group(GroupId),
    Step(Step),
    Idle,
    Dropped,
    Evaluated,
    Check,
}

/// The answer to any question, as JSON.
///
/// # Errors
/// The journal cannot be read, or does not hold what is asked for.
pub fn answer(output_dir: &Path, question: Question) -> Result<serde_json::Value, InspectError> {
    Ok(match question {
        Question::Summary => serde_json::json!(summary(output_dir)?),
        Question::Rollout(id) => serde_json::json!(rollout(output_dir, id)?),
        Question::Group(id) => serde_json::json!(group(output_dir, id)?),
        Question::Step(id) => serde_json::json!(step(output_dir, id)?),
        Question::Idle => serde_json::json!(idle(output_dir)?),
        Question::Dropped => serde_json::json!(dropped(output_dir)?),
        Question::Evaluated => serde_json::json!(evaluated(output_dir)?),
        Question::Check => serde_json::json!(check(output_dir)?),
    })
}

/// The difficulty buffer as it is now, as JSON; for an example, with its history.
///
/// # Errors
/// The journal cannot be read, or there is no such environment or example.
pub fn answer_buffer(
    output_dir: &Path,
    example: Option<(&str, ExampleIndex)>,
) -> Result<serde_json::Value, InspectError> {
    Ok(serde_json::json!(buffer(output_dir, example)?))
}

/// The samples of these steps, as JSON; with the tokens of `share` of each environment's samples.
///
/// # Errors
/// The journal cannot be read.
pub fn answer_samples(
    output_dir: &Path,
    steps: &[Step],
    share: f64,
) -> Result<serde_json::Value, InspectError> {
    Ok(serde_json::json!(samples(output_dir, steps, share)?))
}

/// In seconds of the run's clock.
pub fn seconds(time: Time) -> f64 {
    time.0 as f64 / 1e6
}

/// From one time to another, seconds; `None` if one of them is not known.
fn between(from: Option<Time>, to: Option<Time>) -> Option<f64> {
    Some(to?.since(from?).as_secs_f64())
}

/// The name that an enum without fields has in JSON.
pub fn name_of(value: &impl Serialize) -> String {
    match serde_json::to_value(value) {
        Ok(serde_json::Value::String(name)) => name,
        Ok(other) => other.to_string(),
        Err(error) => error.to_string(),
    }
}

pub fn environment_name(core: &primerl_core::Core, environment: EnvironmentId) -> String {
    let known = core.config().environments.get(environment.0 as usize);
    known.map_or_else(
        || environment.to_string(),
        |environment| environment.name.clone(),
    )
}

#[cfg(test)]
mod tests;
