//! A trainer's reports are accepted only if they can be true, and answered once they are on disk.

use crate::common::engine::Engine;
use crate::common::worker::Worker;
use crate::common::{Orchestrator, Place, trainer};
use primerl_core::{Event, Step};
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::envs::wire::WorkerRole;
use primerl_record::journal;
use serde_json::{Value, json};
use std::path::Path;

/// Refused with this code and message.
async fn refused(orchestrator: &Orchestrator, path: &str, body: Value, code: &str, words: &str) {
    let (status, answer) = orchestrator.post(path, &body).await;
    assert_eq!(status, 409, "{answer}");
    assert_eq!(answer["error"]["code"], code);
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains(words), "{message}");
}

/// Steps of the checkpoints in the journal on disk.
fn checkpoints(output: &Path) -> Vec<Step> {
    let mut steps = Vec::new();
    let note = |_, journal::Entry(_, event)| {
        if let Event::CheckpointSaved { step } = event {
            steps.push(step);
        }
    };
    journal::read_from(&output.join("journal"), 0, note).unwrap();
    steps
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_trainer_cannot_have_done_is_refused() {
    let place = Place::new();
    let output = place.output();
    let orchestrator = Orchestrator::start(place.config("max_async_level = 2", "")).await;
    let engine = Engine::start(MockConfig::default()).await;
    let url = orchestrator.url.clone();
    let join = json!({"url": engine.url});
    assert_eq!(orchestrator.post("/engines/join", &join).await.0, 200);
    let worker = Worker::register(&url, "task", WorkerRole::Train, "w").await;
    let worker = tokio::spawn(worker.work(1));
    trainer::publish(&url, &output, 0).await;
    orchestrator
        .until("two steps are cut", |status| {
            status["run"]["step"].as_u64() >= Some(2)
        })
        .await;

    let weights = |version: u64| {
        let manifest = trainer::write_weights(&output, version);
        json!({"version": version, "manifest": manifest})
    };
    let not_due = async |version, words| {
        let body = weights(version);
        refused(
            &orchestrator,
            "/trainer/weights",
            body,
            "version_not_due",
            words,
        )
        .await;
    };
    let not_trained = async |step: u64, words| {
        let body = json!({"step": step});
        refused(
            &orchestrator,
            "/trainer/checkpoint",
            body,
            "step_not_trained",
            words,
        )
        .await;
    };
    not_due(1, "has not fetched the batch of step 1").await;
    let first = trainer::batch_bytes(&url, 1, 0).await;
    not_due(2, "version 1 is due").await;
    not_trained(1, "a checkpoint of step 1 was reported").await;
    assert_eq!(trainer::batch_bytes(&url, 1, 0).await, first, "it is kept");
    trainer::publish(&url, &output, 1).await;
    not_trained(2, "version 1 is the newest").await;

    let before = checkpoints(&output).len();
    let saved = json!({"step": 1});
    assert_eq!(
        orchestrator.post("/trainer/checkpoint", &saved).await.0,
        200
    );
    let noted = checkpoints(&output).split_off(before);
    assert_eq!(noted, [Step(1)], "it was answered before it was on disk");
    assert_eq!(trainer::batch_bytes(&url, 1, 0).await, None);
    // A requested stop does not wait for workers: the orchestrator may be gone when this one reports.
    worker.abort();
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    engine.stop().await;
}
