//! The writing half. The driver appends without waiting; whoever needs durability watches [`Progress`].

use super::HEADER;
use primerl_core::{Event, Time};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::watch;

/// A segment is closed once it is this long.
const SEGMENT_BYTES: usize = 64 << 20;
/// Events nobody waits for are synced at least this often.
const IDLE_SYNC: Duration = Duration::from_secs(1);
/// Events nobody waits for are handed to the writer once they are this many bytes: waking it costs more than writing.
const HAND_OVER_BYTES: usize = 64 << 10;

#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JournalError {
    #[error(
        "{path} holds the journal of an earlier run; give another output_dir or remove that folder"
    )]
    NotEmpty { path: PathBuf },
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
    /// Events that are on disk.
    pub durable: u64,
    /// Set once, when writing failed: nothing becomes durable any more.
    pub error: Option<JournalError>,
}

/// Records in a row.
#[derive(Debug, Default)]
struct Job {
    bytes: Vec<u8>,
    events: u64,
    /// Somebody waits for everything up to here.
    sync: bool,
}

/// Appends events. Dropping it writes and syncs what is left.
#[derive(Debug)]
pub struct Journal {
    jobs: Option<mpsc::Sender<Job>>,
    progress: watch::Receiver<Progress>,
    thread: Option<JoinHandle<()>>,
    appended: u64,
    /// Events for which a sync was asked.
    requested: u64,
    /// Appended, and not handed to the writer yet.
    waiting: Job,
}

impl Journal {
    /// Start a new journal in `folder`, which must not hold one.
    pub fn create(folder: &Path) -> Result<Journal, JournalError> {
        let failed = |source: io::Error| JournalError::Io {
            path: folder.to_owned(),
            source: Arc::new(source),
        };
        fs::create_dir_all(folder).map_err(failed)?;
        if fs::read_dir(folder).map_err(failed)?.next().is_some() {
            return Err(JournalError::NotEmpty {
                path: folder.to_owned(),
            });
        }
        let segment = Segment::create(folder, 0)?;
        let (jobs, receiver) = mpsc::channel();
        let (sender, progress) = watch::channel(Progress::default());
        let thread = std::thread::Builder::new()
            .name("journal".into())
            .spawn(move || write_until_closed(segment, &receiver, &sender))
            .map_err(failed)?;
        Ok(Journal {
            jobs: Some(jobs),
            progress,
            thread: Some(thread),
            appended: 0,
            requested: 0,
            waiting: Job::default(),
        })
    }

    /// Append one event; the result is its number, from 1. It is durable once [`Progress::durable`] has reached it.
    pub fn append(&mut self, now: Time, event: &Event) -> Result<u64, JournalError> {
        let bytes = &mut self.waiting.bytes;
        let start = bytes.len();
        bytes.resize(start + HEADER, 0);
        if let Err(error) = rmp_serde::encode::write_named(bytes, &(now, event)) {
            bytes.truncate(start);
            return Err(JournalError::Encode(Arc::new(error)));
        }
        let record = &mut bytes[start..];
        let body = &record[HEADER..];
        let (length, checksum) = (body.len() as u32, crc32fast::hash(body));
        record[..4].copy_from_slice(&length.to_le_bytes());
        record[4..HEADER].copy_from_slice(&checksum.to_le_bytes());
        self.appended += 1;
        self.waiting.events += 1;
        if self.waiting.bytes.len() >= HAND_OVER_BYTES {
            self.hand_over(false)?;
        }
        Ok(self.appended)
    }

    /// Ask for everything appended so far to be made durable soon.
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

    /// Hand everything appended so far to the writer, who makes it durable in its own time.
    pub fn flush(&mut self) -> Result<(), JournalError> {
        self.hand_over(false)
    }

    /// A view of how far the journal is.
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
        // A writer that has stopped has told why.
        let _ = self.hand_over(true);
        self.jobs = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the journal's writer panicked");
        }
    }
}

struct Segment {
    folder: PathBuf,
    path: PathBuf,
    file: File,
    bytes: usize,
}

impl Segment {
    fn create(folder: &Path, first: u64) -> Result<Segment, JournalError> {
        let path = folder.join(format!("{first:012}.log"));
        let create = || {
            let file = File::options().create_new(true).append(true).open(&path)?;
            File::open(folder)?.sync_all()?;
            Ok(file)
        };
        match create() {
            Ok(file) => Ok(Segment {
                folder: folder.to_owned(),
                path,
                file,
                bytes: 0,
            }),
            Err(source) => Err(JournalError::Io {
                path,
                source: Arc::new(source),
            }),
        }
    }

    fn failed(&self, source: io::Error) -> JournalError {
        JournalError::Io {
            path: self.path.clone(),
            source: Arc::new(source),
        }
    }
}

fn write_until_closed(
    mut segment: Segment,
    jobs: &mpsc::Receiver<Job>,
    progress: &watch::Sender<Progress>,
) {
    let mut written = 0;
    loop {
        let closed = match next_group(jobs) {
            Group::Events {
                bytes,
                events,
                sync,
                closed,
            } => {
                let mut outcome = write_group(&mut segment, written, &bytes);
                written += events;
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
                // Nothing waits, but a crash should not lose more than the last second.
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
        bytes: Vec<u8>,
        events: u64,
        sync: bool,
        closed: bool,
    },
    Idle,
}

/// Wait for one job, then take all that queued up behind it.
fn next_group(jobs: &mpsc::Receiver<Job>) -> Group {
    let first = match jobs.recv_timeout(IDLE_SYNC) {
        Ok(job) => Some(job),
        Err(mpsc::RecvTimeoutError::Timeout) => return Group::Idle,
        Err(mpsc::RecvTimeoutError::Disconnected) => None,
    };
    let closed = first.is_none();
    let (mut bytes, mut events, mut sync) = (Vec::new(), 0, false);
    for job in first.into_iter().chain(jobs.try_iter()) {
        bytes.extend_from_slice(&job.bytes);
        events += job.events;
        sync |= job.sync;
    }
    Group::Events {
        bytes,
        events,
        sync,
        closed,
    }
}

fn write_group(segment: &mut Segment, written: u64, bytes: &[u8]) -> Result<(), JournalError> {
    if segment.bytes >= SEGMENT_BYTES && !bytes.is_empty() {
        segment
            .file
            .sync_data()
            .map_err(|error| segment.failed(error))?;
        *segment = Segment::create(&segment.folder, written)?;
    }
    segment.bytes += bytes.len();
    segment
        .file
        .write_all(bytes)
        .map_err(|error| segment.failed(error))
}
