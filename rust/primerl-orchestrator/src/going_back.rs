//! A run goes back to a checkpoint of its trainer: it returns to the state it had when that checkpoint was written.
//! What it did after that is set aside.
//!
//! ```text
//! journal.going_back/     put together: what came before, the checkpoint's snapshot, GONE_BACK
//! journal/             -> replaced_journal/
//! journal.going_back/  -> journal/
//! checkpoints/, weights/  later steps are renamed to replaced_step_<j>
//! spool, steps.jsonl, evals.jsonl become what that journal says; then GONE_BACK is removed
//! ```
//! A process that is killed leaves the run as it was, or gone back: the next start completes what was begun
//! ([`complete`]).

use crate::changed::same_run;
use crate::failure::RunError;
use primerl_core::Step;
use primerl_record::journal::{self, Identity, Snapshot};
use primerl_record::kept_state::{State, remove_all};
use primerl_record::spool::Spool;
use primerl_service::files::{self, sync_folder, whole_lines, write_whole};
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

/// Is in the journal of a run that has gone back, until everything else has, too.
const GONE_BACK: &str = "gone_back.json";

#[derive(Debug, Deserialize, Serialize)]
struct GoneBack {
    /// Step of the checkpoint.
    step: Step,
    /// The last step that was cut by then.
    cut: Step,
    ranks: u32,
}

struct Places<'a> {
    output_dir: &'a Path,
    journal: PathBuf,
    building: PathBuf,
    replaced: PathBuf,
}

impl<'a> Places<'a> {
    fn of(output_dir: &'a Path) -> Places<'a> {
        Places {
            output_dir,
            journal: output_dir.join("journal"),
            building: output_dir.join("journal.going_back"),
            replaced: output_dir.join("replaced_journal"),
        }
    }

    fn failed(&self, source: io::Error) -> RunError {
        RunError::OutputFolder {
            path: self.output_dir.to_owned(),
            source,
        }
    }
}

/// Returns the run in `output_dir`, which no other process may use, to its state at the checkpoint of `step`.
///
/// # Errors
/// The checkpoint has no orchestrator state, or is of a run with another config: nothing has changed. Or the folder
/// cannot be written.
pub(crate) fn go_back(output_dir: &Path, step: Step, identity: &Identity) -> Result<(), RunError> {
    let places = Places::of(output_dir);
    let state = State::new(output_dir, step);
    let snapshot = fitting(&places, &state, step, identity)?;
    let gone_back = GoneBack {
        step,
        cut: Step(snapshot.core.next_step().0 - 1),
        ranks: snapshot.core.config().run.data_ranks,
    };
    build(&places, &state, snapshot.number, &gone_back).map_err(|source| places.failed(source))?;
    journal::begin_segment(&places.building, snapshot.number).map_err(RunError::Journal)?;
    swap(&places).map_err(|source| places.failed(source))?;
    complete(output_dir)?;
    tracing::info!(%step, "gone back to the checkpoint of this step; what came after it is in replaced_journal");
    Ok(())
}

/// Whether [`go_back`] would go back. Writes nothing.
///
/// # Errors
/// The checkpoint has no orchestrator state, or is of a run with another config.
pub(crate) fn check(output_dir: &Path, step: Step, identity: &Identity) -> Result<(), RunError> {
    let state = State::new(output_dir, step);
    fitting(&Places::of(output_dir), &state, step, identity).map(drop)
}

fn fitting(
    places: &Places<'_>,
    state: &State,
    step: Step,
    identity: &Identity,
) -> Result<Snapshot, RunError> {
    let snapshot = state.read().map_err(|why| RunError::NoState {
        step: step.0,
        folder: state.folder().to_owned(),
        why,
    })?;
    same_run(&places.journal, &snapshot.identity, identity)?;
    Ok(snapshot)
}

/// Completes going back, if a process was killed while it did that.
///
/// # Errors
/// The folder cannot be written.
pub(crate) fn complete(output_dir: &Path) -> Result<(), RunError> {
    let places = Places::of(output_dir);
    let moved = match (places.building.exists(), places.journal.exists()) {
        (true, false) => rename(&places.building, &places.journal),
        // It may be incomplete.
        (true, true) => remove_all(&places.building),
        (false, _) => Ok(()),
    };
    moved.map_err(|source| places.failed(source))?;
    let marker = places.journal.join(GONE_BACK);
    let Some(gone_back) = read_marker(&marker).map_err(|source| places.failed(source))? else {
        return Ok(());
    };
    let set_aside = set_later_folders_aside(output_dir, &gone_back);
    set_aside.map_err(|source| places.failed(source))?;
    let state = State::new(output_dir, gone_back.step);
    let spool = Spool::new(output_dir, gone_back.ranks);
    spool.go_back(gone_back.step, gone_back.cut, state.folder())?;
    let set_aside = set_later_lines_aside(output_dir, &gone_back);
    set_aside.map_err(|source| places.failed(source))?;
    let done = std::fs::remove_file(&marker).and_then(|()| sync_folder(&places.journal));
    done.map_err(|source| places.failed(source))
}

/// Where the run goes back to; `None` if it does not, or has done so.
fn read_marker(marker: &Path) -> io::Result<Option<GoneBack>> {
    match std::fs::read(marker) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        read => serde_json::from_slice(&read?)
            .map(Some)
            .map_err(io::Error::other),
    }
}

