//! Cut batches on disk, as the trainer takes them: `<output_dir>/spool/step_<k>/rank_<r>.msgpack`. A batch stays until a
//! checkpoint of the trainer covers it.

use crate::failure::RunError;
use crate::files::{WriteError, link_or_copy, write_whole};
use bytes::Bytes;
use primerl_core::Step;
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(crate) struct Spool {
    folder: PathBuf,
    ranks: u32,
}

impl Spool {
    pub fn new(output_dir: &Path, ranks: u32) -> Spool {
        Spool {
            folder: output_dir.join("spool"),
            ranks,
        }
    }

    /// Whether the whole batch is there.
    pub fn has(&self, step: Step) -> bool {
        (0..self.ranks).all(|rank| self.file(step, rank).is_file())
    }

    /// One body a rank.
    pub fn write(&self, step: Step, bodies: &[Bytes]) -> Result<(), WriteError> {
        for (rank, body) in bodies.iter().enumerate() {
            write_whole(&self.file(step, rank as u32), body)?;
        }
        Ok(())
    }

    pub fn read(&self, step: Step, rank: u32) -> Result<Bytes, RunError> {
        let path = self.file(step, rank);
        std::fs::read(&path)
            .map(Bytes::from)
            .map_err(|source| RunError::Spool { path, source })
    }

    /// Bytes of what [`Spool::read`] reads; `None` where there is nothing to read.
    pub fn size(&self, step: Step, rank: u32) -> Option<u64> {
        let found = std::fs::metadata(self.file(step, rank)).ok()?;
        found.is_file().then_some(found.len())
    }

    /// The batch of `step` in `folder`, which has the spool's layout then; the same files where the disk allows it.
    pub fn link(&self, step: Step, folder: &Path) -> std::io::Result<()> {
        link_all(&self.of_step(step), &folder.join(format!("step_{step}")))
    }

    /// Make the spool have the batches of steps after `after` and up to `cut`, those it lacks out of `folder`, and none
    /// of later steps.
    pub fn go_back(&self, after: Step, cut: Step, folder: &Path) -> Result<(), WriteError> {
        let failed = |source| WriteError {
            path: self.folder.clone(),
            source,
        };
        self.remove(|step| step > cut)?;
        for step in (after.0 + 1..=cut.0).map(Step) {
            if !self.has(step) {
                let kept = folder.join(format!("step_{step}"));
                link_all(&kept, &self.of_step(step)).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Delete the batches of steps before this one.
    pub fn forget(&self, before: Step) -> Result<(), WriteError> {
        self.remove(|step| step < before)
    }

    fn remove(&self, goes: impl Fn(Step) -> bool) -> Result<(), WriteError> {
        let step_of = |path: &Path| -> Option<Step> {
            let name = path.file_name()?.to_str()?;
            name.strip_prefix("step_")?.parse().ok().map(Step)
        };
        let failed = |source| WriteError {
            path: self.folder.clone(),
            source,
        };
        let entries = match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
            entries => entries.map_err(failed)?,
        };
        for entry in entries {
            let path = entry.map_err(failed)?.path();
            if step_of(&path).is_some_and(&goes) {
                std::fs::remove_dir_all(&path).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn of_step(&self, step: Step) -> PathBuf {
        self.folder.join(format!("step_{step}"))
    }

    fn file(&self, step: Step, rank: u32) -> PathBuf {
        self.of_step(step).join(format!("rank_{rank}.msgpack"))
    }
}

/// Files of a folder, linked into another one, which is made.
fn link_all(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let file = entry?;
        link_or_copy(&file.path(), &to.join(file.file_name()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_kept_until_they_are_covered() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let spool = Spool::new(folder.path(), 2);
        for step in 1..=3 {
            assert!(!spool.has(Step(step)));
            let bodies = [Bytes::from(vec![step as u8]), Bytes::from(vec![0])];
            spool.write(Step(step), &bodies).expect("writes");
            assert!(spool.has(Step(step)));
        }
        spool.forget(Step(3)).expect("deletes");
        assert!(!spool.has(Step(1)) && !spool.has(Step(2)));
        assert_eq!(spool.read(Step(3), 0).expect("is kept"), [3_u8][..]);
        assert_eq!(
            (spool.size(Step(3), 0), spool.size(Step(2), 0)),
            (Some(1), None)
        );
        let gone = spool.read(Step(2), 1).expect_err("is gone").to_string();
        assert!(gone.contains("step_2/rank_1.msgpack"), "{gone}");
    }
}
