//! Plays a journal.

use super::fates::{Fate, Fates, Life};
use super::{InspectError, seconds};
use crate::journal::{self, Entry, ReadError, Tail};
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
    let snapshot = journal::oldest(folder)?;
    let mut player = Player::begin(snapshot.core, begin);
    let mut story = JournalSummary::begin(snapshot.number, &player.core);
    let tail = journal::read_from(folder, snapshot.number, |number, entry| {
        player.play(number, entry);
    })?;
    story.end(&tail, &player.core);
    Ok(Played {
        story,
        observer: player.observer,
        core: player.core,
        lives: player.fates.lives,
    })
}

impl JournalSummary {
    /// What is known where the played part begins.
    fn begin(events_before: u64, core: &Core) -> JournalSummary {
        JournalSummary {
            events_before,
            events: events_before,
            from_s: seconds(core.now()),
            until_s: seconds(core.now()),
            first_step: core.next_step(),
            next_step: core.next_step(),
            torn_bytes: 0,
        }
    }

    fn end(&mut self, tail: &Tail, core: &Core) {
        self.events = tail.events;
        self.until_s = seconds(core.now());
        self.next_step = core.next_step();
        self.torn_bytes = tail.torn;
    }
}

struct Player<O> {
    core: Core,
    fates: Fates,
    observer: O,
}

impl<O: Observer> Player<O> {
    fn begin(core: Core, begin: impl Fn(&Beginning<'_>) -> O) -> Player<O> {
        let fates = Fates::begin(&core);
        let observer = begin(&Beginning {
            core: &core,
            lives: &fates.lives,
        });
        Player {
            core,
            fates,
            observer,
        }
    }

    fn play(&mut self, number: u64, Entry(now, event): Entry) {
        let effects = self.core.handle(event.clone(), now);
        let ended = self.fates.take_in(&event, &effects, &self.core);
        self.observer.saw(&Moment {
            number,
            now: self.core.now(),
            event: &event,
            effects: &effects,
            core: &self.core,
            lives: &self.fates.lives,
            ended: &ended,
        });
    }
}
