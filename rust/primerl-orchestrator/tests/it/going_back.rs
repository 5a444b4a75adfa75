//! A run goes back to a checkpoint of its trainer, with its whole state at that time.

use crate::common::engine::Engine;
use crate::common::session::Session;
use crate::common::trainer::{self, Batch};
use crate::common::{Place, prepared, read_lines};
use primerl_core::Step;
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::RunError;
use primerl_record::journal;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use tokio::net::TcpListener;

const SETTINGS: &str = "max_async_level = 2\nmax_steps = 8";
const LAST_STEP: u64 = 8;

async fn start(place: &Place, engine: &Engine, back_to: Option<u64>) -> Session {
    let prepared = prepared(place.config(SETTINGS, ""));
    Session::start(prepared.going_back_to(back_to.map(Step)), engine).await
}

/// Trains these steps, and reports a checkpoint after each, which is kept if there is a folder for it.
async fn train(
    session: &Session,
    place: &Place,
    steps: std::ops::RangeInclusive<u64>,
) -> Vec<Batch> {
    let (url, output) = (&session.orchestrator.url, place.output());
    trainer::publish(url, &output, steps.start() - 1).await;
    let mut batches = Vec::new();
    for step in steps {
        let bytes = trainer::batch_bytes(url, step, 0).await.unwrap();
        batches.push(Batch::decode(&bytes));
        trainer::publish(url, &output, step).await;
        if step == LAST_STEP {
            break; // The run is over, and may answer nothing more.
        }
        let saved = json!({"step": step, "saved": step});
        let (status, answer) = session
            .orchestrator
            .post("/trainer/checkpoint", &saved)
            .await;
        assert_eq!(status, 200, "{answer}");
    }
    batches
}

/// The trainer's part of a checkpoint.
fn folder_for(output: &Path, step: u64) -> PathBuf {
    let folder = output.join(format!("checkpoints/step_{step}/orchestrator"));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

fn names(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

fn steps(lines: &[Value]) -> Vec<u64> {
    lines
        .iter()
        .map(|it| it["step"].as_u64().unwrap())
        .collect()
}

fn rollouts(batches: &[Batch]) -> BTreeSet<u64> {
    let sequences = batches.iter().flat_map(Batch::sequences);
    sequences.map(|sequence| sequence.rollout).collect()
}

async fn refused(place: &Place, step: u64) -> String {
    let going_back = || prepared(place.config(SETTINGS, "")).going_back_to(Some(Step(step)));
    let ahead = going_back().check_folder().expect_err("no such state");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let started = going_back().start(listener);
    let error = started.await.err().expect("there is no such state");
    assert!(matches!(error, RunError::NoState { .. }) && error.is_input());
    assert_eq!(ahead.to_string(), error.to_string());
    error.to_string()
}

/// A run that was fetched from a store has no journal; what it was begun with is in its checkpoint.
fn check_asks_the_checkpoint(place: &Place, step: u64) {
    let (journal, away) = (place.output().join("journal"), place.path("journal"));
    std::fs::rename(&journal, &away).unwrap();
    let check = |settings: &str| {
        let prepared = prepared(place.config(settings, ""));
        prepared.going_back_to(Some(Step(step))).check_folder()
    };
    check(SETTINGS).expect("it is the same run");
    let changed = check(&format!("{SETTINGS}\nseed = 5")).expect_err("it is another");
    assert!(matches!(&changed, RunError::Changed { name, .. } if name == "seed"));
    assert!(!journal.exists(), "nothing is written");
    std::fs::rename(&away, &journal).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_back_to_what_it_was_at_a_checkpoint() {
    let place = Place::new();
    let output = place.output();
    let engine = Engine::start(MockConfig::default()).await;
    let folder = folder_for(&output, 2);
    let session = start(&place, &engine, None).await;
    let first = train(&session, &place, 1..=6).await;
    session.stop().await;

    // Batches that were cut by then and not trained yet are kept with the core, and nothing else.
    let kept = names(&folder);
    let snapshot = kept
        .iter()
        .find(|name| name.ends_with(".snapshot"))
        .unwrap();
    let cut = 2 + kept.len() as u64 - 1;
    assert!((2..=5).contains(&cut), "{kept:?}");
    let expected: BTreeSet<String> = (3..=cut)
        .map(|step| format!("step_{step}"))
        .chain([snapshot.clone()])
        .collect();
    assert_eq!(kept, expected);
    let no_folder = output.join("checkpoints/step_4");
    assert!(!no_folder.exists(), "the trainer's checkpoints are its own");
    let in_spool: Vec<Vec<u8>> = (3..=cut)
        .map(|step| std::fs::read(folder.join(format!("step_{step}/rank_0.msgpack"))).unwrap())
        .collect();
    let before = names(&output.join("journal"));
    let told = refused(&place, 4).await;
    assert!(told.contains("checkpoint of step 4"), "{told}");
    assert_eq!(names(&output.join("journal")), before);
    assert_eq!(
        steps(&read_lines(&output.join("steps.jsonl")))[..6],
        [1, 2, 3, 4, 5, 6]
    );

    check_asks_the_checkpoint(&place, 2);

    let session = start(&place, &engine, Some(2)).await;
    trainer::resume(&session.orchestrator.url, 2).await;
    let again = train(&session, &place, 3..=8).await;
    for (batch, kept) in again.iter().zip(&in_spool) {
        assert_eq!(batch.step, Batch::decode(kept).step);
        let was = &first[batch.step as usize - 1];
        assert_eq!(
            rollouts(std::slice::from_ref(batch)),
            rollouts(std::slice::from_ref(was))
        );
    }
    let end = session.orchestrator.end().await.unwrap();
    session.worker.abort();
    assert!(end.0.contains("all 8 steps are trained"), "{end:?}");

    // Two timelines with the same beginning: each step once, each rollout once, and the counters add up.
    let mut trained = first[..2].to_vec();
    trained.extend(again);
    assert_eq!(rollouts(&trained).len(), 8 * 8);
    let lines = read_lines(&output.join("steps.jsonl"));
    assert_eq!(steps(&lines), (1..=8).collect::<Vec<_>>());
    let replaced = steps(&read_lines(&output.join("replaced_steps.jsonl")));
    assert_eq!(replaced.first(), Some(&(cut + 1)));
    let restored = journal::restore(&output.join("journal")).unwrap();
    restored.core.check().unwrap();
    let counters = restored.core.counters();
    assert_eq!(counters.trained, 8 * 8);
    assert_eq!(counters.dispatched, counters.ended());
    // The whole run can be shown from its beginning, and so can the one that was replaced.
    for name in ["journal", "replaced_journal"] {
        let mut events = 0;
        let tail = journal::read_from(&output.join(name), 0, |_, _| events += 1).unwrap();
        assert_eq!(tail.events, events);
    }
    engine.stop().await;
}
