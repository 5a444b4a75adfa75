//! The whole core on disk, and what may be deleted once it is.

use super::{SEGMENT, SNAPSHOT, files, path_of};
use crate::files::{WriteError, write_whole};
use primerl_core::Core;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// Snapshots that are always kept: should the newest be damaged, the run goes on from the one before.
const KEPT: usize = 2;

/// What a run must not change half-way, by dotted name: with another model or other sampling, its journal would be that
/// of another run.
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

/// Write a snapshot, whole or not at all.
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
    let body = rmp_serde::to_vec_named(&written).map_err(|error| WriteError {
        path: path.clone(),
        source: std::io::Error::other(error),
    })?;
    let mut bytes = crc32fast::hash(&body).to_le_bytes().to_vec();
    bytes.extend_from_slice(&body);
    write_whole(&path, &bytes)
}

/// Read a snapshot; the error says what is wrong with the file.
pub(super) fn read(path: &Path) -> Result<Snapshot, String> {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let (checksum, body) = bytes
        .split_at_checked(4)
        .ok_or("it is shorter than its header")?;
    if crc32fast::hash(body).to_le_bytes() != checksum {
        return Err("it does not match its checksum".into());
    }
    rmp_serde::from_slice(body).map_err(|error| format!("it is of another version: {error}"))
}

/// Delete the oldest snapshots, with the events before the next one, while the journal is larger than `bytes`.
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
