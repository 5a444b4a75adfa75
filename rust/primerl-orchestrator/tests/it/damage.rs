//! Files of the output folder that were damaged, lost or are of another journal, between two starts.

use crate::common::engine::Engine;
use crate::common::session::Session;
use crate::common::trainer::{self, Batch};
use crate::common::{Place, prepared, read_lines};
use primerl_core::Event;
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::RunError;
use primerl_record::{inspect, journal};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const SETTINGS: &str = "max_async_level = 2\nmax_steps = 8";

async fn start(place: &Place, engine: &Engine) -> Session {
    Session::start(prepared(place.config(SETTINGS, "")), engine).await
}

/// Trains these steps, without a checkpoint.
async fn train(
    session: &Session,
    place: &Place,
    steps: std::ops::RangeInclusive<u64>,
) -> Vec<Vec<u8>> {
    let (url, output) = (&session.orchestrator.url, place.output());
    trainer::resume(url, steps.start() - 1).await;
    trainer::publish(url, &output, steps.start() - 1).await;
    let mut batches = Vec::new();
    for step in steps {
        batches.push(trainer::batch_bytes(url, step, 0).await.unwrap());
        trainer::publish(url, &output, step).await;
    }
    batches
}

fn spooled(output: &Path, step: u64) -> PathBuf {
    output.join(format!("spool/step_{step}/rank_0.msgpack"))
}

/// Once the batches up to this step are cut and written, and with these weights no others will be.
async fn all_is_cut(session: &Session, output: &Path, last: u64) {
    let is_whole = |status: &serde_json::Value| {
        assert!(
            status["run"]["step"].as_u64().unwrap() <= last,
            "{status:#}"
        );
        status["run"]["step"] == last && spooled(output, last).exists()
    };
    session.orchestrator.until("all is cut", is_whole).await;
}

/// Changes one bit of a step's batch; returns the changed bytes.
fn damage(output: &Path, step: u64) -> Vec<u8> {
    let mut body = std::fs::read(spooled(output, step)).unwrap();
    let middle = body.len() / 2;
    body[middle] ^= 4;
    std::fs::write(spooled(output, step), &body).unwrap();
    body
}

/// Steps whose checksums are in the journal.
fn noted(output: &Path) -> BTreeSet<u64> {
    let mut steps = BTreeSet::new();
    let note = |_, journal::Entry(_, event)| {
        if let Event::BatchWritten { step, .. } = event {
            steps.insert(step.0);
        }
    };
    journal::read_from(&output.join("journal"), 0, note).unwrap();
    steps
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_damaged_batch_is_cut_again_or_given_to_no_trainer() {
    let place = Place::new();
    let output = place.output();
    let engine = Engine::start(MockConfig::default()).await;
    let session = start(&place, &engine).await;
    let first = train(&session, &place, 1..=3).await;
    session.stop().await;
    assert!(noted(&output).is_superset(&(1..=3).collect()));

    let damaged = damage(&output, 2);
    std::fs::remove_file(spooled(&output, 3)).unwrap();
    let session = start(&place, &engine).await;
    assert_eq!(train(&session, &place, 1..=3).await, first);
    session.stop().await;
    assert_eq!(std::fs::read(spooled(&output, 2)).unwrap(), first[1]);
    let aside = output.join("replaced_spool/step_2/rank_0.msgpack");
    assert_eq!(std::fs::read(aside).unwrap(), damaged);
    assert_eq!(inspect::check(&output).unwrap().broken, None);

    // As if the oldest events had been deleted to save room.
    std::fs::remove_file(output.join("journal/000000000000.snapshot")).unwrap();
    damage(&output, 2);
    let session = start(&place, &engine).await;
    assert_eq!(train(&session, &place, 1..=1).await, first[..1]);
    let url = session.orchestrator.url.clone();
    let given = tokio::spawn(async move { trainer::batch_bytes(&url, 2, 0).await });
    let error = session.orchestrator.end().await.unwrap_err();
    assert!(
        matches!(&*error, RunError::DamagedBatch { step: 2, .. }),
        "{error}"
    );
    session.worker.abort();
    // The connection may end without an answer.
    assert!(!matches!(given.await, Ok(Some(_))));
    engine.stop().await;
}

fn copy(from: &Path, to: &Path) {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_journal_that_lost_its_end_does_not_know_is_set_aside() {
    let place = Place::new();
    let output = place.output();
    let engine = Engine::start(MockConfig::default()).await;
    let session = start(&place, &engine).await;
    let first = train(&session, &place, 1..=2).await;
    let (known, left) = (5, 8);
    all_is_cut(&session, &output, known).await;
    session.stop().await;
    let (kept, journal) = (place.path("kept"), output.join("journal"));
    copy(&journal, &kept);
    let session = start(&place, &engine).await;
    train(&session, &place, 3..=6).await;
    all_is_cut(&session, &output, left).await;
    session.stop().await;
    let left_behind = std::fs::read(spooled(&output, left)).unwrap();

    copy(&kept, &journal);
    let session = start(&place, &engine).await;
    let aside = output.join(format!("replaced_spool/step_{left}/rank_0.msgpack"));
    assert_eq!(std::fs::read(aside).unwrap(), left_behind);
    let again = train(&session, &place, 3..=8).await;
    let end = session.orchestrator.end().await.unwrap();
    session.worker.abort();
    assert!(end.0.contains("all 8 steps are trained"), "{end:?}");
    assert_eq!(inspect::check(&output).unwrap().broken, None);
    let steps = |name: &str| -> Vec<u64> {
        let lines = read_lines(&output.join(name));
        lines
            .iter()
            .map(|line| line["step"].as_u64().unwrap())
            .collect()
    };
    assert_eq!(steps("steps.jsonl"), (1..=8).collect::<Vec<_>>());
    assert_eq!(
        steps("replaced_steps.jsonl"),
        (known + 1..=left).collect::<Vec<_>>()
    );
    let sequences = first.iter().chain(&again).flat_map(|body| {
        let batch = Batch::decode(body);
        batch
            .sequences()
            .into_iter()
            .map(|sequence| sequence.rollout)
    });
    assert_eq!(sequences.collect::<BTreeSet<_>>().len(), 8 * 8);
    engine.stop().await;
}
