//! Rollouts that are not sampled at temperature 1 from all tokens: whose log-probabilities are believed, and what the
//! trainer receives.

use crate::common::engine::Engine;
use crate::common::trainer::{self, Batch};
use crate::common::worker::Worker;
use crate::common::{Orchestrator, Place, chat, trained, user};
use primerl_core::{Event, Truncation};
use primerl_engine_server::batch::Sample;
use primerl_engine_server::mock::{MockConfig, fold};
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::WorkerRole;
use primerl_record::journal;
use serde_json::json;

fn sampling(place: &Place, lines: &str) -> Config {
    let toml = place
        .toml("", "")
        .replace("[sampling]\n", &format!("[sampling]\n{lines}\n"));
    Config::from_toml(&toml, "test").unwrap()
}

fn processed() -> MockConfig {
    MockConfig {
        processed_logprobs: true,
        ..MockConfig::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_with_raw_logprobs_gets_no_traffic_where_they_would_be_wrong() {
    for lines in ["temperature = 0.7", "truncated = \"replay\""] {
        let place = Place::new();
        let orchestrator = Orchestrator::start(sampling(&place, lines)).await;
        let raw = Engine::start(MockConfig::default()).await;
        orchestrator.join(&raw.url).await;
        trainer::publish(&orchestrator.url, &place.output(), 0).await;
        let status = orchestrator
            .until("the engine is refused", |status| {
                let doing = status["engines"][0]["doing"].as_str().unwrap();
                doing.contains("--logprobs-mode processed_logprobs")
            })
            .await;
        assert_eq!(status["engines"][0]["version"], json!(null), "{lines}");
        // Another engine may serve.
        let good = Engine::start(processed()).await;
        orchestrator.join(&good.url).await;
        orchestrator
            .until("the other engine serves", |status| {
                status["engines"][1]["version"] == 0
            })
            .await;
        orchestrator.shutdown.cancel();
        orchestrator.end().await.unwrap();
        raw.stop().await;
        good.stop().await;
    }
}

/// Every trained token has its log-probability under the distribution it was sampled from.
fn check_tokens(batches: &[Batch], temperature: f32, truncation: Truncation) {
    let mock = processed();
    for batch in batches {
        let sample = Sample {
            temperature,
            top_p: truncation.top_p,
            top_k: truncation.top_k,
            min_p: truncation.min_p,
            uniform: 0.5,
            top: 0,
            banned: Vec::new(),
            allowed: None,
        };
        for sequence in batch.sequences() {
            let mut prefix = 0;
            for (at, id) in sequence.ids.iter().enumerate() {
                if let Ok(version) = u64::try_from(sequence.versions[at]) {
                    let kept = mock.kept(prefix, version, &sample);
                    let (_, own) = kept.iter().find(|(kept, _)| *kept == *id as u32).unwrap();
                    assert!((f64::from(sequence.logprobs[at]) - own).abs() < 1e-5);
                }
                prefix = fold(prefix, *id as u32);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_trainer_learns_how_every_token_was_sampled() {
    let place = Place::new();
    let lines = "temperature = 0.5\ntruncated = \"replay\"\ntop_p = 0.9\ntop_k = 5\nmin_p = 0.01";
    let batches = trained(&place, sampling(&place, lines), processed(), 2).await;
    assert_eq!(batches.len(), 4);
    let truncation = Truncation {
        top_p: 0.9,
        top_k: 5,
        min_p: 0.01,
    };
    check_tokens(&batches, 0.5, truncation);
    for batch in &batches {
        let mut told = 0;
        for run in batch
            .micro_batches
            .iter()
            .flat_map(|micro_batch| &micro_batch.truncations)
        {
            assert_eq!((run.top_p, run.top_k, run.min_p), (0.9, 5, 0.01));
            told += run.end - run.begin;
        }
        assert_eq!(told, batch.loss_tokens, "all of them, and no others");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_may_truncate_otherwise_and_is_recorded_as_asked() {
    let place = Place::new();
    let lines = "truncated = \"replay\"\ntop_k = 5";
    let orchestrator = Orchestrator::start(sampling(&place, lines)).await;
    let engine = Engine::start(processed()).await;
    orchestrator.join(&engine.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let lease = worker.one().await;
    for (session, change) in [
        ("a", json!({})),
        ("b", json!({"top_k": 0, "min_p": 0.5})),
        ("c", json!({"top_p": 0.25})),
    ] {
        let mut body = json!({"model": "m", "messages": [user("hi")]});
        for (name, value) in change.as_object().unwrap() {
            body[name] = value.clone();
        }
        let (status, answer) = chat(&lease, session, &body).await;
        assert_eq!(status, 200, "{answer}");
    }
    let (status, answer) = chat(
        &lease,
        "d",
        &json!({"model": "m", "messages": [user("hi")], "top_p": 2}),
    )
    .await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("top_p")));
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    engine.stop().await;
    let mut recorded = Vec::new();
    let folder = place.output().join("journal");
    journal::read_from(&folder, 0, |_, journal::Entry(_, event)| {
        if let Event::TurnFinished { turn, .. } = event {
            recorded.push(turn.truncation);
        }
    })
    .unwrap();
    let own = Truncation {
        top_k: 5,
        ..Truncation::default()
    };
    let (lax, strict) = (
        Truncation {
            top_k: 0,
            min_p: 0.5,
            ..own
        },
        Truncation { top_p: 0.25, ..own },
    );
    assert_eq!(recorded, [own, lax, strict]);
}
