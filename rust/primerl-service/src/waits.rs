//! Every wait of the server around the core: who waits for what, since when, and how long it may take. The core's own
//! waits are in its status; together they are the `waits` of `/status`, a chain that ends at what blocks the run.
//!
//! The monitor checks them once a second. It logs a wait that is past its deadline; if the run cannot continue without
//! what is awaited, the run ends with a typed error.

use parking_lot::Mutex;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What happens to a wait that takes too long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overdue {
    /// Another part gives up on it, or it may last: it is logged repeatedly.
    IsNamed,
    /// The run cannot continue without it, so the run fails.
    FailsTheRun,
}

#[derive(Clone, Debug)]
struct Entry {
    who: String,
    waiting_for: String,
    since: Instant,
    deadline: Instant,
    overdue: Overdue,
    /// When it was last logged.
    named: Option<Instant>,
    /// It is not listed before this time: all waits of its kind are usually short.
    shown_from: Instant,
}

/// One line of `/status`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Wait {
    pub who: String,
    #[serde(rename = "for")]
    pub waiting_for: String,
    pub since_s: f64,
    /// Seconds left; negative if it is overdue.
    pub deadline_s: f64,
    #[serde(skip)]
    pub fails_the_run: bool,
}

/// Locked only for the few map operations that begin or end a wait.
#[derive(Clone, Debug, Default)]
pub struct Waits(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    entries: BTreeMap<u64, Entry>,
}

/// A wait that lasts until this value is dropped.
#[derive(Debug)]
pub struct Waiting {
    waits: Waits,
    number: u64,
}

impl Waits {
    pub fn begin(
        &self,
        who: impl Into<String>,
        waiting_for: impl Into<String>,
        at_most: Duration,
        overdue: Overdue,
    ) -> Waiting {
        self.begin_unseen(who, waiting_for, Duration::ZERO, at_most, overdue)
    }

    /// Begins a wait that is only listed if it lasts for `unseen`.
    pub fn begin_unseen(
        &self,
        who: impl Into<String>,
        waiting_for: impl Into<String>,
        unseen: Duration,
        at_most: Duration,
        overdue: Overdue,
    ) -> Waiting {
        let since = Instant::now();
        let entry = Entry {
            who: who.into(),
            waiting_for: waiting_for.into(),
            since,
            deadline: since + at_most,
            overdue,
            named: None,
            shown_from: since + unseen,
        };
        let mut table = self.0.lock();
        let number = table.next;
        table.next += 1;
        table.entries.insert(number, entry);
        Waiting {
            waits: self.clone(),
            number,
        }
    }

    /// All current waits that are listed, oldest first.
    pub fn all(&self) -> Vec<Wait> {
        let now = Instant::now();
        let table = self.0.lock();
        table
            .entries
            .values()
            .filter(|entry| now >= entry.shown_from)
            .map(|entry| entry.seen(now))
            .collect()
    }

    /// Moves all deadlines: this process was suspended itself, so nothing was late in the meantime.
    pub fn postpone(&self, by: Duration) {
        for entry in self.0.lock().entries.values_mut() {
            entry.deadline += by;
        }
    }

    /// Overdue waits that were not logged within `repeat`; marks them as logged.
    pub fn take_overdue(&self, repeat: Duration) -> Vec<Wait> {
        let now = Instant::now();
        let mut overdue = Vec::new();
        for entry in self.0.lock().entries.values_mut() {
            let named_lately = entry.named.is_some_and(|named| now - named < repeat);
            if now >= entry.deadline && !named_lately {
                entry.named = Some(now);
                overdue.push(entry.seen(now));
            }
        }
        overdue
    }
}

impl Entry {
    fn seen(&self, now: Instant) -> Wait {
        let left = self.deadline.saturating_duration_since(now).as_secs_f64();
        let over = now.saturating_duration_since(self.deadline).as_secs_f64();
        Wait {
            who: self.who.clone(),
            waiting_for: self.waiting_for.clone(),
            since_s: (now - self.since).as_secs_f64(),
            deadline_s: left - over,
            fails_the_run: self.overdue == Overdue::FailsTheRun,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.waits.0.lock().entries.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_seen_until_it_ends_and_named_once_it_is_overdue() {
        let waits = Waits::default();
        let long = waits.begin("a", "b", Duration::from_secs(60), Overdue::FailsTheRun);
        let hour = Duration::from_secs(3600);
        let _unseen = waits.begin_unseen("c", "b", hour, hour, Overdue::FailsTheRun);
        let short = waits.begin("b", "the disk", Duration::ZERO, Overdue::IsNamed);
        let all = waits.all();
        assert_eq!((all.len(), all[0].who.as_str()), (2, "a"));
        assert!(all[0].deadline_s > 50.0 && all[1].deadline_s <= 0.0);
        let named = waits.take_overdue(Duration::from_secs(60));
        assert_eq!(named.len(), 1);
        assert_eq!(
            (named[0].who.as_str(), named[0].fails_the_run),
            ("b", false)
        );
        assert_eq!(waits.take_overdue(Duration::from_secs(60)), []);
        assert_eq!(waits.take_overdue(Duration::ZERO).len(), 1, "again");
        drop((long, short));
        assert_eq!(waits.all(), []);
    }
}
