//! Snapshots of the whole core on disk, and what may be deleted after one was written.

use super::{SEGMENT, SNAPSHOT, files, path_of};
use primerl_core::Core;
use primerl_service::files::{WriteError, link_or_copy, write_whole_with};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Seek, Write};
use std::path::Path;

/// Snapshots that are always kept: if the newest is damaged, the run resumes from the previous one.
const KEPT: usize = 2;

/// Settings that a run must keep, by dotted name: with another model or other sampling, the journal would be that of
/// another run.
pub type Identity = BTreeMap<String, String>;

/// The core after `number` events.
#[derive(Debug, Deserialize)]
pub struct Snapshot {
    pub number: u64,
    pub identity: Identity,
    pub core: Core,
}

#[derive(Serialize)]
struct Written<'a> {
    number: u64,
    identity: &'a Identity,
    core: &'a Core,
}

/// Writes a snapshot, whole or not at all.
///
/// # Errors
/// The file cannot be written.
pub fn write(
    folder: &Path,
    number: u64,
    identity: &Identity,
    core: &Core,
) -> Result<(), WriteError> {
    let path = path_of(folder, number, SNAPSHOT);
    let written = Written {
        number,
        identity,
        core,
    };
    write_whole_with(&path, |file| {
        // Reserves the checksum's place; it is known at the end.
        file.write_all(&[0; 4])?;
        let mut body = BufWriter::with_capacity(1 << 20, Hashed::new(file));
        rmp_serde::encode::write_named(&mut body, &written).map_err(io::Error::other)?;
        let checksum = body.into_inner()?.checksum.finalize();
        file.rewind()?;
        file.write_all(&checksum.to_le_bytes())
    })
}

/// Computes the checksum of the bytes that pass through.
struct Hashed<'a> {
    file: &'a mut File,
    checksum: crc32fast::Hasher,
}

impl Hashed<'_> {
    fn new(file: &mut File) -> Hashed<'_> {
        Hashed {
            file,
            checksum: crc32fast::Hasher::new(),
        }
    }
}

impl Write for Hashed<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.checksum.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// Reads a snapshot; the error says what is wrong with the file.
pub(super) fn read(path: &Path) -> Result<Snapshot, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let body = checked(&bytes)?;
    rmp_serde::from_slice(body).map_err(|error| format!("it is of another version: {error}"))
}

/// Checks that a snapshot is as it was written, unless it has been deleted; the error says what is wrong with the file.
pub(super) fn check(path: &Path) -> Result<(), String> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error.to_string()),
        Ok(bytes) => Ok(checked(&bytes).map(|_| ())?),
    }
}

fn checked(bytes: &[u8]) -> Result<&[u8], &'static str> {
    let (checksum, body) = bytes
        .split_at_checked(4)
        .ok_or("it is shorter than its header")?;
    match crc32fast::hash(body).to_le_bytes() == checksum {
        true => Ok(body),
        false => Err("it does not match its checksum"),
    }
}

/// Links the existing files of the first `number` events into another folder: a segment has to end at `number`.
///
/// # Errors
/// The folders cannot be read or changed.
pub fn link_before(folder: &Path, number: u64, to: &Path) -> std::io::Result<()> {
    for extension in [SEGMENT, SNAPSHOT] {
        for (first, path) in files(folder, extension)? {
            if first < number {
                link_or_copy(&path, &path_of(to, first, extension))?;
            }
        }
    }
    Ok(())
}

/// Deletes the oldest snapshots, with the events before the next one, while the journal is larger than `bytes`.
///
/// # Errors
/// The folder cannot be read or changed.
pub fn retain(folder: &Path, bytes: u64) -> std::io::Result<()> {
    let size = |path: &Path| std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    let mut snapshots = files(folder, SNAPSHOT)?;
    let mut segments = files(folder, SEGMENT)?;
    let all = || snapshots.iter().chain(&segments);
    let mut total: u64 = all().map(|(_, path)| size(path)).sum();
    while total > bytes && snapshots.len() > KEPT {
        let (_, path) = snapshots.remove(0);
        let needed = snapshots[0].0;
        let mut gone = vec![path];
        // A segment ends where the next begins.
        while segments.len() > 1 && segments[1].0 <= needed {
            gone.push(segments.remove(0).1);
        }
        for path in gone {
            total -= size(&path);
            std::fs::remove_file(&path)?;
        }
    }
    Ok(())
}
