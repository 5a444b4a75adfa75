//! The reading half: every whole record, in order. A record that a crash cut short ends the journal; a damaged one, or a
//! segment that is missing, is an error. [`super::ahead`] has it done on a thread of its own.

use super::{HEADER, MAGIC, SEGMENT, files, header};
use primerl_core::{Event, Time};
use serde::Deserialize;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    #[error("cannot read {path}: {source}")]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{path}: the record at byte {offset} does not match its checksum: the file was damaged; restore it from a copy, \
         or begin a new run"
    )]
    Checksum { path: PathBuf, offset: usize },
    #[error(
        "{path}: the record at byte {offset} is cut short, but it is not the last one: the file was damaged"
    )]
    Cut { path: PathBuf, offset: usize },
    #[error("{path}: the record at byte {offset} is no event of this version: {source}")]
    Decode {
        path: PathBuf,
        offset: usize,
        source: rmp_serde::decode::Error,
    },
    #[error(
        "{path} was not written by this version of primerl; begin a new run, or use the version that wrote it"
    )]
    Format { path: PathBuf },
    #[error(
        "{path} begins after event {found}, event {expected} should be next: a file of the journal is missing"
    )]
    Gap {
        path: PathBuf,
        found: u64,
        expected: u64,
    },
    #[error(
        "{folder}: the events end after number {found}, and a snapshot covers {expected}: the last of the journal's files \
         is missing or was cut; restore it from a copy, or begin a new run in another output_dir"
    )]
    Short {
        folder: PathBuf,
        found: u64,
        expected: u64,
    },
}

#[derive(Clone, Debug, Deserialize)]
pub struct Entry(pub Time, pub Event);

/// Where a journal ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tail {
    /// Events in it, from the first of the run on.
    pub events: u64,
    /// The last segment and how much of it is whole; `None` where there is no segment.
    pub segment: Option<(PathBuf, u64)>,
    /// What follows in it, bytes: a record that a crash cut short.
    pub torn: u64,
}

/// Every whole record after the first `after`, decoded and given to `take`, in order, for as long as that says `true`.
///
/// # Errors
/// A file cannot be read, is damaged, or is missing; what comes before was given to `take`.
pub(super) fn decode_from(
    folder: &Path,
    after: u64,
    mut take: impl FnMut(Entry) -> bool,
) -> Result<Tail, ReadError> {
    let mut segments = files(folder, SEGMENT).map_err(|source| ReadError::Io {
        path: folder.to_owned(),
        source,
    })?;
    while segments.get(1).is_some_and(|(first, _)| *first <= after) {
        segments.remove(0);
    }
    let mut tail = Tail {
        events: after,
        ..Tail::default()
    };
    let mut expected = segments.first().map_or(0, |(first, _)| (*first).min(after));
    let last = segments.len().saturating_sub(1);
    let mut memory = Vec::new();
    for (index, (found, path)) in segments.into_iter().enumerate() {
        if found != expected {
            return Err(ReadError::Gap {
                path,
                found,
                expected,
            });
        }
        let segment = Segment::read(path, memory)?;
        let mut offset = MAGIC.len();
        while let Some(body) = segment.record_at(offset, index == last)? {
            expected += 1;
            if expected > after && !take(segment.decode(offset, body)?) {
                return Ok(tail);
            }
            offset += HEADER + body.len();
        }
        let length = segment.bytes.len();
        let whole = offset.min(length);
        tail.torn = (length - whole) as u64;
        tail.segment = Some((segment.path, whole as u64));
        memory = segment.bytes;
    }
    if expected < after {
        return Err(ReadError::Short {
            folder: folder.to_owned(),
            found: expected,
            expected: after,
        });
    }
    tail.events = expected;
    Ok(tail)
}

struct Segment {
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Segment {
    /// Into the memory of the segment before: to be given fresh memory takes longer than to read.
    fn read(path: PathBuf, memory: Vec<u8>) -> Result<Segment, ReadError> {
        let mut bytes = memory;
        bytes.clear();
        let read = File::open(&path).and_then(|mut file| {
            let length = file.metadata()?.len();
            bytes.reserve(usize::try_from(length).unwrap_or(0));
            file.read_to_end(&mut bytes)
        });
        match read {
            Err(source) => Err(ReadError::Io { path, source }),
            // A crash may leave a segment that was made and not begun.
            Ok(_) if bytes.starts_with(&MAGIC) || MAGIC.starts_with(&bytes) => {
                Ok(Segment { path, bytes })
            }
            Ok(_) => Err(ReadError::Format { path }),
        }
    }

    /// The body of the record at `offset`; `None` at the end, or at a torn tail where there may be one.
    fn record_at(&self, offset: usize, may_be_torn: bool) -> Result<Option<&[u8]>, ReadError> {
        let rest = self.bytes.get(offset..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(None);
        }
        match parse(rest) {
            Record::Whole(body) => Ok(Some(body)),
            Record::Cut if may_be_torn => Ok(None),
            Record::Cut => Err(ReadError::Cut {
                path: self.path.clone(),
                offset,
            }),
            // A power loss can leave a file longer than what was written to it.
            Record::Damaged if may_be_torn && rest.iter().all(|byte| *byte == 0) => Ok(None),
            Record::Damaged => Err(ReadError::Checksum {
                path: self.path.clone(),
                offset,
            }),
        }
    }

    fn decode(&self, offset: usize, body: &[u8]) -> Result<Entry, ReadError> {
        rmp_serde::from_slice(body).map_err(|source| ReadError::Decode {
            path: self.path.clone(),
            offset,
            source,
        })
    }
}

/// What some bytes begin with.
enum Record<'a> {
    Whole(&'a [u8]),
    /// They end before it does.
    Cut,
    Damaged,
}

fn parse(bytes: &[u8]) -> Record<'_> {
    let Some((expected, rest)) = bytes.split_at_checked(HEADER) else {
        return Record::Cut;
    };
    let (length, of_length) = (&expected[..4], &expected[4..8]);
    if crc32fast::hash(length).to_le_bytes() != of_length {
        return Record::Damaged;
    }
    let length = length
        .iter()
        .rev()
        .fold(0, |sum, byte| (sum << 8) | usize::from(*byte));
    match rest.get(..length) {
        None => Record::Cut,
        Some([]) => Record::Damaged,
        Some(body) if header(body) != expected => Record::Damaged,
        Some(body) => Record::Whole(body),
    }
}

#[cfg(test)]
mod tests;
