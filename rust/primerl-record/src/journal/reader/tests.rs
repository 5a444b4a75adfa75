use super::*;
use crate::journal::{
    Identity, Journal, Restored, path_of, read_from, restore, retain, write_snapshot,
};
use primerl_core::testing::{config, turn};
use primerl_core::{Core, RolloutId, WorkerId};
use proptest::prelude::*;
use std::fs;

fn events() -> Vec<Event> {
    vec![
        Event::WorkerSeen {
            worker: WorkerId(1),
        },
        Event::TurnFinished {
            rollout: RolloutId(7),
            turn: turn(None, &[1, 2, 300_000], &[4, 5], 3),
        },
        Event::Tick,
        Event::ShutdownRequested {
            reason: "test".into(),
        },
    ]
}

/// A journal with `events()`; its folder and its only segment.
fn written() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut journal = Journal::create(folder.path()).expect("creates");
    for (index, event) in events().iter().enumerate() {
        let number = journal.append(Time(index as u64), event).expect("appends");
        assert_eq!(number, index as u64 + 1);
    }
    drop(journal);
    let segment = path_of(folder.path(), 0, SEGMENT);
    (folder, segment)
}

fn read(folder: &Path) -> Result<(Vec<(u64, Entry)>, Tail), ReadError> {
    let mut entries = Vec::new();
    let tail = read_from(folder, 0, |number, entry| entries.push((number, entry)))?;
    Ok((entries, tail))
}

#[test]
fn what_was_appended_is_read_back() {
    let (folder, segment) = written();
    let (entries, tail) = read(folder.path()).expect("reads");
    assert_eq!(entries.len(), events().len());
    for (index, ((number, Entry(time, event)), expected)) in
        entries.iter().zip(events()).enumerate()
    {
        assert_eq!((*number, *time), (index as u64 + 1, Time(index as u64)));
        assert_eq!(format!("{event:?}"), format!("{expected:?}"));
    }
    let length = fs::metadata(&segment).expect("is there").len();
    assert_eq!(tail.segment, Some((segment, length)));
    assert_eq!((tail.events, tail.torn), (4, 0));
    let mut numbers = Vec::new();
    read_from(folder.path(), 3, |number, _| numbers.push(number)).expect("reads");
    assert_eq!(numbers, [4]);
}

