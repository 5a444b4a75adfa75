use super::*;
use crate::journal::Journal;
use primerl_core::testing::turn;
use primerl_core::{Event, RolloutId, Time};
use std::fs;

fn event(number: u64) -> Event {
    Event::TurnFinished {
        rollout: RolloutId(number),
        turn: turn(None, &[1, 2], &[3; 40], number),
    }
}

/// Numbers of the next rollouts.
fn read(follower: &mut Follower) -> Vec<u64> {
    let mut found = Vec::new();
    while let Some((place, Entry(_, event))) = follower.next_event().expect("reads") {
        let Event::TurnFinished { rollout, .. } = event else {
            panic!("another event");
        };
        let Entry(_, again) = read_at(&follower.folder, place).expect("is at its place");
        assert!(matches!(again, Event::TurnFinished { rollout: it, .. } if it == rollout));
        found.push(rollout.0);
    }
    found
}

#[test]
fn added_events_are_read() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let mut early = Follower::begin(folder.path(), 0);
    assert!(read(&mut early).is_empty(), "nothing is there yet");
    let mut journal = Journal::create(folder.path()).expect("creates");
    for number in 0..5 {
        journal.append(Time(0), &event(number)).expect("appends");
    }
    drop(journal);
    assert_eq!(read(&mut early), [0, 1, 2, 3, 4]);
    assert!(read(&mut early).is_empty());
    let mut late = Follower::begin(folder.path(), 3);
    assert_eq!(read(&mut late), [3, 4]);

    // A record comes byte by byte.
    let path = path_of(folder.path(), 0, SEGMENT);
    let whole = fs::read(&path).expect("reads");
    let record = whole[whole.len() - (whole.len() - MAGIC.len()) / 5..].to_vec();
    for cut in [1, 11, 12, 40, record.len() - 1] {
        fs::write(&path, [&whole[..], &record[..cut]].concat()).expect("writes");
        assert!(read(&mut early).is_empty(), "{cut} bytes");
    }
    fs::write(&path, [&whole[..], &record[..]].concat()).expect("writes");
    assert_eq!(read(&mut early), [4]);
    assert_eq!(early.read(), 6);
}

#[test]
fn segments_follow_each_other_and_a_missing_one_is_an_error() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let segment = |number: u64| path_of(folder.path(), number, SEGMENT);
    let write = |first: u64, count: u64| {
        let apart = tempfile::tempdir().expect("a temporary folder");
        let mut journal = Journal::create(&apart.path().join("j")).expect("creates");
        for number in first..first + count {
            journal.append(Time(0), &event(number)).expect("appends");
        }
        drop(journal);
        fs::rename(path_of(&apart.path().join("j"), 0, SEGMENT), segment(first)).expect("renames");
    };
    write(0, 3);
    let mut follower = Follower::begin(folder.path(), 1);
    assert_eq!(read(&mut follower), [1, 2]);
    // A segment that was created and is empty.
    fs::write(segment(3), b"PRI").expect("writes");
    assert!(read(&mut follower).is_empty());
    fs::remove_file(segment(3)).expect("removes");
    write(3, 2);
    write(5, 1);
    assert_eq!(read(&mut follower), [3, 4, 5]);
    write(6, 1);
    assert_eq!(read(&mut follower), [6]);
    fs::remove_file(segment(5)).expect("removes");
    let mut lost = Follower::begin(folder.path(), 0);
    let error = loop {
        match lost.next_event() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("waits for what is gone"),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, ReadError::Gap { expected: 5, .. }),
        "{error}"
    );
}