fn set_later_folders_aside(output_dir: &Path, gone_back: &GoneBack) -> io::Result<()> {
    for name in ["checkpoints", "weights"] {
        set_folders_aside(&output_dir.join(name), gone_back.step)?;
    }
    Ok(())
}

fn set_later_lines_aside(output_dir: &Path, gone_back: &GoneBack) -> io::Result<()> {
    let later = |line: &serde_json::Value, keys: [&str; 2], last: Step| {
        let number = keys.iter().find_map(|key| line[key].as_u64());
        number.is_some_and(|number| number > last.0)
    };
    set_lines_aside(output_dir, "steps.jsonl", &|line| {
        later(line, ["step"; 2], gone_back.cut)
    })?;
    // An evaluation of another model than the policy records which version was newest then.
    let versions = ["version", "policy_at_the_time"];
    set_lines_aside(output_dir, "evals.jsonl", &|line| {
        later(line, versions, gone_back.step)
    })?;
    Ok(())
}

fn build(places: &Places, state: &State, number: u64, gone_back: &GoneBack) -> io::Result<()> {
    remove_all(&places.building)?;
    std::fs::create_dir_all(&places.building)?;
    journal::link_before(&places.journal, number, &places.building)?;
    journal::link_before(state.folder(), number + 1, &places.building)?;
    let content = serde_json::to_vec(gone_back)?;
    write_whole(&places.building.join(GONE_BACK), &content).map_err(|error| error.source)?;
    sync_folder(&places.building)
}

fn swap(places: &Places) -> io::Result<()> {
    remove_all(&places.replaced)?;
    rename(&places.journal, &places.replaced)?;
    rename(&places.building, &places.journal)
}

fn rename(from: &Path, to: &Path) -> io::Result<()> {
    std::fs::rename(from, to)?;
    sync_folder(to.parent().unwrap_or(to))
}

/// Sets aside what the trainer has saved of steps after `step`, so that it resumes from there. The trainer does the
/// same itself.
fn set_folders_aside(folder: &Path, step: Step) -> io::Result<()> {
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries?.collect::<io::Result<Vec<_>>>()?,
    };
    for entry in entries {
        let name = entry.file_name();
        let number = name
            .to_str()
            .and_then(|name| name.strip_prefix("step_")?.parse::<u64>().ok());
        if let Some(later) = number.filter(|number| *number > step.0) {
            let target = folder.join(format!("replaced_step_{later}"));
            remove_all(&target)?;
            rename(&entry.path(), &target)?;
        }
    }
    Ok(())
}

/// Moves lines of a file of JSON lines to the end of `replaced_<name>`. That is written first: a process that was
/// killed in between moves them again. The result is how many.
pub(crate) fn set_lines_aside(
    output_dir: &Path,
    name: &str,
    goes: &dyn Fn(&serde_json::Value) -> bool,
) -> io::Result<usize> {
    let path = output_dir.join(name);
    let (gone, kept): (Vec<String>, Vec<String>) = whole_lines(&path)?
        .into_iter()
        .partition(|line| serde_json::from_str(line).is_ok_and(|value| goes(&value)));
    if gone.is_empty() {
        return Ok(0);
    }
    let moved = gone.len();
    let replaced = output_dir.join(format!("replaced_{name}"));
    let mut all = whole_lines(&replaced)?;
    let new: Vec<String> = gone
        .into_iter()
        .filter(|line| !all.contains(line))
        .collect();
    all.extend(new);
    for (path, lines) in [(&replaced, all), (&path, kept)] {
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        files::write_whole(path, text.as_bytes()).map_err(|error| error.source)?;
    }
    Ok(moved)
}

#[cfg(test)]
mod tests;
