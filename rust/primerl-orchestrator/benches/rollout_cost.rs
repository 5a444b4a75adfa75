//! CPU time of the orchestrator's process for one rollout, everything included: leases, chat, tokens, journal, batches.
//!
//! `cargo bench -p primerl-orchestrator --bench rollout_cost`
//!
//! The orchestrator runs as its own process; mock engine, environment worker and trainer run here. Prints milliseconds
//! of CPU a rollout for one turn and for four; the start-up is subtracted.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

#[path = "../tests/common/mod.rs"]
mod common;

use common::engine::Engine;
use common::worker::Worker;
use common::{Place, cpu_seconds, trainer};
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::envs::wire::WorkerRole;
use std::time::{Duration, Instant};

const STEPS: u64 = 60;
const ROLLOUTS: u64 = STEPS * 64;

async fn measure(turns: usize) {
    let place = Place::new();
    let toml = place
        .toml("max_async_level = 2", "")
        .replace("max_steps = 4", &format!("max_steps = {STEPS}"))
        .replace("batch_size = 8", "batch_size = 64")
        .replace("group_size = 4", "group_size = 8")
        .replace("max_tokens = 12", "max_tokens = 28");
    let config = place.path("orchestrator.toml");
    std::fs::write(&config, toml).unwrap();
    let mut child = common::orchestrate()
        .arg("--config")
        .arg(&config)
        .spawn()
        .unwrap();
    let address = place.output().join("run/orchestrator.json");
    while !address.exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let address: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&address).unwrap()).unwrap();
    let url = address["url"].as_str().unwrap().to_owned();
    let engine = Engine::start(MockConfig::default()).await;
    let http = common::client();
    http.post(format!("{url}/engines/join"))
        .json(&serde_json::json!({"url": engine.url}))
        .send()
        .await
        .unwrap();
    let (started, before) = (Instant::now(), cpu_seconds(&child.id().to_string()));
    let worker = Worker::register(&url, "task", WorkerRole::Train, "w").await;
    let worker = tokio::spawn(worker.work(turns));
    let training = tokio::spawn(trainer::train(url.clone(), place.output()));
    // The process is gone soon after its last worker: its last CPU time is the one seen shortly before.
    let mut after = before;
    while !worker.is_finished() {
        after = cpu_seconds(&child.id().to_string());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let wall = started.elapsed().as_secs_f64();
    let tokens: u64 = training
        .await
        .unwrap()
        .iter()
        .map(|batch| batch.loss_tokens)
        .sum();
    worker.await.unwrap();
    assert!(child.wait().unwrap().success());
    println!(
        "{turns} turns: {ROLLOUTS} rollouts, {:.3} ms CPU a rollout, {:.1} us a sampled token, wall {wall:.1} s",
        (after - before) * 1e3 / ROLLOUTS as f64,
        (after - before) * 1e6 / tokens as f64,
    );
    engine.stop().await;
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    // `cargo test --benches` only has to check that it builds.
    if std::env::args().any(|argument| argument == "--test") {
        return;
    }
    for turns in [1, 4] {
        measure(turns).await;
    }
}
