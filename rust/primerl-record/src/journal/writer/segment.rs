//! A segment that is being written.

use super::JournalError;
use crate::journal::{MAGIC, SEGMENT, path_of};
use primerl_service::files::room;
use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A segment is closed when it reaches this size.
const SEGMENT_BYTES: u64 = 64 << 20;

pub(super) struct Segment {
    folder: PathBuf,
    pub(super) path: PathBuf,
    file: File,
    bytes: u64,
}

impl Segment {
    pub(super) fn create(folder: &Path, first: u64) -> Result<Segment, JournalError> {
        let path = path_of(folder, first, SEGMENT);
        let create = || {
            let mut file = File::options().create_new(true).append(true).open(&path)?;
            file.write_all(&MAGIC)?;
            File::open(folder)?.sync_all()?;
            Ok(file)
        };
        let file = create().map_err(|error| failed(&path, error))?;
        Ok(Segment {
            folder: folder.to_owned(),
            path,
            file,
            bytes: MAGIC.len() as u64,
        })
    }

    /// Only its first `whole` bytes count.
    pub(super) fn reopen(folder: &Path, path: &Path, whole: u64) -> Result<Segment, JournalError> {
        let open = || {
            let mut file = File::options().append(true).open(path)?;
            file.set_len(whole)?;
            if whole < MAGIC.len() as u64 {
                file.set_len(0)?;
                file.write_all(&MAGIC)?;
            }
            file.sync_all()?;
            Ok(file)
        };
        let file = open().map_err(|error| failed(path, error))?;
        Ok(Segment {
            folder: folder.to_owned(),
            path: path.to_owned(),
            file,
            bytes: whole.max(MAGIC.len() as u64),
        })
    }

    /// Writes the records that come after the first `written` events, in the pieces in which they arrived.
    pub(super) fn append(&mut self, written: u64, records: &[Vec<u8>]) -> Result<(), JournalError> {
        let bytes: usize = records.iter().map(Vec::len).sum();
        if self.bytes >= SEGMENT_BYTES && bytes > 0 {
            self.end(written)?;
        }
        self.bytes += bytes as u64;
        // The pieces are not joined first: if the disk is slow, that would be megabytes of fresh memory.
        let mut pieces = records.iter().filter(|piece| !piece.is_empty());
        pieces
            .try_for_each(|piece| self.file.write_all(piece))
            .map_err(|error| self.failed(room::named(&self.path, bytes as u64, error)))
    }

    pub(super) fn sync(&self) -> Result<(), JournalError> {
        self.file.sync_data().map_err(|error| self.failed(error))
    }

    /// The next one begins after the first `written` events.
    pub(super) fn end(&mut self, written: u64) -> Result<(), JournalError> {
        self.sync()?;
        if self.bytes > MAGIC.len() as u64 {
            *self = Segment::create(&self.folder, written)?;
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> JournalError {
        failed(&self.path, source)
    }
}

pub(super) fn failed(path: &Path, source: io::Error) -> JournalError {
    JournalError::Io {
        path: path.to_owned(),
        source: Arc::new(room::named(path, 0, source)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = path_of(folder.path(), 7, SEGMENT);
        let full = File::options().write(true).open("/dev/full");
        let mut segment = Segment {
            folder: folder.path().to_owned(),
            path: path.clone(),
            file: full.expect("opens"),
            bytes: 0,
        };
        let error = segment.append(0, &[vec![0; 1000]]).expect_err("is full");
        let told = error.to_string();
        assert!(told.starts_with(&format!(
            "cannot write the journal {}: the disk mounted at /",
            path.display()
        )));
        let needs = format!(
            "{} needs at least 1000 bytes: make room on it",
            path.display()
        );
        assert!(told.ends_with(&needs), "{told}");
    }
}
