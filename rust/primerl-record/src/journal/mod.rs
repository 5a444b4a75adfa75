//! The journal: every event of the run, in order, on disk before any of its consequences is visible outside; and, from
//! time to time, the whole core, so that a restart need not read everything and old events can be deleted.
//!
//! ```text
//! <output_dir>/journal/000000000000.snapshot    the core after that many events (0: as it was made)
//!                      000000000000.log         events 1, 2, ...: named by the number of events before it
//!                      000000118220.log
//!                      000000120007.snapshot
//! ```
//! A `.log` begins with [`MAGIC`]; then come records of `u32 length, u32 crc32 of the length, u32 crc32 of the body,
//! body`, little-endian, the body msgpack of `(time, event)`. A length has its own checksum: otherwise a damaged length
//! would look like a record that a crash cut short, and everything after it would be dropped. One writer thread: a sync
//! covers every event appended before it (group commit). A restart reads the newest whole snapshot and plays back the
//! events since ([`restore`]).

mod ahead;
mod follow;
mod reader;
mod restore;
mod skip;
mod snapshot;
mod unread;
mod writer;

pub use ahead::read_from;
pub use follow::{Follower, Place, read_at};
pub use reader::{Entry, ReadError, Tail};
pub use restore::{RestoreError, Restored, exists, newest, oldest, restore};
pub use restore::{cut_again, newest_snapshot};
pub use skip::{SkipError, Skipped, skip};
pub use snapshot::{Identity, Snapshot, link_before, retain, write as write_snapshot};
pub use unread::check_unread;
pub use writer::{Journal, JournalError, Progress, begin_segment};

use std::path::{Path, PathBuf};

/// The first bytes of a segment; the last byte is the format's version.
const MAGIC: [u8; 8] = *b"PRIMERL\x05";
/// Bytes before a record's body: its length and the two checksums.
const HEADER: usize = 12;
const SEGMENT: &str = "log";
const SNAPSHOT: &str = "snapshot";

fn header(body: &[u8]) -> [u8; HEADER] {
    let length = (body.len() as u32).to_le_bytes();
    let checksums = [crc32fast::hash(&length), crc32fast::hash(body)];
    let [of_length, of_body] = checksums.map(u32::to_le_bytes);
    let mut header = [0; HEADER];
    for (place, part) in header.chunks_exact_mut(4).zip([length, of_length, of_body]) {
        place.copy_from_slice(&part);
    }
    header
}

fn path_of(folder: &Path, number: u64, extension: &str) -> PathBuf {
    folder.join(format!("{number:012}.{extension}"))
}

/// Files of one kind with the numbers in their names, in order.
fn files(folder: &Path, extension: &str) -> std::io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let number = path
            .file_stem()
            .and_then(|stem| stem.to_str()?.parse().ok());
        if let (Some(number), Some(true)) = (number, path.extension().map(|it| it == extension)) {
            found.push((number, path));
        }
    }
    found.sort();
    Ok(found)
}
