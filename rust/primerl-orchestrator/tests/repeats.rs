//! Requests that come again, while they are answered or after; clients that go; engines that fail under a stream.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::engine::Engine;
use common::worker::Worker;
use common::{Orchestrator, Place, client, trainer, user};
use primerl_engine::mock::MockConfig;
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::{Lease, WorkerRole};
use reqwest::RequestBuilder;
use serde_json::{Value, json};
use std::time::Duration;

struct Scene {
    orchestrator: Orchestrator,
    engine: Engine,
    lease: Lease,
    place: Place,
}

/// Answers of 12 tokens that take `step` each.
fn paced(step: Duration) -> MockConfig {
    MockConfig {
        eos_token_id: None,
        // a to z.
        first_token: 64,
        last_token: 90,
        step_latency: step,
        ..MockConfig::default()
    }
}

impl Scene {
    async fn new(mock: MockConfig) -> Scene {
        let place = Place::new();
        let config = place.config("", "");
        Scene::with(place, config, mock).await
    }

    async fn with(place: Place, config: Config, mock: MockConfig) -> Scene {
        let orchestrator = Orchestrator::start(config).await;
        let engine = Engine::start(mock).await;
        let join = json!({"url": engine.url});
        assert_eq!(orchestrator.post("/engines/join", &join).await.0, 200);
        trainer::publish(&orchestrator.url, &place.output(), 0).await;
        let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
        let lease = worker.one().await;
        Scene {
            orchestrator,
            engine,
            lease,
            place,
        }
    }

    fn request(&self, changes: Value) -> RequestBuilder {
        let mut body = json!({"messages": [user("hi")]});
        for (name, value) in changes.as_object().unwrap() {
            body[name] = value.clone();
        }
        client()
            .post(format!("{}/chat/completions", self.lease.base_url))
            .bearer_auth(self.lease.api_key.reveal())
            .json(&body)
    }

    async fn sampled(&self) -> u64 {
        let status = self.orchestrator.status().await;
        status["tokens"]["sampled"].as_u64().unwrap()
    }

    async fn running(&self, what: &str, count: u64) {
        let running = |status: &Value| status["engines"][0]["running"].as_u64() == Some(count);
        self.orchestrator.until(what, running).await;
    }

    async fn end(self) {
        self.orchestrator.shutdown.cancel();
        self.orchestrator.end().await.unwrap();
        self.engine.stop().await;
        drop(self.place);
    }
}

async fn content(request: RequestBuilder) -> String {
    let answer = request.send().await.unwrap();
    let status = answer.status();
    let body: Value = answer.json().await.unwrap();
    assert_eq!(status, 200, "{body}");
    let content = &body["choices"][0]["message"]["content"];
    content.as_str().unwrap().to_owned()
}

