//! The reading half: every whole record, in order. A record that a crash cut short ends the journal; a damaged one, or
//! a segment that is missing, is an error. [`super::ahead`] runs it on a separate thread.

use super::{HEADER, MAGIC, SEGMENT, files, header};
use primerl_core::{Event, Time};
use serde::Deserialize;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Bytes read from a file at a time: they stay in the processor's cache until they are decoded.
const PIECE: u64 = 256 << 10;

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
    Checksum { path: PathBuf, offset: u64 },
    #[error(
        "{path}: the record at byte {offset} is cut short, but it is not the last one: the file was damaged"
    )]
    Cut { path: PathBuf, offset: u64 },
    #[error("{path}: the record at byte {offset} is not an event of this version: {source}")]
    Decode {
        path: PathBuf,
        offset: u64,
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
    /// The last segment and how much of it is whole; `None` if there is no segment.
    pub segment: Option<(PathBuf, u64)>,
    /// Bytes after the whole part: a record that a crash cut short.
    pub torn: u64,
}

/// Files of one kind with the numbers in their names, in order.
pub(super) fn listed(folder: &Path, extension: &str) -> Result<Vec<(u64, PathBuf)>, ReadError> {
    files(folder, extension).map_err(|source| ReadError::Io {
        path: folder.to_owned(),
        source,
    })
}

/// Reads every whole record after the first `after`, decodes it and gives it to `take`, in order, while `take` returns
/// `true`.
///
/// # Errors
/// A file cannot be read, is damaged, or is missing; what comes before was given to `take`.
pub(super) fn decode_from(
    folder: &Path,
    after: u64,
    mut take: impl FnMut(Entry) -> bool,
) -> Result<Tail, ReadError> {
    let mut segments = listed(folder, SEGMENT)?;
    while segments.get(1).is_some_and(|(first, _)| *first <= after) {
        segments.remove(0);
    }
    let mut tail = Tail {
        events: after,
        ..Tail::default()
    };
    let mut expected = segments.first().map_or(0, |(first, _)| (*first).min(after));
    let last = segments.len().saturating_sub(1);
    let mut window = Vec::new();
    for (index, (found, path)) in segments.into_iter().enumerate() {
        if found != expected {
            return Err(ReadError::Gap {
                path,
                found,
                expected,
            });
        }
        let mut segment = Segment::open(path, window)?;
        while let Some(body) = segment.next_record(index == last)? {
            expected += 1;
            if expected > after && !take(segment.decode(body)?) {
                return Ok(tail);
            }
        }
        tail.torn = (segment.window.len() - segment.begin) as u64;
        let whole = segment.offset_of(segment.begin);
        tail.segment = Some((segment.path, whole));
        window = segment.window;
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

/// A segment, of which a small window is in memory: a reader that stops to read a whole segment leaves the code that
/// handles its events with nothing to do.
pub(super) struct Segment {
    path: PathBuf,
    file: File,
    window: Vec<u8>,
    /// Where in the window the remaining records begin.
    begin: usize,
    /// Bytes of the file before the window.
    before: u64,
    /// Whether the window reaches the end of the file.
    ended: bool,
}

impl Segment {
    /// Reuses the memory of the previous segment's window.
    pub(super) fn open(path: PathBuf, mut window: Vec<u8>) -> Result<Segment, ReadError> {
        window.clear();
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(source) => return Err(ReadError::Io { path, source }),
        };
        let mut segment = Segment {
            path,
            file,
            window,
            begin: 0,
            before: 0,
            ended: false,
        };
        segment.read_on()?;
        let window = &segment.window;
        // A crash may leave a segment that was created and is empty.
        if !(window.starts_with(&MAGIC) || MAGIC.starts_with(window)) {
            return Err(ReadError::Format { path: segment.path });
        }
        segment.begin = MAGIC.len().min(window.len());
        Ok(segment)
    }

    /// Seeks to the record that begins at this byte, which was seen there before.
    pub(super) fn open_at(path: PathBuf, offset: u64) -> Result<Segment, ReadError> {
        let opened = File::open(&path).and_then(|mut file| {
            file.seek(SeekFrom::Start(offset))?;
            Ok(file)
        });
        match opened {
            Err(source) => Err(ReadError::Io { path, source }),
            Ok(file) => Ok(Segment {
                path,
                file,
                window: Vec::new(),
                begin: 0,
                before: offset,
                ended: false,
            }),
        }
    }

    /// The next record of a file that may grow: where it begins in the file, and where its body is in the window.
    pub(super) fn next_written(&mut self) -> Result<Option<(u64, Range<usize>)>, ReadError> {
        self.ended = false;
        let body = self.next_record(true)?;
        Ok(body.map(|body| (self.offset_of(body.start - HEADER), body)))
    }

    fn offset_of(&self, place: usize) -> u64 {
        self.before + place as u64
    }

    /// Moves the window on by a piece of the file.
    fn read_on(&mut self) -> Result<(), ReadError> {
        self.window.drain(..self.begin);
        self.before += std::mem::take(&mut self.begin) as u64;
        let piece = (&self.file).take(PIECE).read_to_end(&mut self.window);
        let count = piece.map_err(|source| ReadError::Io {
            path: self.path.clone(),
            source,
        })?;
        self.ended = count == 0;
        Ok(())
    }

    /// Where in the window the body of the next record is; `None` at the end, or at a record that was cut short, if one
    /// is possible here.
    pub(super) fn next_record(
        &mut self,
        may_be_torn: bool,
    ) -> Result<Option<Range<usize>>, ReadError> {
        loop {
            match parse(&self.window[self.begin..]) {
                Record::Whole { length } => {
                    let body = self.begin + HEADER..self.begin + HEADER + length;
                    self.begin = body.end;
                    return Ok(Some(body));
                }
                Record::Cut if !self.ended => self.read_on()?,
                Record::Cut if self.begin == self.window.len() || may_be_torn => return Ok(None),
                Record::Cut => return Err(self.cut()),
                // A power loss can leave a file longer than the written bytes.
                Record::Damaged if may_be_torn && self.is_zero_from_here()? => return Ok(None),
                Record::Damaged => return Err(self.damaged()),
            }
        }
    }

    fn cut(&self) -> ReadError {
        ReadError::Cut {
            path: self.path.clone(),
            offset: self.offset_of(self.begin),
        }
    }

    fn damaged(&self) -> ReadError {
        ReadError::Checksum {
            path: self.path.clone(),
            offset: self.offset_of(self.begin),
        }
    }

    fn is_zero_from_here(&mut self) -> Result<bool, ReadError> {
        while !self.ended {
            self.read_on()?;
        }
        Ok(self.window[self.begin..].iter().all(|byte| *byte == 0))
    }

    pub(super) fn decode(&self, body: Range<usize>) -> Result<Entry, ReadError> {
        rmp_serde::from_slice(&self.window[body.clone()]).map_err(|source| ReadError::Decode {
            path: self.path.clone(),
            offset: self.offset_of(body.start - HEADER),
            source,
        })
    }
}

/// What some bytes begin with.
enum Record {
    Whole {
        /// Length of its body.
        length: usize,
    },
    /// The bytes end before it does.
    Cut,
    Damaged,
}

fn parse(bytes: &[u8]) -> Record {
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
        Some(_) => Record::Whole { length },
    }
}

#[cfg(test)]
mod tests;
