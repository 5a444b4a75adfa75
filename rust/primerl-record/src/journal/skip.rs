//! Skips an event that cannot be played back: it would be refused at every start. Its record is replaced by a tick,
//! which changes nothing, so that all others keep their numbers; a copy of the original segment is kept next to it.

use super::reader::{ReadError, Segment};
use super::{HEADER, SEGMENT, files, header, newest};
use primerl_core::{Event, Time};
use primerl_service::files::{WriteError, link_or_copy, write_whole};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SkipError {
    #[error("--skip-event: {folder} holds no event {number}")]
    NotThere { folder: PathBuf, number: u64 },
    #[error("--skip-event: {0}")]
    Read(#[from] ReadError),
    #[error("--skip-event: {}: {}", .0, .0.source)]
    Write(WriteError),
}

/// What became of an event that was to be skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Skipped {
    /// A snapshot covers it: it is not played back anyway.
    Covered,
    /// Where its record was, and the copy of the original file.
    LeftOut {
        path: PathBuf,
        offset: u64,
        copy: PathBuf,
    },
}

/// Where a record is in its segment, including its header, bytes.
struct Record {
    path: PathBuf,
    offset: u64,
    length: usize,
}

/// Skips event `number` of the journal in `folder`, to which no one else may write.
///
/// # Errors
/// It is not there, or the journal cannot be read or written. Nothing has changed then.
pub fn skip(folder: &Path, number: u64) -> Result<Skipped, SkipError> {
    let unreadable = |source| ReadError::Io {
        path: folder.to_owned(),
        source,
    };
    if number <= newest(folder).map_err(unreadable)? {
        return Ok(Skipped::Covered);
    }
    let record = find(folder, number)?.ok_or_else(|| SkipError::NotThere {
        folder: folder.to_owned(),
        number,
    })?;
    let copy = keep_copy(&record.path, number)?;
    replace_by_tick(&record)?;
    Ok(Skipped::LeftOut {
        path: record.path,
        offset: record.offset,
        copy,
    })
}

fn failed(path: &Path, source: std::io::Error) -> SkipError {
    SkipError::Write(WriteError::new(path, source))
}

/// Keeps the file as it is, next to it.
fn keep_copy(path: &Path, number: u64) -> Result<PathBuf, SkipError> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".before_skip_{number}"));
    let copy = path.with_file_name(name);
    link_or_copy(path, &copy).map_err(|source| failed(&copy, source))?;
    Ok(copy)
}

fn replace_by_tick(record: &Record) -> Result<(), SkipError> {
    let failed = |source| failed(&record.path, source);
    let mut bytes = std::fs::read(&record.path).map_err(failed)?;
    let begin = record.offset as usize;
    bytes.splice(begin..begin + record.length, tick().map_err(failed)?);
    write_whole(&record.path, &bytes).map_err(SkipError::Write)
}

/// A record of an event that changes nothing. Its time is 0, and the core's time never goes back.
fn tick() -> std::io::Result<Vec<u8>> {
    let body = rmp_serde::to_vec_named(&(Time(0), Event::Tick)).map_err(std::io::Error::other)?;
    let mut record = header(&body).to_vec();
    record.extend(body);
    Ok(record)
}

fn find(folder: &Path, number: u64) -> Result<Option<Record>, ReadError> {
    let segments = files(folder, SEGMENT).map_err(|source| ReadError::Io {
        path: folder.to_owned(),
        source,
    })?;
    let Some((first, path)) = segments.into_iter().rfind(|(first, _)| *first < number) else {
        return Ok(None);
    };
    let mut segment = Segment::open(path.clone(), Vec::new())?;
    let mut at = first;
    while let Some((offset, body)) = segment.next_written()? {
        at += 1;
        if at == number {
            let length = HEADER + body.len();
            return Ok(Some(Record {
                path,
                offset,
                length,
            }));
        }
    }
    Ok(None)
}

/// The record of event `number`: its file, and the bytes before it.
pub(super) fn place_of(folder: &Path, number: u64) -> Result<Option<(PathBuf, u64)>, ReadError> {
    Ok(find(folder, number)?.map(|record| (record.path, record.offset)))
}

/// The number of the event whose record begins at a byte of a segment.
pub(super) fn number_at(path: &Path, offset: u64) -> Option<u64> {
    let mut number: u64 = path.file_stem()?.to_str()?.parse().ok()?;
    let mut segment = Segment::open(path.to_owned(), Vec::new()).ok()?;
    while let Ok(Some((begin, _))) = segment.next_written() {
        number += 1;
        if begin == offset {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests;
