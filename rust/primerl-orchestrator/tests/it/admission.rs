//! The load that engines report, and its effects.

use crate::common::engine::Engine;
use crate::common::worker::Worker;
use crate::common::{Orchestrator, Place, trainer};
use primerl_core::Event;
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::envs::wire::WorkerRole;
use primerl_record::journal;
use serde_json::json;
use std::time::{Duration, Instant};

const LIMITS: &str = "
[admission]
start_per_engine = 16
min_per_engine = 1
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_requests_wait_gets_fewer() {
    let place = Place::new();
    let extra = "oversampling_factor = 2.0\nmax_async_level = 2";
    let started = Instant::now();
    let orchestrator = Orchestrator::start(place.config(extra, LIMITS)).await;
    let mock = MockConfig {
        slots: 2,
        step_latency: Duration::from_millis(60),
        ..MockConfig::default()
    };
    let engine = Engine::start(mock).await;
    orchestrator
        .post("/engines/join", &json!({"url": engine.url}))
        .await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let worker = tokio::spawn(worker.work(2));
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    // The engine's own limit falls first; the core's follows with the next report.
    orchestrator
        .until("the limit falls, with one engine to serve", |status| {
            let engine = status["engines"][0]["limit"].as_u64();
            engine.is_some_and(|limit| limit < 16) && status["rollouts"]["limit"].as_u64() == engine
        })
        .await;
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    // The orchestrator may be gone when it says goodbye.
    worker.abort();
    engine.stop().await;

    let mut entries = Vec::new();
    let folder = place.output().join("journal");
    journal::read_from(&folder, 0, |_, entry| entries.push(entry)).unwrap();
    let reports = entries
        .iter()
        .filter(|journal::Entry(_, event)| matches!(event, Event::EngineLoad { .. }));
    let (reports, seconds) = (reports.count() as u64, started.elapsed().as_secs());
    assert!(
        (1..=seconds + 1).contains(&reports),
        "{reports} reports in {seconds} s"
    );
    let begun = entries
        .iter()
        .any(|journal::Entry(_, event)| matches!(event, Event::SamplingStarted { .. }));
    assert!(begun, "the core knows when a rollout begins to sample");
}
