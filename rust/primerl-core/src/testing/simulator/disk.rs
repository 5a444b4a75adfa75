//! The orchestrator's disk: a journal that is written and synced in groups, snapshots of the core, and what the recorder
//! writes. Without [`super::DiskFaults`] everything is on disk at once.

use super::actors::Action;
use super::process::Withheld;
use super::{DiskFaults, Scenario, Simulator};
use crate::Core;
use crate::effect::EvaluationReport;
use crate::event::Event;
use crate::ids::*;
use crate::pack::PackedBatch;
use crate::testing::observer::Observer;
use crate::time::{Duration, Time};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Events that nothing waits for are handed to the writer after so long, and synced after so long.
const FLUSH: Duration = Duration(200_000);
const IDLE_SYNC: Duration = Duration(1_000_000);
/// Events between two snapshots.
const BETWEEN_SNAPSHOTS: u64 = 150;

/// What the disk of a dead orchestrator is read for.
#[derive(Clone, Debug)]
pub struct Snapshot {
    pub number: u64,
    pub core: Core,
    pub observer: Observer,
}

#[derive(Debug)]
pub struct Disk {
    faults: Option<DiskFaults>,
    pub rng: ChaCha8Rng,
    /// Nothing is kept of a run that is never restarted.
    keeps: bool,
    /// Every event, from number 1 on.
    pub journal: Vec<(Time, Event)>,
    appended: u64,
    /// Given to the writer.
    handed: u64,
    /// Somebody waits for these to be synced.
    requested: u64,
    /// What the write under way ends with.
    writing: Option<u64>,
    /// The operating system has them: they outlive the process.
    pub written: u64,
    /// They outlive the machine.
    pub durable: u64,
    /// The number of the one taken last.
    snapshot_at: u64,
    /// Oldest first; two at most.
    pub snapshots: Vec<Snapshot>,
    pub spool: BTreeMap<Step, Arc<PackedBatch>>,
    pub evaluations: BTreeMap<(EnvironmentId, PolicyVersion), EvaluationReport>,
}

impl Disk {
    pub fn new(scenario: &Scenario, core: Core) -> Disk {
        let faults = scenario.faults.disk;
        Disk {
            faults,
            rng: ChaCha8Rng::seed_from_u64(scenario.seed ^ 0x6469_736b),
            keeps: faults.is_some() || scenario.faults.orchestrator_dies > 0.0,
            journal: Vec::new(),
            appended: 0,
            handed: 0,
            requested: 0,
            writing: None,
            written: 0,
            durable: 0,
            snapshot_at: 0,
            snapshots: vec![Snapshot {
                number: 0,
                core,
                observer: Observer::new(scenario.config.clone()),
            }],
            spool: BTreeMap::new(),
            evaluations: BTreeMap::new(),
        }
    }

    pub fn is_instant(&self) -> bool {
        self.faults.is_none()
    }

    /// Returns the event's number.
    pub fn append(&mut self, now: Time, event: &Event) -> u64 {
        if self.keeps {
            self.journal.push((now, event.clone()));
        }
        self.appended += 1;
        if self.is_instant() {
            self.reopen(self.appended);
        }
        self.appended
    }

    /// What is there is safe, and it is `events`.
    pub fn reopen(&mut self, events: u64) {
        self.appended = events;
        (self.handed, self.requested) = (events, events);
        (self.written, self.durable) = (events, events);
        self.writing = None;
    }

    /// The number of the last event that may be there after a crash, at most.
    pub fn reached(&self) -> u64 {
        self.writing.unwrap_or(self.written).max(self.written)
    }

    pub fn add_snapshot(&mut self, snapshot: Snapshot) {
        self.snapshots.push(snapshot);
        if self.snapshots.len() > 2 {
            self.snapshots.remove(0);
        }
    }

    pub fn chance(&mut self, probability: impl Fn(&DiskFaults) -> f64) -> bool {
        let probability = self.faults.as_ref().map_or(0.0, probability);
        probability > 0.0 && self.rng.random_bool(probability)
    }

    /// How long a write takes.
    pub fn span(&mut self) -> Duration {
        let seconds = match self.chance(|faults| faults.slow) {
            true => self.rng.random_range(0.1..6.0),
            false => self.rng.random_range(0.0002..0.02),
        };
        Duration::from_secs_f64(seconds)
    }
}

impl Simulator {
    /// Hands to the writer what somebody waits for, and notes when to hand over the rest.
    pub(super) fn write_what_waits(&mut self) {
        if self.disk.is_instant() {
            return;
        }
        let process = &self.process;
        if let Some((number, _)) = process.durable.back() {
            self.disk.requested = self.disk.requested.max(*number);
        }
        let waits = self
            .disk
            .requested
            .max(process.written.back().map_or(0, |(number, _)| *number));
        if waits > self.disk.handed {
            self.disk.handed = self.disk.appended;
        } else if self.disk.appended > self.disk.handed {
            let flush = Action::Flush(self.process.life);
            self.plan(FLUSH, flush);
        }
        self.write();
    }

    pub(super) fn take_snapshot_if_due(&mut self, number: u64) {
        let due = number >= self.disk.snapshot_at + BETWEEN_SNAPSHOTS;
        if !self.disk.is_instant() && due && self.core.finished().is_none() {
            self.take_snapshot(number);
        }
    }

    pub(super) fn take_snapshot(&mut self, number: u64) {
        self.disk.snapshot_at = number;
        let snapshot = Snapshot {
            number,
            core: self.core.clone(),
            observer: self.observer.without_tokens(),
        };
        self.withhold(number, Withheld::Snapshot(Box::new(snapshot)));
    }

    pub(super) fn flush(&mut self, life: u32) {
        if life == self.process.life {
            self.disk.handed = self.disk.appended;
            self.write();
        }
    }

    /// Begins the next write, if there is something and the writer is idle.
    fn write(&mut self) {
        let disk = &mut self.disk;
        if disk.writing.is_some() || disk.handed == disk.written {
            return;
        }
        disk.writing = Some(disk.handed);
        let (after, life) = (disk.span(), self.process.life);
        self.plan(after, Action::Written(life));
    }

    pub(super) fn written(&mut self, life: u32) {
        if life != self.process.life {
            return;
        }
        if self.disk.chance(|faults| faults.fails) {
            return self.orchestrator_dies(super::restarts::Death::DiskFailed);
        }
        let upto = self.disk.writing.expect("it was writing");
        self.disk.written = upto;
        match self.disk.requested > self.disk.durable {
            true => self.sync(),
            false => {
                self.disk.writing = None;
                self.plan(IDLE_SYNC, Action::IdleSync(life));
                self.write();
            }
        }
        self.release();
    }

    fn sync(&mut self) {
        let (after, life) = (self.disk.span(), self.process.life);
        self.disk.writing = Some(self.disk.written);
        self.plan(after, Action::Synced(life));
    }

    pub(super) fn idle_sync(&mut self, life: u32) {
        let disk = &self.disk;
        if life == self.process.life && disk.writing.is_none() && disk.durable < disk.written {
            self.sync();
        }
    }

    pub(super) fn synced(&mut self, life: u32) {
        if life != self.process.life {
            return;
        }
        if self.disk.chance(|faults| faults.fails) {
            return self.orchestrator_dies(super::restarts::Death::DiskFailed);
        }
        self.disk.durable = self.disk.writing.take().expect("it was syncing");
        self.write();
        self.release();
    }
}
