//! The experts that engines chose: who has to report them, and what the trainer receives.

use crate::common::engine::Engine;
use crate::common::trainer::{self, Batch};
use crate::common::worker::Worker;
use crate::common::{Orchestrator, Place};
use primerl_engine::mock::MockConfig;
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::WorkerRole;

fn config(place: &Place, lines: &str) -> Config {
    Config::from_toml(&place.toml(lines, ""), "test").unwrap()
}

fn mixture() -> MockConfig {
    MockConfig {
        reports_experts: true,
        ..MockConfig::default()
    }
}

async fn trained(lines: &str) -> Vec<Batch> {
    let place = Place::new();
    let orchestrator = Orchestrator::start(config(&place, lines)).await;
    let engine = Engine::start(mixture()).await;
    orchestrator.join(&engine.url).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let worker = tokio::spawn(worker.work(2));
    let batches = trainer::train(orchestrator.url.clone(), place.output()).await;
    orchestrator.end().await.unwrap();
    worker.await.unwrap();
    engine.stop().await;
    assert_eq!(batches.len(), 4);
    batches
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_experts_of_every_computed_token_reach_the_trainer() {
    let mut turns = 0;
    for sequence in trained("router_replay = true")
        .await
        .iter()
        .flat_map(Batch::sequences)
    {
        turns = turns.max(
            sequence
                .mask
                .windows(2)
                .filter(|pair| *pair == [0, 1])
                .count(),
        );
        let (last, computed) = sequence.experts.split_last().unwrap();
        assert!(last.is_empty(), "no engine computed it");
        for (id, experts) in sequence.ids.iter().zip(computed) {
            assert_eq!(
                experts[..],
                MockConfig::experts_of(*id as u32),
                "token {id}"
            );
        }
    }
    assert!(turns > 1, "conversations have several turns");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_of_them_is_kept_where_they_are_not_replayed() {
    for batch in trained("").await {
        assert!(!batch.sequences().is_empty());
        let known = |micro_batch: &trainer::MicroBatch| micro_batch.routed_experts.is_some();
        assert!(!batch.micro_batches.iter().any(known));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_reports_none_is_refused() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(config(&place, "router_replay = true")).await;
    let silent = Engine::start(MockConfig::default()).await;
    orchestrator.join(&silent.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let status = orchestrator
        .until("the engine is refused", |status| {
            let doing = status["engines"][0]["doing"].as_str().unwrap();
            doing.contains("--enable-return-routed-experts")
        })
        .await;
    assert!(status["engines"][0]["version"].is_null());
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    silent.stop().await;
}
