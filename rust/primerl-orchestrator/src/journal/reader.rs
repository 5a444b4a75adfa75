//! The reading half: every whole record, in order. A record cut by a crash ends the journal; a damaged one is an error.

use super::HEADER;
use primerl_core::{Event, Time};
use serde::Deserialize;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    #[error("cannot read {path}: {source}")]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(
        "{path}: the record at byte {offset} does not match its checksum; the file was damaged"
    )]
    Checksum { path: PathBuf, offset: usize },
    #[error("{path}: the record at byte {offset} is no event of this version: {source}")]
    Decode {
        path: PathBuf,
        offset: usize,
        source: rmp_serde::decode::Error,
    },
    #[error("{path}: expected to begin with event {expected}; a segment is missing")]
    Gap { path: PathBuf, expected: u64 },
}

#[derive(Clone, Debug, Deserialize)]
pub struct Entry(pub Time, pub Event);

/// All events of the journal in `folder`.
pub fn read(folder: &Path) -> Result<Vec<Entry>, ReadError> {
    let failed = |source| ReadError::Io {
        path: folder.to_owned(),
        source,
    };
    let mut segments: Vec<PathBuf> = std::fs::read_dir(folder)
        .map_err(failed)?
        .map(|entry| entry.map(|entry| entry.path()))
        .collect::<Result<_, _>>()
        .map_err(failed)?;
    segments.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    segments.sort();
    let mut entries = Vec::new();
    for path in segments {
        let expected = entries.len() as u64;
        if path
            .file_stem()
            .and_then(|stem| stem.to_str()?.parse().ok())
            != Some(expected)
        {
            return Err(ReadError::Gap { path, expected });
        }
        read_segment(&path, &mut entries)?;
    }
    Ok(entries)
}

fn read_segment(path: &Path, entries: &mut Vec<Entry>) -> Result<(), ReadError> {
    let bytes = std::fs::read(path).map_err(|source| ReadError::Io {
        path: path.to_owned(),
        source,
    })?;
    let mut offset = 0;
    while let Some(record) = record_at(&bytes, offset) {
        let (checksum, body) = record;
        if crc32fast::hash(body) != checksum {
            return Err(ReadError::Checksum {
                path: path.to_owned(),
                offset,
            });
        }
        let entry = rmp_serde::from_slice(body).map_err(|source| ReadError::Decode {
            path: path.to_owned(),
            offset,
            source,
        })?;
        entries.push(entry);
        offset += HEADER + body.len();
    }
    Ok(())
}

/// Checksum and body of the record at `offset`, if it is there in full.
fn record_at(bytes: &[u8], offset: usize) -> Option<(u32, &[u8])> {
    let header = bytes.get(offset..offset + HEADER)?;
    let length = u32::from_le_bytes(header[..4].try_into().ok()?) as usize;
    let checksum = u32::from_le_bytes(header[4..].try_into().ok()?);
    let body = bytes.get(offset + HEADER..offset + HEADER + length)?;
    Some((checksum, body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Journal, JournalError};
    use primerl_core::turn::{FinishReason, ForkReason};
    use primerl_core::{PolicyVersion, RolloutId, Turn, VersionRun, WorkerId};

    fn turn_finished() -> Event {
        Event::TurnFinished {
            rollout: RolloutId(7),
            turn: Turn {
                session: "seat".into(),
                parent: None,
                fork: Some(ForkReason::FirstTurn),
                prompt_suffix: vec![1, 2, 300_000].into(),
                sampled: vec![4, 5].into(),
                logprobs: vec![-0.25, -1.5].into(),
                versions: vec![VersionRun {
                    version: PolicyVersion(3),
                    n_tokens: 2,
                }],
                temperature: 1.0,
                finish: FinishReason::Stop,
                context_digest: u128::MAX - 5,
                answer_digest: 6,
            },
        }
    }

    fn events() -> Vec<Event> {
        vec![
            Event::WorkerSeen {
                worker: WorkerId(1),
            },
            turn_finished(),
            Event::Tick,
            Event::ShutdownRequested {
                reason: "test".into(),
            },
        ]
    }

    fn write(folder: &Path) {
        let mut journal = Journal::create(folder).expect("creates");
        for (index, event) in events().iter().enumerate() {
            let number = journal.append(Time(index as u64), event).expect("appends");
            assert_eq!(number, index as u64 + 1);
        }
    }

    #[test]
    fn what_was_appended_is_read_back() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("journal");
        write(&path);
        let entries = read(&path).expect("reads");
        assert_eq!(entries.len(), events().len());
        for (index, (Entry(time, event), expected)) in entries.iter().zip(events()).enumerate() {
            assert_eq!(*time, Time(index as u64));
            assert_eq!(format!("{event:?}"), format!("{expected:?}"));
        }
    }

    #[tokio::test]
    async fn a_requested_sync_becomes_visible() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut journal = Journal::create(folder.path()).expect("creates");
        let number = journal.append(Time(0), &Event::Tick).expect("appends");
        journal.request_sync().expect("asks");
        let mut progress = journal.progress();
        let waited = progress.wait_for(|progress| progress.durable >= number);
        tokio::time::timeout(std::time::Duration::from_secs(10), waited)
            .await
            .expect("within the deadline")
            .expect("the writer lives");
    }

    #[test]
    fn a_cut_record_ends_the_journal_and_a_damaged_one_is_an_error() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        write(folder.path());
        let file = folder.path().join("000000000000.log");
        let whole = std::fs::read(&file).expect("reads");
        std::fs::write(&file, &whole[..whole.len() - 1]).expect("writes");
        assert_eq!(
            read(folder.path()).expect("reads").len(),
            events().len() - 1
        );
        let mut damaged = whole;
        damaged[HEADER] ^= 0xff;
        std::fs::write(&file, &damaged).expect("writes");
        assert!(matches!(
            read(folder.path()),
            Err(ReadError::Checksum { offset: 0, .. })
        ));
    }

    #[test]
    fn a_journal_is_not_continued_by_another_run() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        write(folder.path());
        assert!(matches!(
            Journal::create(folder.path()),
            Err(JournalError::NotEmpty { .. })
        ));
    }
}
