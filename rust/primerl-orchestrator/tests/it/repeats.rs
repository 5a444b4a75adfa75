//! Repeated requests, during the answer or after it; clients that disconnect; engines that fail in a stream.

use crate::common::engine::{Engine, expected_logprobs};
use crate::common::worker::Worker;
use crate::common::{Orchestrator, PATIENCE, Place, all_proved, client, metrics, trainer, user};
use primerl_engine_server::mock::MockConfig;
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

    /// Requests that come wait in the engine. Proving it takes an engine that computes.
    async fn pause(&self) {
        self.orchestrator.until("it is proved", all_proved).await;
        self.engine.pause().await;
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
    scene.pause().await;
    let first = tokio::spawn(content(keyed(false)));
    scene.running("the first request runs", 1).await;
    scene.engine.resume().await;
    // The same key, in another form: the same answer.
    let joined = keyed(true).send().await.unwrap().text().await.unwrap();
    let first = first.await.unwrap();
    assert_eq!(streamed(&joined).0, first);
    assert_eq!(scene.sampled().await, 12, "one answer was sampled");

    scene.pause().await;
    let plain = tokio::spawn(content(scene.request(json!({}))));
    scene.running("a request without a key runs", 1).await;
    let another = tokio::spawn(content(scene.request(json!({}))));
    scene.running("and another in parallel", 2).await;
    scene.engine.resume().await;
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
async fn an_answer_continues_for_the_clients_that_stay() {
    let scene = Scene::new(paced(Duration::from_millis(100))).await;
    let keyed = || {
        let request = scene.request(json!({"stream": true}));
        request.header("idempotency-key", "one")
    };
    let mut first = keyed().send().await.unwrap();
    // It has begun with the first of twelve tokens: the second joins in the middle of the answer.
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
async fn the_retry_of_a_repeat_gets_the_repeats_answer_running_and_over() {
    let scene = Scene::new(paced(Duration::from_millis(40))).await;
    let ask = |retries: u32| {
        let request = scene.request(json!({}));
        content(request.header("x-stainless-retry-count", retries))
    };
    let first = ask(0).await;
    scene.pause().await;
    let second = tokio::spawn(ask(0));
    scene.running("the repeat", 1).await;
    scene.engine.resume().await;
    let retry = ask(1).await;
    let second = second.await.unwrap();
    assert_ne!(first, second);
    assert_eq!(retry, second, "it joined");
    assert_eq!(ask(1).await, second, "it was recorded");
    assert_eq!(scene.sampled().await, 24);
    // A repeat that its client gives up: its retry is sampled again.
    let request = scene.request(json!({}));
    scene.pause().await;
    let given_up = tokio::spawn(async move { request.send().await });
    scene.running("another repeat", 1).await;
    given_up.abort();
    scene.running("it is aborted", 0).await;
    scene.engine.resume().await;
    let third = ask(1).await;
    assert!(third != first && third != second);
    assert_eq!(ask(1).await, third);
    assert_eq!(scene.sampled().await, 36);
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
        "what was sampled is what is continued"
    );
    assert_eq!(prompt[before.len()], 256, "and the turn is closed");
    scene.end().await;
}

/// All token ids and log-probabilities of a stream's chunks.
fn tokens_of(text: &str) -> (Vec<i32>, Vec<f32>) {
    let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
    for data in text
        .split("\n\n")
        .filter_map(|it| it.strip_prefix("data: "))
    {
        let chunk: Value = serde_json::from_str(data).unwrap_or_default();
        let choice = &chunk["choices"][0];
        let own = choice["token_ids"].as_array().into_iter().flatten();
        ids.extend(own.map(|id| id.as_i64().unwrap() as i32));
        let content = choice["logprobs"]["content"].as_array();
        let own = content.into_iter().flatten().map(|it| &it["logprob"]);
        logprobs.extend(own.map(|logprob| logprob.as_f64().unwrap() as f32));
    }
    (ids, logprobs)
}

impl Scene {
    /// The engine is killed, and another process starts at its address.
    async fn with_another_engine(self) -> Scene {
        let address = self.engine.kill().await;
        Scene {
            engine: Engine::restart(address).await,
            ..self
        }
    }

    /// The next turn's prompt begins with these ids, the first turn's prompt and answer.
    async fn goes_on_from(&self, said: &str, prompt: &[i32], sampled: &[i32]) {
        let messages = json!([user("hi"), {"role": "assistant", "content": said}, user("more")]);
        let next = self.request(json!({"messages": messages, "return_token_ids": true}));
        let next: Value = next.send().await.unwrap().json().await.unwrap();
        let ids: Vec<i32> = serde_json::from_value(next["prompt_token_ids"].clone()).unwrap();
        assert!(ids.starts_with(&[prompt, sampled].concat()), "{next}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_engine_continues_a_stream_whose_engine_died() {
    let scene = Scene::new(paced(Duration::from_millis(100))).await;
    let form = json!({"stream": true, "return_token_ids": true, "logprobs": true});
    let mut answer = scene.request(form).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut text = Vec::new();
    while streamed(&String::from_utf8_lossy(&text)).0.len() < 3 {
        text.extend(answer.chunk().await.unwrap().expect("continues"));
    }
    let scene = scene.with_another_engine().await;
    while let Some(piece) = answer.chunk().await.unwrap() {
        text.extend(piece);
    }
    let text = String::from_utf8(text).unwrap();
    let (said, last) = streamed(&text);
    assert_eq!((said.len(), last.as_str()), (12, "[DONE]"), "{text}");
    assert!(text.contains("\"finish_reason\":\"length\""), "{text}");
    // One turn, and each token as its engine scored it after the earlier ones.
    assert_eq!(scene.sampled().await, 12);
    let (ids, logprobs) = tokens_of(&text);
    let first = text.split("\n\n").next().unwrap();
    let first: Value = serde_json::from_str(first.strip_prefix("data: ").unwrap()).unwrap();
    let prompt: Vec<i32> = serde_json::from_value(first["prompt_token_ids"].clone()).unwrap();
    let whole = [&prompt[..], &ids].concat();
    let mut versions = vec![-1; prompt.len()];
    versions.extend([0; 12]);
    let expected = expected_logprobs(&whole, &versions);
    assert_eq!(logprobs, expected[prompt.len()..]);
    scene.goes_on_from(&said, &prompt, &ids).await;
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_engine_continues_a_request_that_has_stop_sequences() {
    let scene = Scene::new(paced(Duration::from_millis(100))).await;
    // Never sampled: only the path of such requests is tested.
    let request = scene.request(json!({"stop": ["!"], "return_token_ids": true}));
    scene.pause().await;
    let answer = tokio::spawn(async move { request.send().await.unwrap() });
    scene.running("it began", 1).await;
    scene.engine.resume().await;
    let begun = |text: &str| metric(text, "generation_tokens_total") >= 4.0;
    wait_for_metrics(&scene.engine.url, begun).await;
    let scene = scene.with_another_engine().await;
    let answer: Value = answer.await.unwrap().json().await.unwrap();
    let choice = &answer["choices"][0];
    let said = choice["message"]["content"].as_str().unwrap();
    assert_eq!(said.len(), 12, "{answer}");
    assert_eq!(scene.sampled().await, 12);
    let metrics = metrics(&scene.engine.url).await;
    let sampled_again = metric(&metrics, "generation_tokens_total");
    assert!(sampled_again < 12.0, "what was there was kept");
    let prompt: Vec<i32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
    let ids: Vec<i32> = serde_json::from_value(choice["token_ids"].clone()).unwrap();
    scene.goes_on_from(said, &prompt, &ids).await;
    scene.end().await;
}

/// Reads a metric by vLLM's name.
fn metric(text: &str, name: &str) -> f64 {
    let prefix = format!("vllm:{name}");
    let line = text.lines().find(|line| line.starts_with(&prefix));
    let value = line.and_then(|line| line.rsplit(' ').next()?.parse().ok());
    value.unwrap_or_default()
}

async fn wait_for_metrics(url: &str, reached: impl Fn(&str) -> bool) {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    while !reached(&metrics(url).await) {
        assert!(tokio::time::Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// A scene whose rollout may sample this many tokens.
async fn with_budget(tokens: u32, mock: MockConfig) -> Scene {
    let sampling = "[sampling]\nmax_tokens = 12\n";
    let place = Place::new();
    let toml = place.toml("", "");
    let bounded = format!("{sampling}rollout_max_tokens = {tokens}\n");
    let toml = toml.replace(sampling, &bounded);
    assert!(toml.contains("rollout_max_tokens"));
    let config = Config::from_toml(&toml, "test").unwrap();
    Scene::with(place, config, mock).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_at_a_time_do_not_sample_more_than_the_budget_together() {
    let scene = with_budget(20, paced(Duration::from_millis(10))).await;
    let ask = |text: &str| {
        let request = scene.request(json!({"messages": [user(text)]}));
        tokio::spawn(async move {
            let answer = request.send().await.unwrap();
            (
                answer.status().as_u16(),
                answer.json::<Value>().await.unwrap(),
            )
        })
    };
    let mut lengths = Vec::new();
    for asked in ["a", "b", "c"].map(ask) {
        let (status, body) = asked.await.unwrap();
        lengths.push(match status {
            200 => body["usage"]["completion_tokens"].as_u64().unwrap(),
            _ => {
                assert_eq!(body["error"]["code"], "context_length_exceeded");
                0
            }
        });
    }
    lengths.sort_unstable();
    // The second request waited for what the first might have left, and was cut when all was spent.
    assert_eq!(lengths, [0, 8, 12]);
    assert_eq!(scene.sampled().await, 20);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_of_one_request_share_the_budget_and_what_is_aborted_is_given_back() {
    let scene = with_budget(20, paced(Duration::from_millis(40))).await;
    let stream = scene.request(json!({"stream": true}));
    let mut stream = stream.send().await.unwrap();
    assert!(stream.chunk().await.unwrap().is_some());
    drop(stream);
    let answer = scene.request(json!({"n": 3})).send().await.unwrap();
    let answer: Value = answer.json().await.unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], 18, "{answer}");
    let rest = scene.request(json!({"messages": [user("rest")]}));
    assert_eq!(content(rest).await.len(), 2);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_ends_in_order_when_its_tokens_are_used_up() {
    let scene = with_budget(20, paced(Duration::ZERO)).await;
    assert_eq!(content(scene.request(json!({}))).await.len(), 12);
    assert_eq!(content(scene.request(json!({}))).await.len(), 8);
    let refused = scene.request(json!({})).send().await.unwrap();
    assert_eq!(refused.status(), 400);
    let refused: Value = refused.json().await.unwrap();
    // Harnesses treat this as the end of a conversation.
    assert_eq!(refused["error"]["code"], "context_length_exceeded");
    let message = refused["error"]["message"].as_str().unwrap();
    assert!(message.contains("may sample 20 in all"), "{message}");
    scene.end().await;
}
