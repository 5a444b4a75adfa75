//! An environment whose rewards come from all rollouts of a group together.

use crate::common::engine::Engine;
use crate::common::worker::{Worker, outcome};
use crate::common::{Orchestrator, Place, all_proved, chat, trainer, user};
use primerl_core::RolloutId;
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::envs::wire::{Lease, RegisterRequest, WorkerRole};
use serde_json::{Value, json};
use std::collections::BTreeSet;

const EVALUATION: &str = r#"
[[eval.env]]
id = "task"
num_examples = 2
rollouts_per_example = 9
"#;

fn whole(name: &str) -> RegisterRequest {
    RegisterRequest {
        listing: None,
        environment: "task".into(),
        role: WorkerRole::Train,
        name: name.into(),
        pid: std::process::id(),
        examples: 16,
        whole_groups: true,
        max_concurrent: Some(4),
    }
}

/// One group, leased whole in one answer although one rollout was requested.
async fn one_group(worker: &Worker) -> Vec<Lease> {
    let mut leases = Vec::new();
    while leases.is_empty() {
        leases = worker.lease(1).await.unwrap().rollouts;
    }
    let groups: BTreeSet<_> = leases.iter().map(|lease| lease.group).collect();
    assert_eq!((leases.len(), groups.len()), (4, 1));
    leases
}

async fn turn(lease: &Lease) {
    let body = json!({"messages": [user(&format!("example {}", lease.example))]});
    let (status, answer) = chat(lease, "s", &body).await;
    assert_eq!(status, 200, "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_cannot_take_whole_groups_are_refused_with_the_reason() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", EVALUATION)).await;
    Worker::register_as(&orchestrator.url, &whole("first")).await;
    let refused = async |request: RegisterRequest, code: &str, words: &str| {
        let body = serde_json::to_value(&request).unwrap();
        let (status, answer) = orchestrator.post("/envs/register", &body).await;
        assert_eq!((status, &answer["error"]["code"]), (409, &json!(code)));
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(message.contains(words), "{message}");
    };
    let differs = RegisterRequest {
        whole_groups: false,
        ..whole("other")
    };
    let words = "\"other\" registers with whole_groups = false, the first one with true";
    refused(differs, "whole_groups_differ", words).await;
    let small = RegisterRequest {
        max_concurrent: Some(3),
        ..whole("small")
    };
    let words = "groups of 4 rollouts, and worker \"small\" runs at most 3 at once";
    refused(small, "group_too_large", words).await;
    let evaluation = RegisterRequest {
        environment: "task-eval".into(),
        role: WorkerRole::Eval,
        max_concurrent: None,
        ..whole("evaluation")
    };
    let words = "groups of 9 rollouts, and at most 8 may be in flight";
    refused(evaluation, "group_too_large", words).await;
    let status = orchestrator.status().await;
    let named = status["refused_workers"].as_array().unwrap();
    assert_eq!(named.len(), 2, "{named:#?}");
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_group_continues_after_a_restart_and_starts_again_without_its_worker() {
    let place = Place::new();
    let engine = Engine::start(MockConfig::default()).await;
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    orchestrator.join(&engine.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let mut doomed = Worker::register_as(&orchestrator.url, &whole("doomed")).await;
    let leases = one_group(&doomed).await;
    turn(&leases[0]).await;
    turn(&leases[1]).await;
    assert!(doomed.result(leases[0].rollout, outcome("s", 1.0)).await);
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();

    let orchestrator = Orchestrator::start(place.config("", "")).await;
    orchestrator.until("the engine is proved", all_proved).await;
    doomed.url.clone_from(&orchestrator.url);
    // The worker runs the rest of the group: none of it is leased to another worker, and none is to be stopped.
    let running: Vec<RolloutId> = leases[1..].iter().map(|lease| lease.rollout).collect();
    assert_eq!(doomed.heartbeat(&running).await.unwrap().cancel, []);
    assert!(doomed.result(leases[1].rollout, outcome("s", 0.0)).await);
    let other = Worker::register_as(&orchestrator.url, &whole("other")).await;
    let fresh = one_group(&other).await;
    assert_ne!(fresh[0].group, leases[0].group);
    doomed.leave().await;
    let again = one_group(&other).await;
    assert_eq!(again[0].group, leases[0].group);
    let numbers =
        |leases: &[Lease]| -> BTreeSet<_> { leases.iter().map(|it| it.rollout).collect() };
    assert!(numbers(&again).is_disjoint(&numbers(&leases)));
    let status = orchestrator.status().await;
    assert_eq!(status["voided"], json!({"group_incomplete": 2}));
    assert_eq!(status["cancelled"], json!({"worker_lost": 2}));

    // One run of each group is trained.
    for lease in fresh.iter().chain(&again) {
        turn(lease).await;
        let reward = f64::from(u8::from(lease.rollout.0 % 2 == 0));
        assert!(other.result(lease.rollout, outcome("s", reward)).await);
    }
    let batch = trainer::batch_bytes(&orchestrator.url, 1, 0).await.unwrap();
    let batch = trainer::Batch::decode(&batch);
    let trained: BTreeSet<u64> = batch.sequences().iter().map(|it| it.rollout).collect();
    let expected = fresh.iter().chain(&again).map(|lease| lease.rollout.0);
    assert_eq!(trained, expected.collect());
    let steps: Vec<Value> = crate::common::read_lines(&place.output().join("steps.jsonl"));
    assert_eq!(steps[0]["metrics"]["groups/restarted"], 1.0);
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}
