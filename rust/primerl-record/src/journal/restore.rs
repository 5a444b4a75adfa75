//! Rebuilds the core that a journal describes.

use super::ahead::read_from;
use super::reader::{ReadError, Tail, decode_from, listed};
use super::skip::{number_at, place_of};
use super::snapshot::{self, Identity, Snapshot};
use super::{Entry, SEGMENT, SNAPSHOT, files};
use primerl_core::pack::PackedBatch;
use primerl_core::{Core, Effect, Event, Step, Time};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RestoreError {
    #[error(transparent)]
    Read(#[from] ReadError),
    #[error("{}: no snapshot of the run can be read ({}); the run cannot resume from here: begin a new one in another \
             output_dir", folder.display(), problems.join("; "))]
    NoSnapshot {
        folder: PathBuf,
        problems: Vec<String>,
    },
    #[error(
        "{path}: the record at byte {offset}, event {number} (`{kind}`), cannot be played back: {why}. It would fail at \
         every start: use the version of primerl that wrote it, or skip this event with --skip-event {number} (a copy \
         of the file as it is now is kept next to it)"
    )]
    Refused {
        path: PathBuf,
        offset: u64,
        number: u64,
        kind: &'static str,
        why: String,
    },
}

/// A run as its journal describes it.
pub struct Restored {
    pub core: Core,
    pub identity: Identity,
    pub tail: Tail,
    /// The core's effects while its events were played back, if they are visible on disk; in order.
    pub effects: Vec<Effect>,
    /// What was repaired or skipped, for the log.
    pub remarks: Vec<String>,
}

/// Whether `folder` holds a journal.
pub fn exists(folder: &Path) -> bool {
    files(folder, SNAPSHOT).is_ok_and(|found| !found.is_empty())
        || files(folder, SEGMENT).is_ok_and(|found| !found.is_empty())
}

/// Restores the run in `folder` from its newest whole snapshot, and the events since. Only reads.
///
/// # Errors
/// The journal is damaged where it cannot be repaired, or has an event that cannot be played back.
pub fn restore(folder: &Path) -> Result<Restored, RestoreError> {
    restore_with(folder, Core::handle)
}

/// Like [`restore`]; `handle` plays back one event.
pub(super) fn restore_with(
    folder: &Path,
    handle: impl Fn(&mut Core, Event, Time) -> Vec<Effect>,
) -> Result<Restored, RestoreError> {
    let (snapshot, remarks) = newest_snapshot(folder)?;
    let mut playback = Playback {
        core: snapshot.core,
        effects: Vec::new(),
        failure: None,
    };
    let tail = read_from(folder, snapshot.number, |number, entry| {
        playback.play(number, entry, &handle);
    });
    // The events before one that cannot be read were played back.
    if let Some((number, kind, why)) = playback.failure {
        return Err(refused(folder, number, kind, why)?);
    }
    Ok(Restored {
        core: playback.core,
        identity: snapshot.identity,
        tail: tail.map_err(unreadable)?,
        effects: playback.effects,
        remarks,
    })
}

struct Playback {
    core: Core,
    effects: Vec<Effect>,
    /// Number and kind of the event that could not be played back, and why.
    failure: Option<(u64, &'static str, String)>,
}

impl Playback {
    fn play(
        &mut self,
        number: u64,
        Entry(now, event): Entry,
        handle: impl Fn(&mut Core, Event, Time) -> Vec<Effect>,
    ) {
        if self.failure.is_some() {
            return;
        }
        let kind = event.kind();
        // A core that panicked is not used again.
        let core = &mut self.core;
        match catch_unwind(AssertUnwindSafe(|| handle(core, event, now))) {
            Ok(said) => {
                let durable = said.into_iter().filter(Effect::is_durable);
                self.effects.extend(durable);
            }
            Err(panic) => self.failure = Some((number, kind, words_of(&*panic))),
        }
    }
}

/// An event of another version can be skipped, like one that cannot be played back.
fn unreadable(error: ReadError) -> RestoreError {
    match error {
        ReadError::Decode {
            path,
            offset,
            source,
        } => RestoreError::Refused {
            number: number_at(&path, offset).unwrap_or_default(),
            path,
            offset,
            kind: "unknown",
            why: source.to_string(),
        },
        error => RestoreError::Read(error),
    }
}

fn refused(
    folder: &Path,
    number: u64,
    kind: &'static str,
    why: String,
) -> Result<RestoreError, ReadError> {
    let (path, offset) = place_of(folder, number)?.unwrap_or_else(|| (folder.to_owned(), 0));
    Ok(RestoreError::Refused {
        path,
        offset,
        number,
        kind,
        why,
    })
}

fn words_of(panic: &(dyn Any + Send)) -> String {
    let literal = || panic.downcast_ref::<&str>().map(ToString::to_string);
    let written = panic.downcast_ref::<String>().cloned();
    written.or_else(literal).unwrap_or_default()
}

/// The oldest snapshot that is kept, where the remaining journal begins.
///
/// # Errors
/// There is none, or it is damaged.
pub fn oldest(folder: &Path) -> Result<Snapshot, RestoreError> {
    pick(folder, list(folder)?.into_iter()).map(|(snapshot, _)| snapshot)
}

/// The batch of `step`, cut again from the newest whole snapshot before it, and the events since. `None` if these are
/// no longer kept. Only reads, also from a journal that grows.
///
/// # Errors
/// The events since are damaged.
pub fn cut_again(folder: &Path, step: Step) -> Result<Option<Arc<PackedBatch>>, RestoreError> {
    let whole = list(folder)?
        .into_iter()
        .rev()
        .filter_map(|(_, path)| snapshot::read(&path).ok());
    let mut before = whole.filter(|snapshot| snapshot.core.next_step() <= step);
    let Some(Snapshot {
        number, mut core, ..
    }) = before.next()
    else {
        return Ok(None);
    };
    let mut found = None;
    decode_from(folder, number, |Entry(now, event)| {
        let said = core.handle(event, now).into_iter();
        found = said.into_iter().find_map(|effect| match effect {
            Effect::BatchCut { batch } if batch.step == step => Some(batch),
            _ => None,
        });
        found.is_none()
    })?;
    Ok(found)
}

/// How many events the newest snapshot covers.
///
/// # Errors
/// The folder cannot be read.
pub fn newest(folder: &Path) -> std::io::Result<u64> {
    Ok(files(folder, SNAPSHOT)?
        .last()
        .map_or(0, |(number, _)| *number))
}

pub fn newest_snapshot(folder: &Path) -> Result<(Snapshot, Vec<String>), RestoreError> {
    pick(folder, list(folder)?.into_iter().rev())
}

fn list(folder: &Path) -> Result<Vec<(u64, PathBuf)>, RestoreError> {
    Ok(listed(folder, SNAPSHOT)?)
}

/// The first snapshot that can be read, and what is wrong with those before it.
fn pick(
    folder: &Path,
    candidates: impl Iterator<Item = (u64, PathBuf)>,
) -> Result<(Snapshot, Vec<String>), RestoreError> {
    let mut problems = Vec::new();
    for (_, path) in candidates {
        match snapshot::read(&path) {
            Ok(snapshot) => return Ok((snapshot, problems)),
            Err(problem) => problems.push(format!("{} was passed over: {problem}", path.display())),
        }
    }
    Err(RestoreError::NoSnapshot {
        folder: folder.to_owned(),
        problems,
    })
}
