//! Plays a journal.

use super::fates::{Fate, Fates, Life};
use super::{InspectError, seconds};
use crate::journal::{self, Entry, ReadError, Snapshot};
use primerl_core::{Core, Effect, Event, RolloutId, Step, Time};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

/// A run in progress may delete its oldest events while they are read.
const ATTEMPTS: u32 = 3;

/// What the journal shows of the run.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct JournalSummary {
    /// Events before the kept ones.
    pub events_before: u64,
    /// Events of the run, including those before.
    pub events: u64,
    pub from_s: f64,
    pub until_s: f64,
    /// The first step that is cut in the played part.
    pub first_step: Step,
    /// The next step to be cut at its end.
    pub next_step: Step,
    /// The bytes at the end that a crash cut short, or that are being written now.
    pub torn_bytes: u64,
}

/// One event, and its effects.
pub struct Moment<'a> {
    pub number: u64,
    pub now: Time,
    pub event: &'a Event,
    pub effects: &'a [Effect],
    /// The state after the event.
    pub core: &'a Core,
    /// Rollouts that have begun and not ended.
    pub lives: &'a BTreeMap<RolloutId, Life>,
    /// Rollouts that ended by this event.
    pub ended: &'a [Fate],
}

/// Observes the events, and notes what its question is about.
pub(super) trait Observer {
    fn saw(&mut self, moment: &Moment<'_>);
}

/// A journal that was played to its end.
pub(super) struct Played<O> {
    pub observer: O,
    /// The state at the end.
    pub core: Core,
    pub lives: BTreeMap<RolloutId, Life>,
    pub story: JournalSummary,
}

/// Where the played part begins.
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
