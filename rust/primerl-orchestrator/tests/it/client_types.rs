//! Engines that render messages themselves (`client_type = "openai_chat_completions_token"`), over loopback.

use crate::common::engine::{Engine, expected_logprobs};
use crate::common::worker::{Worker, outcome};
use crate::common::{Orchestrator, Place, chat, trainer, user};
use primerl_engine_server::mock::{MockConfig, fold_all};
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::{Lease, WorkerRole};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Duration;

const CLIENT_TYPE: &str = "client_type = \"openai_chat_completions_token\"";

async fn start(
    place: &Place,
    extra: &str,
    tables: &str,
    mock: &MockConfig,
) -> (Orchestrator, Engine) {
    let extra = format!("{CLIENT_TYPE}\n{extra}");
    // These tests send no heartbeats, and their engines are slow.
    let toml = place.toml(&extra, tables);
    let toml = toml.replace("worker_s = 5.0", "worker_s = 60.0");
    let toml = toml.replace("rollout_s = 20.0", "rollout_s = 120.0");
    let config = Config::from_toml(&toml, "test").unwrap();
    let orchestrator = Orchestrator::start(config).await;
    let engine = rendering(&orchestrator, place, mock).await;
    (orchestrator, engine)
}

async fn rendering(orchestrator: &Orchestrator, place: &Place, mock: &MockConfig) -> Engine {
    let engine = Engine::start_rendering(mock.clone(), &place.path("model")).await;
    let body = json!({"url": engine.url});
    assert_eq!(orchestrator.post("/engines/join", &body).await.0, 200);
    engine
}

/// Answers of the letters `a` to `z`: the tiny model's ids begin with the byte 33.
fn letters() -> MockConfig {
    MockConfig {
        first_token: 97 - 33,
        last_token: 123 - 33,
        ..MockConfig::default()
    }
}

