//! The orchestrator's part of a trainer's checkpoint: the state to which the run goes back together with the trainer.
//!
//! ```text
//! <output_dir>/checkpoints/step_<k>/orchestrator/step_<j>/rank_<r>.msgpack    batches that were cut already, j > k
//!                                                <events>.snapshot            the core, when the trainer told of it
//! ```
//! The trainer creates the folder, empty, with its own part, and deletes it as a whole. If it does not exist, the
//! trainer's checkpoints are on another machine, or that one was already deleted: nothing is kept then. The snapshot is
//! written last, so a folder with a snapshot is complete.

use crate::journal::{self, Identity, Snapshot};
use crate::spool::Spool;
use primerl_core::{Core, Step};
use primerl_service::files::{WriteError, sync_folder};
use std::io;
use std::path::{Path, PathBuf};

/// A state that is being written.
const WRITING: &str = "run/state_of_checkpoint";

#[derive(Debug)]
pub struct State {
    step: Step,
    folder: PathBuf,
    writing: PathBuf,
}

impl State {
    pub fn new(output_dir: &Path, step: Step) -> State {
        State {
            step,
            folder: output_dir.join(format!("checkpoints/step_{step}/orchestrator")),
            writing: output_dir.join(WRITING),
        }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The core after `number` events, and its batches that are in the spool.
    pub fn keep(
        &self,
        spool: &Spool,
        number: u64,
        identity: &Identity,
        core: &Core,
    ) -> Result<(), WriteError> {
        if !self.folder.is_dir() {
            return Ok(());
        }
        self.write(spool, number, identity, core)?;
        match self.settle() {
            // It was deleted meanwhile.
            Err(_) if !self.folder.is_dir() => Ok(()),
            settled => settled.map_err(|source| self.failed(source)),
        }
    }

    fn write(
        &self,
        spool: &Spool,
        number: u64,
        identity: &Identity,
        core: &Core,
    ) -> Result<(), WriteError> {
        remove_all(&self.writing).map_err(|source| self.failed(source))?;
        for step in (self.step.0 + 1..core.next_step().0).map(Step) {
            let linked = spool.link(step, &self.writing);
            linked.map_err(|source| self.failed(source))?;
        }
        journal::write_snapshot(&self.writing, number, identity, core)
    }

    /// The snapshot comes last. It is renamed, not written in place: a folder that is being deleted must not be created
    /// again.
    fn settle(&self) -> io::Result<()> {
        let mut entries = std::fs::read_dir(&self.writing)?.collect::<io::Result<Vec<_>>>()?;
        entries.sort_by_key(|entry| entry.path().is_file());
        for entry in entries {
            let target = self.folder.join(entry.file_name());
            remove_all(&target)?;
            std::fs::rename(entry.path(), target)?;
            sync_folder(&self.folder)?;
        }
        Ok(())
    }

    /// The kept state.
    ///
    /// # Errors
    /// There is none, or it cannot be read: why, for people.
    pub fn read(&self) -> Result<Snapshot, String> {
        if !self.folder.is_dir() {
            return Err("it was saved by an earlier version of primerl".into());
        }
        if !journal::exists(&self.folder) {
            return Err("the orchestrator did not come to write it before it ended".into());
        }
        journal::newest_snapshot(&self.folder)
            .map(|(snapshot, _)| snapshot)
            .map_err(|error| error.to_string())
    }

    fn failed(&self, source: io::Error) -> WriteError {
        WriteError::new(&self.folder, source)
    }
}

/// Removes a file, or a folder with all that is in it. One that does not exist is no error.
pub fn remove_all(path: &Path) -> io::Result<()> {
    let removed = match path.is_dir() {
        true => std::fs::remove_dir_all(path),
        false => std::fs::remove_file(path),
    };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
