//! Files in the output folder that are not of this run's journal: a journal that lost its last events, or all of them,
//! leaves batches and lines of steps that it does not know. They are moved, not deleted: if the run used them, they
//! would be trained again, or be in the place of those that it is about to write.

use crate::failure::RunError;
use crate::going_back::set_lines_aside;
use primerl_core::Core;
use primerl_record::spool::Spool;
use serde_json::Value;
use std::path::Path;

/// Batches go to `replaced_spool`, lines to `replaced_steps.jsonl` and `replaced_evals.jsonl`. `core`: as the journal
/// left it.
///
/// # Errors
/// The folder cannot be read or changed.
pub(crate) fn set_aside(output_dir: &Path, core: &Core) -> Result<(), RunError> {
    let next = core.next_step();
    let spool = Spool::new(output_dir, core.config().run.data_ranks);
    for step in spool.steps_from(next)? {
        let place = spool.set_aside(step)?;
        tracing::warn!(
            "spool/step_{step} does not belong to this journal, whose next step is {next}: it was moved to {}",
            place.display()
        );
    }
    lines(output_dir, "steps.jsonl", &|line| {
        line["step"].as_u64().is_some_and(|step| step >= next.0)
    })?;
    // Nothing is measured before weights are published, except other models.
    if let Some(published) = core.published_version() {
        lines(output_dir, "evals.jsonl", &|line| {
            let version = line["version"].as_u64();
            version.is_some_and(|version| version > published.0)
        })?;
    }
    Ok(())
}

fn lines(output_dir: &Path, name: &str, goes: &dyn Fn(&Value) -> bool) -> Result<(), RunError> {
    let moved =
        set_lines_aside(output_dir, name, goes).map_err(|source| RunError::OutputFolder {
            path: output_dir.join(name),
            source,
        })?;
    if moved > 0 {
        tracing::warn!(
            "{name}: {moved} lines are of steps that the journal does not know: they were moved to replaced_{name}"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests;
