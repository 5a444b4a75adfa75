//! The difficulty buffer as it is now.

use super::InspectError;
use super::play::journal_of;
use crate::journal;
use primerl_core::curriculum::{BufferReport, ExampleHistory};
use primerl_core::{Core, ExampleIndex};
use serde::Serialize;
use std::path::Path;

#[derive(Clone, Debug, Serialize)]
pub struct BufferAnswer {
    #[serde(flatten)]
    pub report: BufferReport,
    /// The next step to be cut.
    pub next_step: primerl_core::Step,
    /// The example that was asked about.
    pub example: Option<ExampleHistory>,
}

/// The pools of each environment; for one example, its history.
///
/// # Errors
/// The journal cannot be read, or there is no such training environment or example.
pub fn buffer(
    output_dir: &Path,
    example: Option<(&str, ExampleIndex)>,
) -> Result<BufferAnswer, InspectError> {
    let core = journal::restore(&journal_of(output_dir)?)?.core;
    let report = core.buffer_report();
    let example = match example {
        None => None,
        Some((environment, example)) => Some(history(&core, &report, environment, example)?),
    };
    Ok(BufferAnswer {
        report,
        next_step: core.next_step(),
        example,
    })
}

fn history(
    core: &Core,
    report: &BufferReport,
    environment: &str,
    example: ExampleIndex,
) -> Result<ExampleHistory, InspectError> {
    let mut environments = report.environments.iter();
    let Some(known) = environments.find(|known| known.name == environment) else {
        return Err(unknown_environment(environment, report));
    };
    let history = core.example_history(known.environment, example);
    history.ok_or_else(|| InspectError::Unknown {
        what: "example",
        number: u64::from(example.0),
        known: format!(
            "environment {environment:?} has examples 0 to {}",
            known.examples.saturating_sub(1)
        ),
    })
}

fn unknown_environment(name: &str, report: &BufferReport) -> InspectError {
    let environments = report.environments.iter();
    let names: Vec<&str> = environments.map(|known| known.name.as_str()).collect();
    InspectError::UnknownEnvironment {
        name: name.to_owned(),
        known: match names.is_empty() {
            true => "none has listed its examples yet".to_owned(),
            false => names.join(", "),
        },
    }
}
