use super::*;
use crate::journal::restore::restore_with;
use crate::journal::{
    Entry, Identity, Journal, RestoreError, Restored, Tail, path_of, read_from, restore,
    write_snapshot,
};
use primerl_core::testing::config;
use primerl_core::{Core, WorkerId};
use std::fs;

fn begun(folder: &Path) -> Journal {
    let core = Core::new(config()).expect("a valid config");
    write_snapshot(folder, 0, &Identity::new(), &core).expect("is written");
    Journal::resume(folder, &Tail::default()).expect("begins")
}

/// A journal whose third event is of a kind that this version does not know.
fn poisoned() -> tempfile::TempDir {
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut journal = begun(place.path());
    for worker in 0..5 {
        let worker = WorkerId(worker);
        journal
            .append(Time(worker.0), &Event::WorkerSeen { worker })
            .expect("appends");
    }
    drop(journal);
    let segment = path_of(place.path(), 0, SEGMENT);
    let Record { offset, length, .. } =
        find(place.path(), 3).expect("reads").expect("there is one");
    let body = rmp_serde::to_vec_named(&(Time(2), "of_another_version")).expect("is written");
    let mut bytes = fs::read(&segment).expect("reads");
    let record = [&header(&body)[..], &body].concat();
    bytes.splice(offset as usize..offset as usize + length, record);
    fs::write(&segment, bytes).expect("writes");
    place
}

fn seen(folder: &Path) -> Vec<(u64, String)> {
    let mut seen = Vec::new();
    read_from(folder, 0, |number, Entry(_, event)| {
        seen.push((number, format!("{event:?}")));
    })
    .expect("is whole");
    seen
}

#[test]
fn an_event_that_is_refused_is_named_and_can_be_skipped() {
    let place = poisoned();
    let folder = place.path();
    let segment = path_of(folder, 0, SEGMENT);
    let (path, offset) = place_of(folder, 3).expect("reads").expect("there is one");
    assert_eq!(path, segment);
    let refused = restore(folder).err().expect("is refused");
    assert!(matches!(refused, RestoreError::Refused { number: 3, .. }));
    let text = refused.to_string();
    let expected = [
        segment.display().to_string(),
        format!("byte {offset}"),
        "event 3".into(),
        "--skip-event 3".into(),
    ];
    assert!(expected.iter().all(|words| text.contains(words)), "{text}");

    let before = fs::read(&segment).expect("reads");
    let copy = folder.join("000000000000.log.before_skip_3");
    let skipped = Skipped::LeftOut {
        path: segment.clone(),
        offset,
        copy: copy.clone(),
    };
    assert_eq!(skip(folder, 3).expect("is skipped"), skipped);
    assert_eq!(fs::read(copy).expect("is kept"), before);
    let restored = restore(folder).unwrap_or_else(|error| panic!("{error}"));
    assert_eq!(restored.tail.events, 5);
    let events = seen(folder);
    assert_eq!(events.len(), 5);
    assert_eq!(events[2], (3, "Tick".to_owned()));
    assert!(events[3].1.contains("WorkerId(3)"), "{events:?}");
    // The same command again, after a snapshot has made it unnecessary.
    let Restored { core, .. } = restored;
    write_snapshot(folder, 5, &Identity::new(), &core).expect("writes");
    assert_eq!(skip(folder, 3).expect("is covered"), Skipped::Covered);
    let missing = skip(folder, 6).expect_err("is not there").to_string();
    assert!(missing.contains("holds no event 6"), "{missing}");
}

#[test]
fn an_event_that_the_core_fails_at_is_named_too() {
    let place = tempfile::tempdir().expect("a temporary folder");
    let mut journal = begun(place.path());
    for at in 0..3 {
        journal.append(Time(at), &Event::Tick).expect("appends");
    }
    drop(journal);
    let handle = |core: &mut Core, event, now: Time| {
        assert!(now < Time(1), "an invariant is broken");
        core.handle(event, now)
    };
    let refused = restore_with(place.path(), handle).err().expect("fails");
    let text = refused.to_string();
    let expected = [
        "000000000000.log",
        "event 2 (`tick`)",
        "an invariant is broken",
    ];
    assert!(expected.iter().all(|words| text.contains(words)), "{text}");
}
