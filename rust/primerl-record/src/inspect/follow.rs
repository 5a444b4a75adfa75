//! Plays a journal that grows: like [`super::play`], to the end of what is written, and continues from there later.

use super::fates::Fates;
use super::idle::{IdleReport, Watch};
use super::play::{Beginning, JournalSummary, Moment, Observer, journal_of};
use super::{InspectError, seconds};
use crate::journal::{self, Entry, Follower, Place};
use primerl_core::{Core, Status, Step, Time};
use std::path::Path;

/// A run that continues, and where its time went so far.
pub struct Following {
    core: Core,
    fates: Fates,
    reader: Follower,
    watch: Watch,
    began: (u64, Time, Step),
}

impl Following {
    /// From the oldest event that is kept. `begin` gets the state before it.
    ///
    /// # Errors
    /// There is no journal, or its oldest snapshot is damaged.
    pub fn begin(
        output_dir: &Path,
        begin: impl FnOnce(&Beginning<'_>),
    ) -> Result<Following, InspectError> {
        let folder = journal_of(output_dir)?;
        let journal::Snapshot { number, core, .. } = journal::oldest(&folder)?;
        let fates = Fates::begin(&core);
        let beginning = Beginning {
            core: &core,
            lives: &fates.lives,
        };
        begin(&beginning);
        let watch = Watch::begin(&beginning);
        Ok(Following {
            began: (number, core.now(), core.next_step()),
            core,
            fates,
            reader: Follower::begin(&folder, number),
            watch,
        })
    }

    /// Plays the next event, and returns where it is written; `false` if no more is written so far.
    ///
    /// # Errors
    /// The journal cannot be read further: the caller has to start from the beginning.
    pub fn next(&mut self, saw: impl FnOnce(&Moment<'_>, Place)) -> Result<bool, InspectError> {
        let Some((place, Entry(now, event))) = self.reader.next_event()? else {
            return Ok(false);
        };
        let effects = self.core.handle(event.clone(), now);
        let ended = self.fates.take_in(&event, &effects, &self.core);
        let moment = Moment {
            number: self.reader.read(),
            now: self.core.now(),
            event: &event,
            effects: &effects,
            core: &self.core,
            lives: &self.fates.lives,
            ended: &ended,
        };
        self.watch.saw(&moment);
        saw(&moment, place);
        Ok(true)
    }

    /// Events of the run that were played or are not kept.
    pub fn events(&self) -> u64 {
        self.reader.read()
    }

    /// The core's status now.
    pub fn status(&self) -> Status {
        self.core.status()
    }

    /// Where the time went so far.
    pub fn idle(&self) -> IdleReport {
        let (events_before, from, first_step) = self.began;
        let story = JournalSummary {
            events_before,
            events: self.reader.read(),
            from_s: seconds(from),
            until_s: seconds(self.core.now()),
            first_step,
            next_step: self.core.next_step(),
            torn_bytes: 0,
        };
        self.watch.report(story, &self.core)
    }
}