/// Content of all chunks, and the last line of data.
fn streamed(text: &str) -> (String, String) {
    let data: Vec<&str> = text
        .split("\n\n")
        .filter_map(|event| event.strip_prefix("data: "))
        .collect();
    let content = |data: &&str| {
        let chunk: Value = serde_json::from_str(data).ok()?;
        Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned())
    };
    let last = data.last().copied().unwrap_or_default().to_owned();
    (data.iter().filter_map(content).collect(), last)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_marked_repeat_joins_the_running_answer_and_an_unmarked_one_samples() {
    let scene = Scene::new(paced(Duration::from_millis(60))).await;
    let keyed = |stream: bool| {
        let request = scene.request(json!({"stream": stream}));
        request.header("idempotency-key", "one")
    };
    let first = tokio::spawn(content(keyed(false)));
    scene.running("the first request runs", 1).await;
    // The same key, in another form: the same answer.
    let joined = keyed(true).send().await.unwrap().text().await.unwrap();
    let first = first.await.unwrap();
    assert_eq!(streamed(&joined).0, first);
    assert_eq!(scene.sampled().await, 12, "one answer was sampled");

    let plain = tokio::spawn(content(scene.request(json!({}))));
    scene.running("a request without a key runs", 1).await;
    let another = tokio::spawn(content(scene.request(json!({}))));
    scene.running("and another beside it", 2).await;
    let (plain, another) = (plain.await.unwrap(), another.await.unwrap());
    assert_ne!(plain, another);
    assert_eq!(scene.sampled().await, 36);
    // Afterwards a marked retry gets the last answer to this body.
    let retried = scene
        .request(json!({}))
        .header("x-stainless-retry-count", "2");
    let retried = content(retried).await;
    assert!(retried == plain || retried == another);
    assert_eq!(scene.sampled().await, 36);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_goes_on_for_the_clients_that_stay() {
    let scene = Scene::new(paced(Duration::from_millis(100))).await;
    let keyed = || {
        let request = scene.request(json!({"stream": true}));
        request.header("idempotency-key", "one")
    };
    let mut first = keyed().send().await.unwrap();
    // It has begun with the first of twelve tokens: the second joins in the midst of the answer.
    assert!(first.chunk().await.unwrap().is_some());
    let mut second = keyed().send().await.unwrap();
    drop(first);
    let mut text = Vec::new();
    while let Some(piece) = second.chunk().await.unwrap() {
        text.extend(piece);
    }
    let (said, last) = streamed(&String::from_utf8(text).unwrap());
    assert_eq!((said.len(), last.as_str()), (12, "[DONE]"));
    assert_eq!(scene.sampled().await, 12);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_sequence_ends_the_engines_request_and_the_next_turn_extends() {
    let scene = Scene::new(MockConfig {
        // a and b.
        first_token: 64,
        last_token: 66,
        eos_token_id: None,
        ..MockConfig::default()
    })
    .await;
    let body = json!({"stop": ["b"], "return_token_ids": true});
    let answer: Value = scene
        .request(body)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    let choice = &answer["choices"][0];
    let content = choice["message"]["content"].as_str().unwrap();
    assert!(content.chars().all(|letter| letter == 'a'), "{content}");
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["stop_reason"], "b");
    let sampled = choice["token_ids"].as_array().unwrap();
    assert_eq!(
        sampled.len(),
        content.len() + 1,
        "the token of the stop is recorded"
    );
    let next = json!({"messages": [user("hi"), choice["message"], user("more")], "return_token_ids": true});
    let next: Value = scene
        .request(next)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
    let mut before = answer["prompt_token_ids"].as_array().unwrap().clone();
    before.extend(sampled.iter().cloned());
    let prompt = next["prompt_token_ids"].as_array().unwrap();
    assert!(
        prompt.starts_with(&before),
        "what was sampled is what goes on"
    );
    assert_eq!(prompt[before.len()], 256, "and the turn is closed");
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_dies_under_a_stream_ends_it_with_an_error_and_nothing_is_recorded() {
    let scene = Scene::new(paced(Duration::from_millis(100))).await;
    let mut answer = scene.request(json!({"stream": true})).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut text = Vec::new();
    while streamed(&String::from_utf8_lossy(&text)).0.is_empty() {
        text.extend(answer.chunk().await.unwrap().expect("goes on"));
    }
    let Scene {
        orchestrator,
        engine,
        lease,
        place,
    } = scene;
    let address = engine.kill().await;
    while let Some(piece) = answer.chunk().await.unwrap() {
        text.extend(piece);
    }
    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("engine_unavailable"), "{text}");
    assert!(!text.contains("finish_reason\":\"stop"), "{text}");
    assert_eq!(orchestrator.status().await["tokens"]["sampled"], 0);
    // The agent's SDK tries again, and gets a new answer from an engine that came back.
    let scene = Scene {
        orchestrator,
        engine: Engine::restart(address).await,
        lease,
        place,
    };
    let again = scene
        .request(json!({}))
        .header("x-stainless-retry-count", "1");
    assert_eq!(content(again).await.len(), 12);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_ends_in_order_when_its_tokens_are_used_up() {
    let sampling = "[sampling]\nmax_tokens = 12\n";
    let place = Place::new();
    let toml = place.toml("", "");
    let bounded = format!("{sampling}rollout_max_tokens = 20\n");
    let toml = toml.replace(sampling, &bounded);
    assert!(toml.contains("rollout_max_tokens"));
    let config = Config::from_toml(&toml, "test").unwrap();
    let scene = Scene::with(place, config, paced(Duration::ZERO)).await;
    assert_eq!(content(scene.request(json!({}))).await.len(), 12);
    assert_eq!(content(scene.request(json!({}))).await.len(), 8);
    let refused = scene.request(json!({})).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    let refused: Value = refused.json().await.unwrap();
    // What harnesses know as the end of a conversation.
    assert_eq!(refused["error"]["code"], "context_length_exceeded");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("may sample 20 in all"), "{message}");
    scene.end().await;
}
