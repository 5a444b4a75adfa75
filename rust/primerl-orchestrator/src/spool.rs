//! Cut batches on disk, as the trainer takes them: `<output_dir>/spool/step_<k>/rank_<r>.msgpack`. A batch stays until a
//! checkpoint of the trainer covers it.

use crate::failure::RunError;
use crate::files::{WriteError, write_whole};
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

    /// Delete the batches of steps before this one.
    pub fn forget(&self, before: Step) -> Result<(), WriteError> {
        let step_of = |path: &Path| -> Option<Step> {
            let name = path.file_name()?.to_str()?;
            name.strip_prefix("step_")?.parse().ok().map(Step)
        };
        let failed = |source| WriteError {
            path: self.folder.clone(),
            source,
        };
        for entry in std::fs::read_dir(&self.folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if step_of(&path).is_some_and(|step| step < before) {
                std::fs::remove_dir_all(&path).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn file(&self, step: Step, rank: u32) -> PathBuf {
        self.folder.join(format!("step_{step}/rank_{rank}.msgpack"))
    }
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
