//! The writing half. The driver appends without waiting; code that needs durability watches [`Progress`].

use super::{HEADER, MAGIC, SEGMENT, Tail, exists, header, path_of};
use primerl_core::{Event, Time};
use primerl_service::files::room;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// A segment is closed when it reaches this size.
const SEGMENT_BYTES: u64 = 64 << 20;
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

fn failed(path: &Path, source: io::Error) -> JournalError {
    JournalError::Io {
        path: path.to_owned(),
        source: Arc::new(room::named(path, 0, source)),
    }
}

/// Creates the empty segment for what comes after the first `events` events.
///
/// # Errors
/// It is there, or cannot be written.
pub fn begin_segment(folder: &Path, events: u64) -> Result<(), JournalError> {
    Segment::create(folder, events).map(drop)
}

struct Segment {
    folder: PathBuf,
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Segment {
    fn create(folder: &Path, first: u64) -> Result<Segment, JournalError> {
        let path = path_of(folder, first, SEGMENT);
        let create = || {
            let mut file = File::options().create_new(true).append(true).open(&path)?;
            file.write_all(&MAGIC)?;
            File::open(folder)?.sync_all()?;
            Ok(file)
        };
        let file = create().map_err(|error| failed(&path, error))?;
        Ok(Segment {
            folder: folder.to_owned(),
            path,
            file,
            bytes: MAGIC.len() as u64,
        })
    }

    /// Only its first `whole` bytes count.
    fn reopen(folder: &Path, path: &Path, whole: u64) -> Result<Segment, JournalError> {
        let open = || {
            let mut file = File::options().append(true).open(path)?;
            file.set_len(whole)?;
            if whole < MAGIC.len() as u64 {
                file.set_len(0)?;
                file.write_all(&MAGIC)?;
            }
            file.sync_all()?;
            Ok(file)
        };
        let file = open().map_err(|error| failed(path, error))?;
        Ok(Segment {
            folder: folder.to_owned(),
            path: path.to_owned(),
            file,
            bytes: whole.max(MAGIC.len() as u64),
        })
    }

    /// The next one begins after the first `written` events.
    fn end(&mut self, written: u64) -> Result<(), JournalError> {
        self.file.sync_data().map_err(|error| self.failed(error))?;
        if self.bytes > MAGIC.len() as u64 {
            *self = Segment::create(&self.folder, written)?;
        }
        Ok(())
    }

    fn failed(&self, source: io::Error) -> JournalError {
        failed(&self.path, source)
    }
}

fn write_until_closed(
    mut segment: Segment,
    jobs: &mpsc::Receiver<Job>,
    progress: &watch::Sender<Progress>,
) {
    let mut written = progress.borrow().written;
    loop {
        let closed = match next_group(jobs) {
            Group::Events {
                records,
                events,
                sync,
                last,
                closed,
            } => {
                let mut outcome = write_group(&mut segment, written, &records);
                written += events;
                if outcome.is_ok() && last {
                    outcome = segment.end(written);
                }
                if outcome.is_ok() && events > 0 {
                    progress.send_modify(|progress| progress.written = written);
                }
                let needed = sync && progress.borrow().durable < written;
                if outcome.is_ok() && (needed || closed) {
                    outcome = sync_segment(&segment, written, progress);
                }
                if let Err(error) = outcome {
                    progress.send_modify(|progress| progress.error = Some(error));
                    return;
                }
                closed
            }
            Group::Idle => {
                // No caller waits, but a crash should not lose more than the last second.
                let unsynced = progress.borrow().durable < written;
                if unsynced && let Err(error) = sync_segment(&segment, written, progress) {
                    progress.send_modify(|progress| progress.error = Some(error));
                    return;
                }
                false
            }
        };
        if closed {
            return;
        }
    }
}

fn sync_segment(
    segment: &Segment,
    written: u64,
    progress: &watch::Sender<Progress>,
) -> Result<(), JournalError> {
    segment
        .file
        .sync_data()
        .map_err(|error| segment.failed(error))?;
    progress.send_modify(|progress| progress.durable = written);
    Ok(())
}

enum Group {
    Events {
        /// In the pieces in which they arrived.
        records: Vec<Vec<u8>>,
        events: u64,
        sync: bool,
        last: bool,
        closed: bool,
    },
    Idle,
}

/// Waits for one job, then takes all that are queued after it.
fn next_group(jobs: &mpsc::Receiver<Job>) -> Group {
    let first = match jobs.recv_timeout(IDLE_SYNC) {
        Ok(job) => Some(job),
        Err(mpsc::RecvTimeoutError::Timeout) => return Group::Idle,
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
    Group::Events {
        records,
        events,
        sync,
        last,
        closed,
    }
}

fn write_group(
    segment: &mut Segment,
    written: u64,
    records: &[Vec<u8>],
) -> Result<(), JournalError> {
    let bytes: usize = records.iter().map(Vec::len).sum();
    if segment.bytes >= SEGMENT_BYTES && bytes > 0 {
        segment.end(written)?;
    }
    segment.bytes += bytes as u64;
    // The pieces are not joined first: if the disk is slow, that would be megabytes of fresh memory.
    let mut pieces = records.iter().filter(|piece| !piece.is_empty());
    pieces
        .try_for_each(|piece| segment.file.write_all(piece))
        .map_err(|error| segment.failed(room::named(&segment.path, bytes as u64, error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = path_of(folder.path(), 7, SEGMENT);
        let full = File::options().write(true).open("/dev/full");
        let mut segment = Segment {
            folder: folder.path().to_owned(),
            path: path.clone(),
            file: full.expect("opens"),
            bytes: 0,
        };
        let error = write_group(&mut segment, 0, &[vec![0; 1000]]).expect_err("is full");
        let told = error.to_string();
        assert!(told.starts_with(&format!(
            "cannot write the journal {}: the disk mounted at /",
            path.display()
        )));
        let needs = format!(
            "{} needs at least 1000 bytes: make room on it",
            path.display()
        );
        assert!(told.ends_with(&needs), "{told}");
    }
}
