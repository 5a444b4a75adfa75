//! Cut batches on disk, as the trainer takes them: `<output_dir>/spool/step_<k>/rank_<r>.msgpack`. A batch stays until
//! a checkpoint of the trainer covers it. `batches` checks whether a file is the batch that the journal describes.

use bytes::Bytes;
use primerl_core::Step;
use primerl_service::files::{WriteError, link_or_copy, sync_folder, write_whole};
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub struct Spool {
    folder: PathBuf,
    /// Batches that are not of this run's journal are moved here.
    replaced: PathBuf,
    ranks: u32,
}

impl Spool {
    pub fn new(output_dir: &Path, ranks: u32) -> Spool {
        Spool {
            folder: output_dir.join("spool"),
            replaced: output_dir.join("replaced_spool"),
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

    /// The files as they are, unchecked.
    pub fn read(&self, step: Step, rank: u32) -> std::io::Result<Bytes> {
        std::fs::read(self.file(step, rank)).map(Bytes::from)
    }

    /// Moves the batch of `step` to `replaced_spool`, under an unused name; returns where it is then.
    pub fn set_aside(&self, step: Step) -> Result<PathBuf, WriteError> {
        let from = self.of_step(step);
        let names = std::iter::once(format!("step_{step}"))
            .chain((2_u64..).map(|again| format!("step_{step}.{again}")));
        let mut places = names.map(|name| self.replaced.join(name));
        let target = places
            .find(|place| !place.exists())
            .unwrap_or_else(|| self.replaced.clone());
        let moved = std::fs::create_dir_all(&self.replaced)
            .and_then(|()| std::fs::rename(&from, &target))
            .and_then(|()| sync_folder(&self.replaced))
            .and_then(|()| sync_folder(&self.folder));
        match moved {
            Ok(()) => Ok(target),
            Err(source) => Err(WriteError::new(&target, source)),
        }
    }

    /// Steps from `first` on that have files, in order.
    pub fn steps_from(&self, first: Step) -> Result<Vec<Step>, WriteError> {
        let mut steps = self.steps()?;
        steps.retain(|step| *step >= first);
        Ok(steps)
    }

    /// Size of what [`Spool::read`] reads, bytes; `None` if there is nothing to read.
    pub fn size(&self, step: Step, rank: u32) -> Option<u64> {
        let found = std::fs::metadata(self.file(step, rank)).ok()?;
        found.is_file().then_some(found.len())
    }

    /// The batch of `step` in `folder`, which then has the spool's layout; hard links if the disk allows it.
    pub fn link(&self, step: Step, folder: &Path) -> std::io::Result<()> {
        link_all(&self.of_step(step), &folder.join(format!("step_{step}")))
    }

    /// Makes the spool have the batches of steps after `after` and up to `cut`, with missing ones from `folder`, and
    /// none of later steps.
    pub fn go_back(&self, after: Step, cut: Step, folder: &Path) -> Result<(), WriteError> {
        let failed = |source| WriteError::new(&self.folder, source);
        self.remove(|step| step > cut)?;
        for step in (after.0 + 1..=cut.0).map(Step) {
            if !self.has(step) {
                let kept = folder.join(format!("step_{step}"));
                link_all(&kept, &self.of_step(step)).map_err(failed)?;
            }
        }
        Ok(())
    }

    /// Deletes the batches of steps before this one.
    pub fn forget(&self, before: Step) -> Result<(), WriteError> {
        self.remove(|step| step < before)
    }

    fn remove(&self, goes: impl Fn(Step) -> bool) -> Result<(), WriteError> {
        for step in self.steps()?.into_iter().filter(|step| goes(*step)) {
            let path = self.of_step(step);
            std::fs::remove_dir_all(&path).map_err(|source| WriteError::new(&path, source))?;
        }
        Ok(())
    }

    fn steps(&self) -> Result<Vec<Step>, WriteError> {
        let failed = |source| WriteError::new(&self.folder, source);
        let entries = match std::fs::read_dir(&self.folder) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries.map_err(failed)?,
        };
        let mut steps = Vec::new();
        for entry in entries {
            let name = entry.map_err(failed)?.file_name();
            let number = name.to_str().and_then(|name| name.strip_prefix("step_"));
            // Only names that this module writes: `step_07` is from another program.
            let number = number.and_then(|digits| {
                let step: u64 = digits.parse().ok()?;
                (step.to_string() == digits).then_some(Step(step))
            });
            steps.extend(number);
        }
        steps.sort_unstable();
        Ok(steps)
    }

    fn of_step(&self, step: Step) -> PathBuf {
        self.folder.join(format!("step_{step}"))
    }

    pub fn file(&self, step: Step, rank: u32) -> PathBuf {
        self.of_step(step).join(format!("rank_{rank}.msgpack"))
    }
}

/// Links the files of a folder into a new one.
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
        spool.read(Step(2), 1).expect_err("is gone");
    }

    #[test]
    fn what_is_set_aside_is_kept_next_to_earlier_files() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let spool = Spool::new(folder.path(), 1);
        for (byte, name) in [(7, "step_5"), (8, "step_5.2")] {
            spool
                .write(Step(5), &[Bytes::from(vec![byte])])
                .expect("writes");
            assert_eq!(spool.steps_from(Step(5)).expect("reads"), [Step(5)]);
            let place = spool.set_aside(Step(5)).expect("moves");
            assert_eq!(place, folder.path().join("replaced_spool").join(name));
            let kept = std::fs::read(place.join("rank_0.msgpack")).expect("is there");
            assert_eq!(kept, [byte]);
            assert!(spool.steps_from(Step(0)).expect("reads").is_empty());
        }
    }
}
