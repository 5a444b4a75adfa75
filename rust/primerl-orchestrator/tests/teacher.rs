//! Runs that learn from a teacher, over loopback: a second engine, which renders with the run's own model.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::engine::{Engine, expected_logprobs};
use common::worker::Worker;
use common::{Orchestrator, Place, chat, trainer, user};
use primerl_engine::mock::{MockConfig, ScriptedAnswer};
use primerl_orchestrator::Config;
use primerl_orchestrator::envs::wire::WorkerRole;
use serde_json::json;
use std::path::Path;
use trainer::Batch;

/// Answers of the letters `a` to `z`: the tiny model's ids begin with the byte 33.
fn letters() -> MockConfig {
    MockConfig {
        first_token: 97 - 33,
        last_token: 123 - 33,
        ..MockConfig::default()
    }
}

/// Always says the same: a teacher that says nothing is not learnt from.
fn talkative(place: &Place) -> MockConfig {
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

async fn joined(orchestrator: &Orchestrator) -> Engine {
    let engine = Engine::start(letters()).await;
    let body = json!({"url": engine.url});
    assert_eq!(orchestrator.post("/engines/join", &body).await.0, 200);
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
        // The teacher's weights are those it began with.
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
            // Two turns of one conversation, which goes on.
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

async fn failure(place: &Place, url: &str) -> String {
    let orchestrator = Orchestrator::start(config(place, "opd", url)).await;
    orchestrator.end().await.unwrap_err().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_teacher_with_another_vocabulary_or_name_is_found_out_at_the_start() {
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
async fn a_teacher_that_is_not_there_ends_the_run_by_name() {
    let place = Place::new();
    let gone = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let url = format!("http://{}", gone.local_addr().unwrap());
    drop(gone);
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
    assert!(
        said.contains("leave it out, or set training_mode"),
        "{said}"
    );
    let said = refused("training_mode = \"sft\"", "");
    assert!(said.contains("give [teacher.client]"), "{said}");
    let renders = format!("{teacher}client_type = \"renderer\"\n");
    let said = refused("training_mode = \"sft\"", &renders);
    assert!(said.starts_with("teacher.client.client_type"), "{said}");
}
