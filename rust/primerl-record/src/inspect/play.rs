//! Playing a journal.

use super::fates::{Fate, Fates, Life};
use super::{InspectError, seconds};
use crate::journal::{self, Entry, ReadError, Snapshot};
use primerl_core::{Core, Effect, Event, RolloutId, Step, Time};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A run that goes on may delete its oldest events while they are read.
const ATTEMPTS: u32 = 3;

/// What the journal tells of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JournalSummary {
    /// Events that happened before; they are not kept any more.
    pub events_before: u64,
    /// Events of the run, with those before.
    pub events: u64,
    pub from_s: f64,
    pub until_s: f64,
    /// The first step that is cut in it.
    pub first_step: Step,
    /// The next step to be cut when it ends.
    pub next_step: Step,
    /// What a crash cut short at the end, bytes; or what is being written now.
    pub torn_bytes: u64,
}

/// One event, and what came of it.
pub struct Moment<'a> {
    pub number: u64,
    pub now: Time,
    pub event: &'a Event,
    pub effects: &'a [Effect],
    /// As it is after the event.
    pub core: &'a Core,
    /// Rollouts that have begun and not ended.
    pub lives: &'a BTreeMap<RolloutId, Life>,
    /// Rollouts that ended by this event.
    pub ended: &'a [Fate],
}

/// Notes what it is asked for.
pub(super) trait Observer {
    fn saw(&mut self, moment: &Moment<'_>);
}

/// A journal that was played to its end.
pub(super) struct Played<O> {
    pub observer: O,
    /// At the end.
    pub core: Core,
    pub lives: BTreeMap<RolloutId, Life>,
    pub story: JournalSummary,
}

/// Where a story begins.
pub struct Beginning<'a> {
    pub core: &'a Core,
    pub lives: &'a BTreeMap<RolloutId, Life>,
}

/// Plays all that is kept of the journal in `output_dir`.
pub(super) fn play<O: Observer>(
    output_dir: &Path,
    begin: impl Fn(&Beginning<'_>) -> O,
) -> Result<Played<O>, InspectError> {
    let folder = journal_of(output_dir)?;
    let mut attempt = 1;
    loop {
        match play_once(&folder, &begin) {
            Err(InspectError::Read(ReadError::Io { .. } | ReadError::Gap { .. }))
                if attempt < ATTEMPTS =>
            {
                attempt += 1;
            }
            outcome => return outcome,
        }
    }
}

pub(super) fn journal_of(output_dir: &Path) -> Result<std::path::PathBuf, InspectError> {
    let folder = output_dir.join("journal");
    match journal::exists(&folder) {
        true => Ok(folder),
        false => Err(InspectError::NoJournal {
            folder: output_dir.to_owned(),
        }),
    }
}

fn play_once<O: Observer>(
    folder: &Path,
    begin: impl Fn(&Beginning<'_>) -> O,
) -> Result<Played<O>, InspectError> {
    let Snapshot {
        number, mut core, ..
    } = journal::oldest(folder)?;
    let mut fates = Fates::begin(&core);
    let mut observer = begin(&Beginning {
        core: &core,
        lives: &fates.lives,
    });
    let (began, first_step) = (core.now(), core.next_step());
    let tail = journal::read_from(folder, number, |number, Entry(now, event)| {
        let effects = core.handle(event.clone(), now);
        let ended = fates.take_in(&event, &effects, &core);
        observer.saw(&Moment {
            number,
            now: core.now(),
            event: &event,
            effects: &effects,
            core: &core,
            lives: &fates.lives,
            ended: &ended,
        });
    })?;
    Ok(Played {
        story: JournalSummary {
            events_before: number,
            events: tail.events,
            from_s: seconds(began),
            until_s: seconds(core.now()),
            first_step,
            next_step: core.next_step(),
            torn_bytes: tail.torn,
        },
        observer,
        core,
        lives: fates.lives,
    })
}
