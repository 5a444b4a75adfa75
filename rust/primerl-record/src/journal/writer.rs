//! The writing half. The driver appends without waiting; code that needs durability watches [`Progress`].

use super::{HEADER, Tail, exists, header};
use primerl_core::{Event, Time};
use segment::{Segment, failed};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

mod segment;

/// Events that no one waits for are synced at least this often.
const IDLE_SYNC: Duration = Duration::from_secs(1);
/// Events that no one waits for are passed to the writer once they have this many bytes: waking it costs more than
/// writing.
const HAND_OVER_BYTES: usize = 64 << 10;

#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    #[error("cannot write the journal {path}: {source}")]
    Io {
        path: PathBuf,
        source: Arc<io::Error>,
    },
    #[error("cannot encode an event for the journal: {0}")]
    Encode(Arc<rmp_serde::encode::Error>),
    #[error("the journal's writer stopped")]
    Stopped,
}

/// How far the journal is.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Events that the operating system has: they survive this process, but not a power loss.
    pub written: u64,
    /// Events that are on disk.
    pub durable: u64,
    /// Set once, when writing failed: nothing becomes durable any more.
    pub error: Option<JournalError>,
}

/// Encoded records in a row.
#[derive(Debug, Default)]
struct Job {
    bytes: Vec<u8>,
    events: u64,
    /// A caller waits for everything up to here.
    sync: bool,
    /// The events after these go to another segment.
    last: bool,
}

/// Appends events. Dropping it writes and syncs the rest.
#[derive(Debug)]
pub struct Journal {
    jobs: Option<mpsc::Sender<Job>>,
    progress: watch::Receiver<Progress>,
    thread: Option<JoinHandle<()>>,
    appended: u64,
    /// Events for which a sync was requested.
    requested: u64,
    bytes: u64,
    /// Appended, but not passed to the writer yet.
    waiting: Job,
}

impl Journal {
    /// Starts a new journal in `folder`, which must not hold one.
    ///
    /// # Errors
    /// The folder cannot be written.
    ///
    /// # Panics
    /// If there is a journal.
    pub fn create(folder: &Path) -> Result<Journal, JournalError> {
        fs::create_dir_all(folder).map_err(|error| failed(folder, error))?;
        assert!(!exists(folder), "a journal is resumed, not overwritten");
        Journal::begin(Segment::create(folder, 0)?, 0)
    }

    /// Resumes the journal in `folder`, which ends as `tail` says: first removes the record that a crash cut short.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn resume(folder: &Path, tail: &Tail) -> Result<Journal, JournalError> {
        let segment = match &tail.segment {
            Some((path, whole)) => Segment::reopen(folder, path, *whole)?,
            None => Segment::create(folder, tail.events)?,
        };
        Journal::begin(segment, tail.events)
    }

    fn begin(segment: Segment, events: u64) -> Result<Journal, JournalError> {
        let path = segment.path.clone();
        let (jobs, receiver) = mpsc::channel();
        let (sender, progress) = watch::channel(Progress {
            written: events,
            durable: events,
            error: None,
        });
        let thread = std::thread::Builder::new()
            .name("journal".into())
            .spawn(move || write_until_closed(segment, &receiver, &sender))
            .map_err(|error| failed(&path, error))?;
        Ok(Journal {
            jobs: Some(jobs),
            progress,
            thread: Some(thread),
            appended: events,
            requested: events,
            bytes: 0,
            waiting: Job::default(),
        })
    }

    /// Bytes appended by this process.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Events appended since the run began.
    pub fn appended(&self) -> u64 {
        self.appended
    }

    /// Appends one event; the result is its number, from 1. It is durable once [`Progress::durable`] has reached it.
    pub fn append(&mut self, now: Time, event: &Event) -> Result<u64, JournalError> {
        let bytes = &mut self.waiting.bytes;
        let start = bytes.len();
        bytes.resize(start + HEADER, 0);
        if let Err(error) = rmp_serde::encode::write_named(bytes, &(now, event)) {
            bytes.truncate(start);
            return Err(JournalError::Encode(Arc::new(error)));
        }
        let record = &mut bytes[start..];
        let header = header(&record[HEADER..]);
        record[..HEADER].copy_from_slice(&header);
        self.appended += 1;
        self.bytes += record.len() as u64;
        self.waiting.events += 1;
        if self.waiting.bytes.len() >= HAND_OVER_BYTES {
            self.hand_over(false)?;
        }
        Ok(self.appended)
    }

    /// Asks for everything appended so far to be made durable soon.
    pub fn request_sync(&mut self) -> Result<(), JournalError> {
        if self.requested == self.appended {
            return Ok(());
        }
        self.requested = self.appended;
        self.hand_over(true)
    }

    /// Whether [`Journal::flush`] has something to do.
    pub fn is_waiting(&self) -> bool {
        self.waiting.events > 0
    }

    /// Passes everything appended so far to the writer, which makes it durable at its next sync.
    pub fn flush(&mut self) -> Result<(), JournalError> {
        self.hand_over(false)
    }

    /// Events from here on go to a separate segment, whose name is the number of events before it.
    pub fn end_segment(&mut self) -> Result<(), JournalError> {
        self.waiting.last = true;
        self.hand_over(false)
    }

    /// A view of the journal's progress.
    pub fn progress(&self) -> watch::Receiver<Progress> {
        self.progress.clone()
    }

    fn hand_over(&mut self, sync: bool) -> Result<(), JournalError> {
        let jobs = self.jobs.as_ref().ok_or(JournalError::Stopped)?;
        let job = Job {
            sync,
            ..std::mem::take(&mut self.waiting)
        };
        jobs.send(job).map_err(|_| {
            self.progress
                .borrow()
                .error
                .clone()
                .unwrap_or(JournalError::Stopped)
        })
    }
}

