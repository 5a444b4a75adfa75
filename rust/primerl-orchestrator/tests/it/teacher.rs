//! Runs that learn from a teacher, over loopback: a second engine, which renders with the run's own model.

use crate::common::engine::{Engine, expected_logprobs};
use crate::common::worker::Worker;
use crate::common::{Orchestrator, Place, chat, client, metrics, trainer, user};
use axum::http::StatusCode;
use axum::response::IntoResponse;
use primerl_engine_server::mock::{MockConfig, ScriptedAnswer};
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::WorkerRole;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio_util::sync::CancellationToken;
use trainer::Batch;

/// Answers of the letters `a` to `z`: the tiny model's ids begin with the byte 33.
pub fn letters() -> MockConfig {
    MockConfig {
        first_token: 97 - 33,
        last_token: 123 - 33,
        ..MockConfig::default()
    }
}

/// Always says the same: the model does not learn from a teacher without text.
pub fn talkative(place: &Place) -> MockConfig {
    let renderer = primerl_render::Renderer::load(&place.path("model")).unwrap();
    let encode = |text| renderer.tokenizer().encode(text).unwrap();
    let says = ScriptedAnswer {
        after: encode("<|im_start|>assistant\n"),
        answer: encode("abc<|im_end|>"),
    };
    MockConfig {
        script: vec![says],
        ..letters()
    }
}

fn config(place: &Place, mode: &str, url: &str) -> Config {
    let teacher = format!("[teacher.client]\nbase_url = \"{url}/v1\"\nmodel = \"m\"\n");
    place.config(&format!("training_mode = \"{mode}\""), &teacher)
}

pub async fn joined(orchestrator: &Orchestrator) -> Engine {
    let engine = Engine::start(letters()).await;
    orchestrator.join(&engine.url).await;
    engine
}