fn with_ids(messages: &[Value]) -> Value {
    json!({"model": "m", "messages": messages, "logprobs": true, "return_token_ids": true})
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

/// Whether each token of the answer was sampled by weights of this version.
fn is_of_version(answer: &Value, version: u64) -> bool {
    let choice = &answer["choices"][0];
    let mut all = ids(&answer["prompt_token_ids"]);
    let sampled = ids(&choice["token_ids"]);
    let logprobs = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(sampled.len(), logprobs.len());
    sampled.iter().zip(logprobs).all(|(id, entry)| {
        let expected = letters().score(fold_all(&all), *id, version, 0).logprob;
        all.push(*id);
        entry["logprob"].as_f64().unwrap() as f32 == expected
    })
}

/// Answers of random bytes are seldom the same ids once they were text: most turns fork, and every token stays exact.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_run_trains_what_rendering_engines_sampled() {
    let place = Place::new();
    let mock = MockConfig {
        step_latency: Duration::from_millis(1),
        ..MockConfig::default()
    };
    let (orchestrator, first) = start(&place, "", "", &mock).await;
    let second = rendering(&orchestrator, &place, &mock).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let working = tokio::spawn(worker.work(3));
    let training = tokio::spawn(trainer::train(orchestrator.url.clone(), place.output()));
    let reason = orchestrator.end().await.unwrap();
    assert!(reason.0.contains("all 4 steps"), "{}", reason.0);
    working.await.unwrap();
    let mut versions: BTreeSet<i32> = BTreeSet::new();
    for batch in training.await.unwrap() {
        for sequence in batch.sequences() {
            let expected = expected_logprobs(&sequence.ids, &sequence.versions);
            assert_eq!(sequence.logprobs, expected, "step {}", batch.step);
            let newest = sequence.versions.iter().max().copied().unwrap();
            assert!(newest < batch.step as i32, "of a version to come");
            versions.extend(sequence.versions.iter().filter(|version| **version >= 0));
        }
    }
    assert!(versions.len() > 1, "{versions:?}");
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conversation_extends_while_the_engine_repeats_what_was_sampled() {
    let place = Place::new();
    let (orchestrator, engine) = start(&place, "", "", &letters()).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    let mut messages = Vec::new();
    let mut recorded: Vec<u32> = Vec::new();
    for turn in 0..3 {
        messages.push(user(&format!("turn {turn}")));
        let (status, answer) = chat(&lease, "s", &with_ids(&messages)).await;
        assert_eq!(status, 200, "{answer}");
        assert!(is_of_version(&answer, 0));
        let prompt = ids(&answer["prompt_token_ids"]);
        let sampled = ids(&answer["choices"][0]["token_ids"]);
        // An answer that was cut off by its length is closed by the template.
        assert!(prompt.starts_with(&recorded), "turn {turn}");
        recorded = [prompt, sampled].concat();
        messages.push(answer["choices"][0]["message"].clone());
    }
    messages[1]["content"] = "edited".into();
    let (_, answer) = chat(&lease, "s", &with_ids(&messages)).await;
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    let metrics = crate::common::metrics(&orchestrator.url).await;
    for line in ["extended\"} 2", "first_turn\"} 1", "answer_edited\"} 1"] {
        assert!(metrics.contains(line), "{line} in {metrics}");
    }
    end(orchestrator, engine).await;
}

async fn end(orchestrator: Orchestrator, engine: Engine) {
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    engine.stop().await;
}

/// Twelve tokens of an answer take three seconds.
fn slow() -> MockConfig {
    MockConfig {
        eos_probability: 0.0,
        step_latency: Duration::from_millis(250),
        ..letters()
    }
}

/// An answer that is being sampled when version 1 is published.
async fn answer_over_an_update(update_s: f64) -> (Value, Value) {
    let place = Place::new();
    let timeouts = format!("engine_update_s = {update_s:?}");
    let extra = "oversampling_factor = 2.0";
    let (orchestrator, engine) = start(&place, extra, &timeouts, &slow()).await;
    let url = orchestrator.url.clone();
    trainer::publish(&url, &place.output(), 0).await;
    let worker = Worker::register(&url, "task", WorkerRole::Train, "w").await;
    let mut leases: Vec<Lease> = Vec::new();
    while leases.len() < 9 {
        leases.extend(worker.lease(16).await.unwrap().rollouts);
    }
    let last = leases.pop().unwrap();
    let asked = leases.iter().take(8).map(|lease| async {
        let (status, answer) = chat(lease, "s", &with_ids(&[user("short")])).await;
        assert_eq!(status, 200, "{answer}");
    });
    futures_util::future::join_all(asked).await;
    for lease in &leases[..8] {
        assert!(
            worker
                .result(lease.rollout, outcome("s", lease.rollout.0 as f64))
                .await
        );
    }
    assert!(trainer::batch_bytes(&url, 1, 0).await.is_some());
    // What an engine runs is read from time to time: one of the eight may still be in the last reading.
    orchestrator
        .until("the others' end is known", |status| {
            status["engines"][0]["running"] == 0
        })
        .await;
    let asking = tokio::spawn(async move { chat(&last, "s", &with_ids(&[user("long")])).await });
    orchestrator
        .until("the answer is being sampled", |status| {
            status["engines"][0]["running"] == 1
        })
        .await;
    trainer::publish(&url, &place.output(), 1).await;
    let (status, answer) = asking.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    let status = orchestrator
        .until("the engine serves version 1", |status| {
            status["engines"][0]["version"] == 1
        })
        .await;
    end(orchestrator, engine).await;
    (answer, status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_ends_its_answers_before_it_is_updated() {
    let (answer, status) = answer_over_an_update(60.0).await;
    assert!(is_of_version(&answer, 0));
    assert_eq!(status["sampled_again"], 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_crosses_an_update_is_sampled_again_by_the_new_weights() {
    let (answer, status) = answer_over_an_update(1.0).await;
    assert!(is_of_version(&answer, 1));
    assert_eq!(status["sampled_again"], 1);
    assert_eq!(status["failovers"], 0, "no engine failed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_engine_answers_when_one_dies() {
    let place = Place::new();
    let (orchestrator, first) = start(&place, "", "", &slow()).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    let asking = tokio::spawn(async move { chat(&lease, "s", &with_ids(&[user("a")])).await });
    orchestrator
        .until("the answer is being sampled", |status| {
            status["engines"][0]["running"] == 1
        })
        .await;
    let second = rendering(&orchestrator, &place, &slow()).await;
    orchestrator
        .until("the second engine serves", |status| {
            status["engines"][1]["version"] == 0
        })
        .await;
    first.kill().await;
    let (status, answer) = asking.await.unwrap();
    assert_eq!(status, 200, "{answer}");
    assert!(is_of_version(&answer, 0));
    end(orchestrator, second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_cannot_render_ends_the_run_with_the_reason() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config(CLIENT_TYPE, "")).await;
    let engine = Engine::start(letters()).await;
    let body = json!({"url": engine.url});
    assert_eq!(orchestrator.post("/engines/join", &body).await.0, 200);
    let error = orchestrator.end().await.unwrap_err().to_string();
    assert!(error.contains("needs engines that render"), "{error}");
    assert!(error.contains("started without a model folder"), "{error}");
    engine.stop().await;
}

#[test]
fn text_cannot_be_trained() {
    let toml = Place::new().toml("client_type = \"openai_chat_completions\"", "");
    let error = Config::from_toml(&toml, "test").unwrap_err();
    let text = error.to_string();
    assert!(
        text.starts_with("client_type: is openai_chat_completions"),
        "{text}"
    );
    assert!(text.contains("nothing can be trained"), "{text}");
}
