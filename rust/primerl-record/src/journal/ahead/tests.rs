use super::*;
use crate::journal::{HEADER, Identity, Journal, MAGIC, SEGMENT, path_of, restore, write_snapshot};
use primerl_core::config::RunConfig;
use primerl_core::testing::config;
use primerl_core::testing::simulator::batching::EngineModel;
use primerl_core::testing::simulator::{Faults, Rewards, Scenario, Simulator};
use primerl_core::{Core, Effect, Event, Time, WorkerId};
use std::fs;
use std::path::PathBuf;

/// A run with losses and restarts, of several chunks.
fn story() -> (primerl_core::Config, Vec<(Time, Event)>) {
    let config = primerl_core::Config {
        run: RunConfig {
            max_steps: 60,
            ..config().run
        },
        ..config()
    };
    let mut simulator = Simulator::new(Scenario {
        seed: 3,
        config: config.clone(),
        engines: 2,
        workers_per_environment: 2,
        rollouts_per_worker: 3,
        examples: 40,
        whole_groups: false,
        rewards: Rewards::Numbers,
        engine_model: EngineModel::Timed { capacity: None },
        longest_answer: 8,
        faults: Faults {
            rollout_fails: 0.05,
            worker_dies: 0.01,
            orchestrator_dies: 0.3,
            ..Faults::default()
        },
        kill: None,
        give_up: Time(3_600_000_000),
    });
    simulator.recorded = Some(Vec::new());
    simulator.run();
    let events = simulator.recorded.take().expect("it was set");
    assert!(events.len() > 3 * CHUNK, "{} events", events.len());
    (config, events)
}

/// The journal of a run in `segments` pieces, with the snapshot it began with; and the pieces.
fn written(
    config: &primerl_core::Config,
    events: &[(Time, Event)],
    segments: usize,
) -> (tempfile::TempDir, Vec<PathBuf>) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let core = Core::new(config.clone()).expect("a valid config");
    write_snapshot(folder.path(), 0, &Identity::new(), &core).expect("writes");
    let mut first = 0;
    let mut paths = Vec::new();
    for piece in events.chunks(events.len().div_ceil(segments).max(1)) {
        let apart = tempfile::tempdir().expect("a temporary folder");
        let mut journal = Journal::create(apart.path()).expect("creates");
        for (now, event) in piece {
            journal.append(*now, event).expect("appends");
        }
        drop(journal);
        let path = path_of(folder.path(), first, SEGMENT);
        fs::copy(path_of(apart.path(), 0, SEGMENT), &path).expect("copies");
        paths.push(path);
        first += piece.len() as u64;
    }
    (folder, paths)
}

/// One event at a time, on one thread.
fn one_by_one(config: &primerl_core::Config, folder: &Path) -> (Core, Vec<Effect>, Tail) {
    let mut core = Core::new(config.clone()).expect("a valid config");
    let mut effects = Vec::new();
    let tail = decode_from(folder, 0, |Entry(now, event)| {
        let said = core.handle(event, now);
        effects.extend(said.into_iter().filter(Effect::is_durable));
        true
    })
    .expect("reads");
    (core, effects, tail)
}

fn same(config: &primerl_core::Config, folder: &Path) -> Tail {
    let (core, effects, tail) = one_by_one(config, folder);
    let restored = restore(folder).expect("restores");
    assert_eq!(restored.core.fingerprint(), core.fingerprint());
    assert_eq!(format!("{:?}", restored.effects), format!("{effects:?}"));
    assert_eq!(restored.tail, tail);
    tail
}

#[test]
fn reading_ahead_gives_the_same_events() {
    let (config, events) = story();
    let (folder, paths) = written(&config, &events, 3);
    let whole = same(&config, folder.path());
    assert_eq!((whole.events, whole.torn), (events.len() as u64, 0));
    // The core of the simulated run, which never read a file.
    let mut core = Core::new(config.clone()).expect("a valid config");
    for (now, event) in events {
        core.handle(event, now);
    }
    let restored = restore(folder.path()).expect("restores");
    assert_eq!(restored.core.fingerprint(), core.fingerprint());
    // A crash cut the last record short.
    let last = &paths[2];
    let bytes = fs::read(last).expect("reads");
    fs::write(last, &bytes[..bytes.len() - 1]).expect("writes");
    let torn = same(&config, folder.path());
    assert_eq!(torn.events, whole.events - 1);
    assert!(torn.torn > 0);
}

#[test]
fn damage_in_the_middle_is_named_after_all_that_comes_before_it() {
    let (config, events) = story();
    let (folder, paths) = written(&config, &events, 3);
    let mut bytes = fs::read(&paths[1]).expect("reads");
    // The second record of the segment.
    let first = u32::from_le_bytes(bytes[8..12].try_into().expect("four bytes")) as usize;
    let offset = MAGIC.len() + HEADER + first;
    bytes[offset + HEADER] ^= 1;
    fs::write(&paths[1], &bytes).expect("writes");
    let mut seen = 0;
    let error = read_from(folder.path(), 0, |number, _| seen = number).expect_err("is damaged");
    assert_eq!(seen, events.len().div_ceil(3) as u64 + 1);
    let text = error.to_string();
    let named = format!("{}: the record at byte {offset} ", paths[1].display());
    assert!(text.starts_with(&named), "{text}");
    let restored = restore(folder.path()).err().expect("is damaged");
    assert_eq!(restored.to_string(), text);
}

#[test]
fn an_empty_journal_is_its_snapshot() {
    let config = config();
    let (folder, _) = written(&config, &[], 1);
    let tail = same(&config, folder.path());
    assert_eq!(tail, Tail::default());
    drop(Journal::create(&folder.path().join("begun")).expect("creates"));
    let begun = read_from(&folder.path().join("begun"), 0, |_, _| panic!("no event"));
    let begun = begun.expect("reads");
    assert_eq!((begun.events, begun.torn), (0, 0));
    assert!(begun.segment.is_some());
}

/// Neither half waits for the other after it is gone.
#[test]
fn a_panic_is_passed_on() {
    let worker = WorkerId(1);
    let many = vec![(Time(0), Event::WorkerSeen { worker }); CHUNK * (CHUNKS_AHEAD + 3)];
    let (folder, _) = written(&config(), &many, 1);
    let caught = std::panic::catch_unwind(|| {
        read_from(folder.path(), 0, |number, _| {
            assert_ne!(number, 2, "of the taker");
        })
    });
    assert!(caught.is_err());
}