#[test]
fn records_of_any_size_are_read_across_pieces_of_a_file() {
    let tokens = PIECE as usize / 4;
    let sizes = [1, tokens / 3, tokens - 20, tokens, 3 * tokens, 2].repeat(3);
    let events = sizes.iter().map(|size| Event::TurnFinished {
        rollout: RolloutId(7),
        turn: turn(None, &vec![*size as u32; *size], &[4], 3),
    });
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut journal = Journal::create(folder.path()).expect("creates");
    for event in events.clone() {
        journal.append(Time(0), &event).expect("appends");
    }
    drop(journal);
    let segment = path_of(folder.path(), 0, SEGMENT);
    // A file after a power loss, also longer than a piece.
    for zeros in [0, 5, 3 * PIECE] {
        let length = fs::metadata(&segment).expect("is there").len();
        let file = fs::OpenOptions::new().append(true).open(&segment);
        file.and_then(|file| file.set_len(length + zeros))
            .expect("grows");
        let (entries, tail) = read(folder.path()).expect("reads");
        let read = entries.into_iter().map(|(_, entry)| entry.1);
        let same = read
            .zip(events.clone())
            .filter(|(read, event)| format!("{read:?}") == format!("{event:?}"));
        assert_eq!(same.count(), sizes.len());
        assert_eq!(
            (tail.segment, tail.torn),
            (Some((segment.clone(), length)), zeros)
        );
        let file = fs::OpenOptions::new().write(true).open(&segment);
        file.and_then(|file| file.set_len(length)).expect("shrinks");
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

/// Cut anywhere, the journal is what was whole, and continues from there.
#[test]
fn a_journal_that_was_cut_short_continues_from_its_last_whole_record() {
    let (folder, segment) = written();
    let whole = fs::read(&segment).expect("reads");
    let mut kept_before = 0;
    for length in 0..whole.len() {
        fs::write(&segment, &whole[..length]).expect("writes");
        let (entries, tail) = read(folder.path()).expect("reads");
        assert!(entries.len() == kept_before || entries.len() == kept_before + 1);
        kept_before = entries.len();
        let mut journal = Journal::resume(folder.path(), &tail).expect("resumes");
        let next = journal.append(Time(9), &Event::Tick).expect("appends");
        assert_eq!(next, kept_before as u64 + 1);
        drop(journal);
        let (entries, tail) = read(folder.path()).expect("reads");
        assert_eq!(entries.last().map(|(number, _)| *number), Some(next));
        assert_eq!((tail.events, tail.torn), (next, 0));
    }
    assert_eq!(kept_before, 3);
}

proptest! {
    /// Every flipped bit is noticed, wherever it is; none looks like a crash, after which the rest would be removed.
    #[test]
    fn a_flipped_bit_is_never_taken_for_data(at in 0_usize..100_000, bit in 0_u8..8) {
        let (folder, segment) = written();
        let mut bytes = fs::read(&segment).expect("reads");
        let at = at % bytes.len();
        bytes[at] ^= 1 << bit;
        fs::write(&segment, &bytes).expect("writes");
        let error = read(folder.path()).expect_err("is damaged");
        prop_assert!(matches!(error, ReadError::Checksum { .. } | ReadError::Format { .. }), "{error}");
    }
}

#[test]
fn zeros_after_a_power_loss_are_a_torn_tail() {
    let (folder, segment) = written();
    let mut bytes = fs::read(&segment).expect("reads");
    bytes.extend([0; 4096]);
    fs::write(&segment, &bytes).expect("writes");
    let (entries, tail) = read(folder.path()).expect("reads");
    assert_eq!((entries.len(), tail.torn), (4, 4096));
}

#[test]
fn a_missing_or_shortened_segment_is_named() {
    let (folder, first) = written();
    let second = path_of(folder.path(), 4, SEGMENT);
    fs::write(&second, MAGIC).expect("writes");
    assert_eq!(read(folder.path()).expect("reads").1.events, 4);
    let whole = fs::read(&first).expect("reads");
    fs::write(&first, &whole[..whole.len() - 1]).expect("writes");
    assert!(matches!(read(folder.path()), Err(ReadError::Cut { .. })));
    fs::write(&first, &whole).expect("writes");
    fs::rename(&second, path_of(folder.path(), 5, SEGMENT)).expect("renames");
    let error = read(folder.path()).expect_err("has a gap").to_string();
    assert!(
        error.contains("a file of the journal is missing"),
        "{error}"
    );
}

#[test]
fn events_that_a_snapshot_covers_are_missed() {
    let (folder, segment) = written();
    write_snapshot(folder.path(), 4, &Identity::new(), &core()).expect("writes");
    assert_eq!(restored(folder.path()).tail.events, 4);
    let refused = || {
        restore(folder.path())
            .err()
            .expect("is refused")
            .to_string()
    };
    let whole = fs::read(&segment).expect("reads");
    fs::write(&segment, &whole[..whole.len() - 1]).expect("writes");
    assert!(
        refused().contains("after number 3, and a snapshot covers 4"),
        "{}",
        refused()
    );
    fs::remove_file(&segment).expect("removes");
    assert!(
        refused().contains("after number 0, and a snapshot covers 4"),
        "{}",
        refused()
    );
}

fn core() -> Core {
    Core::new(config()).expect("a valid config")
}

fn restored(folder: &Path) -> Restored {
    restore(folder).expect("restores")
}

#[test]
fn a_damaged_snapshot_is_passed_over() {
    let (folder, _) = written();
    let folder = folder.path();
    let identity = Identity::from([("seed".into(), "0".into())]);
    write_snapshot(folder, 0, &identity, &core()).expect("writes");
    let mut later = core();
    read_from(folder, 0, |_, Entry(now, event)| {
        later.handle(event, now);
    })
    .expect("reads");
    write_snapshot(folder, 4, &identity, &later).expect("writes");
    let whole = restored(folder);
    assert_eq!((whole.remarks.len(), whole.tail.events), (0, 4));
    assert_eq!(whole.identity, identity);
    assert_eq!(whole.core.fingerprint(), later.fingerprint());
    let newest = path_of(folder, 4, super::super::SNAPSHOT);
    let mut bytes = fs::read(&newest).expect("reads");
    bytes[20] ^= 1;
    fs::write(&newest, &bytes).expect("writes");
    let mended = restored(folder);
    assert!(mended.remarks[0].contains("does not match its checksum"));
    assert_eq!(mended.core.fingerprint(), later.fingerprint());
    fs::remove_file(path_of(folder, 0, super::super::SNAPSHOT)).expect("removes");
    let error = restore(folder).err().expect("nothing is left").to_string();
    assert!(
        error.contains("no snapshot of the run can be read"),
        "{error}"
    );
}

#[test]
fn old_events_go_once_two_snapshots_cover_them() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let folder = folder.path();
    let core = core();
    for number in [0, 10, 20, 30] {
        write_snapshot(folder, number, &Identity::new(), &core).expect("writes");
        fs::write(path_of(folder, number, SEGMENT), [0; 1000]).expect("writes");
    }
    retain(folder, u64::MAX).expect("keeps");
    assert_eq!(fs::read_dir(folder).expect("lists").count(), 8);
    retain(folder, 0).expect("deletes");
    let kept = |extension| -> Vec<u64> {
        let files = files(folder, extension).expect("lists");
        files.into_iter().map(|(number, _)| number).collect()
    };
    assert_eq!(kept(super::super::SNAPSHOT), [20, 30]);
    assert_eq!(kept(SEGMENT), [20, 30]);
}
