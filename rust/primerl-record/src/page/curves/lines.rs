//! Whole lines of a file that grows.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// Bytes read from a file at a time.
const PIECE: u64 = 4 << 20;

/// A file to which lines are added; a file that was replaced is read from its beginning.
#[derive(Debug)]
pub(super) struct Lines {
    path: PathBuf,
    inode: u64,
    /// Read up to here, which is the end of a line.
    offset: u64,
    /// How many lines these are.
    count: usize,
    /// More follows than whole lines.
    pub(super) is_cut: bool,
}

impl Lines {
    pub(super) fn new(path: PathBuf) -> Lines {
        Lines {
            path,
            inode: 0,
            offset: 0,
            count: 0,
            is_cut: false,
        }
    }

    /// Whether the file is another one, or was cut: it is read from its beginning then.
    pub(super) fn is_another(&mut self) -> io::Result<bool> {
        let (inode, length) = match std::fs::metadata(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => (0, 0),
            metadata => {
                let metadata = metadata?;
                (metadata.ino(), metadata.len())
            }
        };
        let is_another = (inode, true) != (self.inode, length >= self.offset);
        if is_another {
            (self.inode, self.offset, self.count) = (inode, 0, 0);
        }
        Ok(is_another)
    }

    /// Every whole line that was added, and its number, from 1.
    pub(super) fn read_on(&mut self, mut take: impl FnMut(usize, &[u8])) -> io::Result<()> {
        self.is_cut = false;
        let mut file = match File::open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            file => file?,
        };
        file.seek(SeekFrom::Start(self.offset))?;
        let mut rest = Vec::new();
        loop {
            let count = (&file).take(PIECE).read_to_end(&mut rest)?;
            let whole = rest.iter().rposition(|byte| *byte == b'\n');
            if let Some(whole) = whole {
                for line in rest[..whole].split(|byte| *byte == b'\n') {
                    self.count += 1;
                    take(self.count, line);
                }
                self.offset += whole as u64 + 1;
                rest.drain(..=whole);
            }
            if count == 0 {
                self.is_cut = !rest.is_empty();
                return Ok(());
            }
        }
    }
}