/// A whole run of rollouts of so many turns, and the batches it trained.
async fn run(place: &Place, mode: &str, teacher: &Engine, turns: usize) -> Vec<Batch> {
    let orchestrator = Orchestrator::start(config(place, mode, &teacher.url)).await;
    let engine = joined(&orchestrator).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let working = tokio::spawn(worker.work(turns));
    let training = tokio::spawn(trainer::train(orchestrator.url.clone(), place.output()));
    let reason = orchestrator.end().await.unwrap();
    assert!(reason.0.contains("all 4 steps"), "{}", reason.0);
    working.await.unwrap();
    drop(engine);
    training.await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teacher_scores_every_token_that_is_trained() {
    let place = Place::new();
    let teacher = Engine::start_rendering(letters(), &place.path("model")).await;
    let batches = run(&place, "opd", &teacher, 2).await;
    assert_eq!(batches.len(), 4);
    for sequence in batches.iter().flat_map(Batch::sequences) {
        // The teacher has the run's first weights.
        let mut expected = expected_logprobs(&sequence.ids, &vec![0; sequence.ids.len()]);
        expected[0] = 0.0;
        assert_eq!(sequence.extra["teacher_logprobs"], expected);
        assert!(sequence.mask.contains(&1));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teachers_answers_are_learnt_as_the_model_writes_them() {
    let place = Place::new();
    let teacher = Engine::start_rendering(talkative(&place), &place.path("model")).await;
    let batches = run(&place, "sft", &teacher, 2).await;
    let renderer = primerl_render::Renderer::load(&place.path("model")).unwrap();
    let text = |ids: &[u32]| renderer.tokenizer().decode(ids, false).unwrap();
    for batch in &batches {
        let mut taught = 0;
        for sequence in batch.sequences() {
            let ids: Vec<u32> = sequence.ids.iter().map(|id| *id as u32).collect();
            // Two turns of one conversation, which continues.
            let begun = text(&ids).matches("<|im_start|>assistant\n").count();
            assert_eq!(begun, 2, "{}", text(&ids));
            let weights = &sequence.extra["ce_weights"];
            let answer = |(id, weight): (&u32, &f32)| (*weight == 1.0).then_some(*id);
            let learnt: Vec<u32> = ids.iter().zip(weights).filter_map(answer).collect();
            assert_eq!(text(&learnt), "abc<|im_end|>abc<|im_end|>");
            taught += learnt.len() as u64;
            assert!(sequence.mask.iter().all(|mask| *mask == 0));
            assert!(sequence.versions.iter().all(|version| *version == -1));
        }
        assert_eq!(taught, batch.loss_tokens);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_teacher_cannot_do_is_refused_in_a_rollout_that_it_answers() {
    let place = Place::new();
    let teacher = Engine::start_rendering(talkative(&place), &place.path("model")).await;
    let orchestrator = Orchestrator::start(config(&place, "sft", &teacher.url)).await;
    let _engine = joined(&orchestrator).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let lease = worker.one().await;
    let body = json!({"model": "m", "messages": [user("Hi")], "max_tokens": 5});
    let (status, answer) = chat(&lease, "s", &body).await;
    assert_eq!(status, 200, "{answer}");
    assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() > 0);
    for (field, value) in [("logprobs", json!(true)), ("prompt", json!("text"))] {
        let mut refused = body.clone();
        refused[field] = value;
        assert_eq!(chat(&lease, "s", &refused).await.0, 400, "{field}");
    }
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}

fn config_of_several(place: &Place, urls: &[&str]) -> Config {
    let urls: Vec<String> = urls.iter().map(|url| format!("{url}/v1")).collect();
    let teacher = format!("[teacher.client]\nbase_url = {urls:?}\nmodel = \"m\"\n");
    place.config("training_mode = \"opd\"\nmax_steps = 100000", &teacher)
}

/// Requests that an engine has answered.
async fn answered(url: &str) -> f64 {
    let text = metrics(url).await;
    let values = text
        .lines()
        .filter(|line| line.starts_with("vllm:request_success_total"))
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap());
    values.sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_teachers_share_the_requests_and_those_of_a_killed_one_go_to_the_others() {
    let place = Place::new();
    // Slow enough that both have requests when one is killed.
    let slow = || MockConfig {
        step_latency: Duration::from_millis(20),
        ..letters()
    };
    let kept = Engine::start_rendering(slow(), &place.path("model")).await;
    let killed = Engine::start_rendering(slow(), &place.path("model")).await;
    let config = config_of_several(&place, &[&killed.url, &kept.url]);
    let orchestrator = Orchestrator::start(config).await;
    let _engine = joined(&orchestrator).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let working = tokio::spawn(worker.work(2));
    let training = tokio::spawn(trainer::train(orchestrator.url.clone(), place.output()));
    // In addition to the proof's request.
    until_answered(&killed.url, 4.0).await;
    until_answered(&kept.url, 4.0).await;
    let address = killed.kill().await;
    let before = answered(&kept.url).await;
    until_answered(&kept.url, before + 16.0).await;
    // It returns at the same address, is proved, and gets requests again.
    let back = Engine::restart(address).await;
    until_answered(&back.url, 4.0).await;
    let seen = orchestrator.status().await;
    assert_eq!(seen["groups"]["dropped"], 0, "{seen:#}");
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    working.abort();
    training.abort();
    let mut scored = 0;
    for step in std::fs::read_dir(place.output().join("spool")).unwrap() {
        let body = std::fs::read(step.unwrap().path().join("rank_0.msgpack")).unwrap();
        for sequence in Batch::decode(&body).sequences() {
            let mut expected = expected_logprobs(&sequence.ids, &vec![0; sequence.ids.len()]);
            expected[0] = 0.0;
            assert_eq!(sequence.extra["teacher_logprobs"], expected);
            scored += 1;
        }
    }
    assert!(scored >= 16, "{scored}");
}

async fn until_answered(url: &str, requests: f64) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(60);
    while answered(url).await < requests {
        assert!(
            tokio::time::Instant::now() < deadline,
            "{url} has answered {} requests",
            answered(url).await
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Passes requests on to `good` until it is proved. Then it keeps a request without an answer, fails one, and computes
/// nothing more, but reports that it is well. Notices when the kept request is cancelled.
async fn hanging_teacher(good: &str) -> (String, CancellationToken) {
    let good = good.to_owned();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let taken = CancellationToken::new();
    let (scored, kept) = (Arc::new(AtomicUsize::new(0)), taken.clone());
    let handler = move |request: axum::extract::Request| {
        let (good, scored, kept) = (good.clone(), Arc::clone(&scored), kept.clone());
        async move {
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let before = match parts.uri.path() {
                "/inference/v1/generate" => scored.fetch_add(1, Ordering::Relaxed),
                _ => 0,
            };
            match before {
                0 => {}
                2 => return (StatusCode::INTERNAL_SERVER_ERROR, "broken").into_response(),
                _ => {
                    let _kept = (before == 1).then(|| kept.drop_guard());
                    std::future::pending::<()>().await;
                }
            }
            let request = client().request(parts.method, format!("{good}{}", parts.uri));
            let request = request.header("content-type", "application/json");
            let answer = request.body(body).send().await.unwrap();
            (answer.status(), answer.bytes().await.unwrap()).into_response()
        }
    };
    let app = axum::Router::new().fallback(handler);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (url, taken)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_leave_a_teacher_that_failed_and_then_hangs() {
    let place = Place::new();
    let sound = Engine::start_rendering(letters(), &place.path("model")).await;
    let (url, taken) = hanging_teacher(&sound.url).await;
    let orchestrator = Orchestrator::start(config_of_several(&place, &[&url, &sound.url])).await;
    let _engine = joined(&orchestrator).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    // Both are proved, by the same engine, before there is anything to score.
    until_answered(&sound.url, 2.0).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let working = tokio::spawn(worker.work(1));
    // Long before `timeout_s`, and before its proof is given up.
    let waited = tokio::time::timeout(Duration::from_secs(45), taken.cancelled()).await;
    assert!(waited.is_ok(), "{:#}", orchestrator.status().await);
    let seen = orchestrator
        .until("all is scored elsewhere", |status| {
            let waits = status["waits"].to_string();
            !waits.contains("log-probabilities")
        })
        .await;
    assert_eq!(seen["groups"]["dropped"], 0, "{seen:#}");
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    working.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn teachers_of_two_checkpoints_are_refused_by_name() {
    let place = Place::new();
    let one = Engine::start_rendering(letters(), &place.path("model")).await;
    let other = Engine::start_rendering(letters(), &place.path("model")).await;
    let manifest = trainer::write_weights(&place.path("elsewhere"), 7);
    let folder = Path::new(&manifest).parent().unwrap();
    for (route, body) in [
        ("start_weight_update", json!({})),
        ("update_weights", json!({"update_info": {"path": folder}})),
        ("finish_weight_update", json!({"weight_version": "7"})),
    ] {
        let url = format!("{}/{route}", other.url);
        let answer = client().post(url).json(&body).send().await.unwrap();
        assert_eq!(
            answer.status(),
            200,
            "{route}: {}",
            answer.text().await.unwrap()
        );
    }
    let config = config_of_several(&place, &[&one.url, &other.url]);
    let orchestrator = Orchestrator::start(config).await;
    let said = orchestrator.end().await.unwrap_err().to_string();
    assert!(said.contains("so it serves another checkpoint"), "{said}");
    assert!(
        said.contains(&one.url) && said.contains(&other.url),
        "{said}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teacher_without_room_for_the_longest_sample_is_refused_at_the_start() {
    for (room, is_refused) in [(512, true), (513, false)] {
        let place = Place::new();
        let mock = MockConfig {
            max_model_len: room,
            ..letters()
        };
        let teacher = Engine::start_whole(mock).await;
        let orchestrator = Orchestrator::start(config(&place, "opd", &teacher.url)).await;
        // Its engine has room for more than seq_len.
        let _engine = joined(&orchestrator).await;
        if is_refused {
            let said = orchestrator.end().await.unwrap_err().to_string();
            assert!(said.contains("max_model_len of 513 or more"), "{said}");
            continue;
        }
        let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
        let working = tokio::spawn(worker.work(1));
        let training = tokio::spawn(trainer::train(orchestrator.url.clone(), place.output()));
        orchestrator.end().await.unwrap();
        working.await.unwrap();
        assert_eq!(training.await.unwrap().len(), 4);
    }
}

async fn failure(place: &Place, url: &str) -> String {
    let orchestrator = Orchestrator::start(config(place, "opd", url)).await;
    orchestrator.end().await.unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teacher_with_another_vocabulary_or_name_is_refused_at_the_start() {
    let place = Place::new();
    let other = place.path("other");
    write_other_model(&other);
    let teacher = Engine::start_rendering(letters(), &other).await;
    let said = failure(&place, &teacher.url).await;
    assert!(
        said.contains("it makes other tokens of a text than the model"),
        "{said}"
    );
    let place = Place::new();
    let unnamed = Engine::start_whole(letters()).await;
    let toml = place.toml("training_mode = \"opd\"", "");
    let toml = format!(
        "{toml}[teacher.client]\nbase_url = \"{}/v1\"\nmodel = \"absent\"\n",
        unnamed.url
    );
    let config = Config::from_toml(&toml, "test").unwrap();
    let said = Orchestrator::start(config)
        .await
        .end()
        .await
        .unwrap_err()
        .to_string();
    assert!(
        said.contains("absent") && said.contains("teacher.client"),
        "{said}"
    );
}

/// Bytes, and two letters in one token.
fn write_other_model(folder: &Path) {
    std::fs::create_dir_all(folder).unwrap();
    let added = [("<|im_end|>", true), ("<|im_start|>", true)];
    let chatml = primerl_render::testing::CHATML;
    primerl_render::testing::write_model(
        folder,
        &added,
        &[("t", "h")],
        chatml,
        "<|im_end|>",
        "<|im_end|>",
    )
    .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_teacher_ends_the_run_by_name() {
    let place = Place::new();
    let (url, _held) = crate::common::unserved();
    let said = failure(&place, &url).await;
    assert!(
        said.contains("it has not answered for") && said.contains(&url),
        "{said}"
    );
}

#[test]
fn a_teacher_without_a_mode_and_a_mode_without_a_teacher_are_refused() {
    let place = Place::new();
    let refused = |extra: &str, tables: &str| {
        let toml = place.toml(extra, tables);
        Config::from_toml(&toml, "test").unwrap_err().to_string()
    };
    let teacher = "[teacher.client]\nbase_url = \"http://127.0.0.1:1/v1\"\nmodel = \"m\"\n";
    let said = refused("", teacher);
    assert!(said.contains("omit it, or set training_mode"), "{said}");
    let several = teacher.replace(
        "\"http://127.0.0.1:1/v1\"",
        "[\"http://a:1\", \"http://b:1\"]",
    );
    let said = refused("training_mode = \"sft\"", &several);
    assert!(
        said.starts_with("teacher.client.base_url: names 2 servers"),
        "{said}"
    );
    for again in ["http://a:1/", "http://a:1/v1", "http://a:1/v1/"] {
        let twice = teacher.replace(
            "\"http://127.0.0.1:1/v1\"",
            &format!("[\"http://a:1\", \"{again}\"]"),
        );
        let said = refused("training_mode = \"opd\"", &twice);
        assert!(said.contains("names http://a:1 twice"), "{again}: {said}");
    }
    let none = teacher.replace("\"http://127.0.0.1:1/v1\"", "[]");
    let said = refused("training_mode = \"opd\"", &none);
    assert!(said.contains("names no server"), "{said}");
    let number = teacher.replace("\"http://127.0.0.1:1/v1\"", "1");
    let said = refused("training_mode = \"opd\"", &number);
    assert!(
        said.contains("teacher.client.base_url: is a whole number")
            && said.contains("give text or a list"),
        "{said}"
    );
    let said = refused("training_mode = \"sft\"", "");
    assert!(said.contains("give [teacher.client]"), "{said}");
    let renders = format!("{teacher}client_type = \"renderer\"\n");
    let said = refused("training_mode = \"sft\"", &renders);
    assert!(said.starts_with("teacher.client.client_type"), "{said}");
}