impl Drop for Journal {
    fn drop(&mut self) {
        // A writer that has stopped has reported why.
        let _ = self.hand_over(true);
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the journal's writer panicked");
        }
    }
}

/// Creates the empty segment for what comes after the first `events` events.
///
/// # Errors
/// It is there, or cannot be written.
pub fn begin_segment(folder: &Path, events: u64) -> Result<(), JournalError> {
    Segment::create(folder, events).map(drop)
}

fn write_until_closed(
    segment: Segment,
    jobs: &mpsc::Receiver<Job>,
    progress: &watch::Sender<Progress>,
) {
    let written = progress.borrow().written;
    let mut writer = Writer {
        segment,
        written,
        progress,
    };
    if let Err(error) = writer.run(jobs) {
        progress.send_modify(|progress| progress.error = Some(error));
    }
}

/// The thread's part of the journal.
struct Writer<'a> {
    segment: Segment,
    written: u64,
    progress: &'a watch::Sender<Progress>,
}

impl Writer<'_> {
    fn run(&mut self, jobs: &mpsc::Receiver<Job>) -> Result<(), JournalError> {
        loop {
            match next_group(jobs) {
                Some(group) => {
                    self.write(&group)?;
                    if group.closed {
                        return Ok(());
                    }
                }
                // No caller waits, but a crash should not lose more than the last second.
                None => self.sync_rest()?,
            }
        }
    }

    fn write(&mut self, group: &Group) -> Result<(), JournalError> {
        self.segment.append(self.written, &group.records)?;
        self.written += group.events;
        if group.last {
            self.segment.end(self.written)?;
        }
        if group.events > 0 {
            self.progress
                .send_modify(|progress| progress.written = self.written);
        }
        match group.closed {
            true => self.sync(),
            false if group.sync => self.sync_rest(),
            false => Ok(()),
        }
    }

    /// Syncs if something is not on disk yet.
    fn sync_rest(&self) -> Result<(), JournalError> {
        let is_all_durable = self.progress.borrow().durable >= self.written;
        if is_all_durable { Ok(()) } else { self.sync() }
    }

    fn sync(&self) -> Result<(), JournalError> {
        self.segment.sync()?;
        self.progress
            .send_modify(|progress| progress.durable = self.written);
        Ok(())
    }
}

/// Jobs that are written together.
struct Group {
    /// In the pieces in which they arrived.
    records: Vec<Vec<u8>>,
    events: u64,
    sync: bool,
    last: bool,
    /// There will be no more.
    closed: bool,
}

/// Waits for one job, then takes all that are queued after it; `None` if none comes for a while.
fn next_group(jobs: &mpsc::Receiver<Job>) -> Option<Group> {
    let first = match jobs.recv_timeout(IDLE_SYNC) {
        Ok(job) => Some(job),
        Err(mpsc::RecvTimeoutError::Timeout) => return None,
        Err(mpsc::RecvTimeoutError::Disconnected) => None,
    };
    let closed = first.is_none();
    let (mut records, mut events, mut sync, mut last) = (Vec::new(), 0, false, false);
    let mut next = first;
    while let Some(job) = next {
        events += job.events;
        sync |= job.sync;
        last = job.last;
        records.push(job.bytes);
        // A segment's last events are the last of their group.
        next = if last { None } else { jobs.try_recv().ok() };
    }
    Some(Group {
        records,
        events,
        sync,
        last,
        closed,
    })
}
