//! Parts that die, hang or report false data.

use crate::common::engine::{Engine, expected_logprobs};
use crate::common::worker::Worker;
use crate::common::{Orchestrator, PATIENCE, Place, all_proved, chat, client, trainer, user};
use primerl_core::event::Outcome;
use primerl_core::failure::{Refusal, RolloutError};
use primerl_engine_server::mock::{Faults, MockConfig};
use primerl_orchestrator::RunError;
use primerl_orchestrator::envs::wire::WorkerRole;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

fn slow() -> MockConfig {
    MockConfig {
        step_latency: Duration::from_millis(50),
        eos_token_id: None,
        ..MockConfig::default()
    }
}

async fn announce(orchestrator: &Orchestrator, version: u64, manifest: &str) -> (u16, Value) {
    let body = json!({"version": version, "manifest": manifest});
    orchestrator.post("/trainer/weights", &body).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_a_dead_engine_go_to_another() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let (doomed, other) = (Engine::start(slow()).await, Engine::start(slow()).await);
    orchestrator.join(&doomed.url).await;
    orchestrator.join(&other.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator
        .until("both engines are proved", all_proved)
        .await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    for engine in [&doomed, &other] {
        engine.pause().await;
    }
    let mut requests = Vec::new();
    for session in 0..6 {
        let lease = lease.clone();
        requests.push(tokio::spawn(async move {
            chat(
                &lease,
                &format!("s{session}"),
                &json!({"messages": [user("hi")]}),
            )
            .await
        }));
    }
    orchestrator
        .until("both engines work", |status| {
            status["engines"]
                .as_array()
                .unwrap()
                .iter()
                .all(|e| e["running"] != 0)
        })
        .await;
    doomed.kill().await;
    other.resume().await;
    for request in requests {
        let (status, answer) = request.await.unwrap();
        assert_eq!(status, 200, "{answer}");
    }
    let status = orchestrator
        .until("the dead engine is known", |status| {
            status["engines"][0]["healthy"] == false
        })
        .await;
    assert!(status["failovers"].as_u64().unwrap() > 0);
    assert_eq!(status["tokens"]["sampled"], 6 * 12);
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    other.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_engine_is_brought_up_to_date_before_its_first_request() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let engine = Engine::start(MockConfig::default()).await;
    orchestrator.join(&engine.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator.until("the engine is proved", all_proved).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    let body = json!({"messages": [user("hi")], "return_token_ids": true});
    assert_eq!(chat(&lease, "s", &body).await.0, 200);
    // Restarted so quickly that no health check fails: its first answer shows it.
    let engine = Engine::restart(engine.kill().await).await;
    let (status, answer) = chat(&lease, "s", &body).await;
    assert_eq!(status, 200, "{answer}");
    let status = orchestrator
        .until("the engine is proved again", all_proved)
        .await;
    assert!(status["failovers"].as_u64().unwrap() > 0, "{status:#}");
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_without_engines_fails_and_names_them() {
    let place = Place::new();
    // The trainer's request waits when the run fails: between two of them the run might be gone.
    let config = place
        .toml("", "")
        .replace("long_poll_s = 2.0", "long_poll_s = 60.0");
    let config = primerl_orchestrator::Config::from_toml(&config, "test").unwrap();
    let orchestrator = Orchestrator::start(config).await;
    let engine = Engine::start(MockConfig::default()).await;
    let url = engine.url.clone();
    orchestrator.join(&engine.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator.until("the engine is proved", all_proved).await;
    let url_of_run = orchestrator.url.clone();
    let waiting = tokio::spawn(async move {
        loop {
            let request = crate::common::client().post(format!("{url_of_run}/trainer/batch"));
            let status = request
                .json(&json!({"step": 1, "rank": 0}))
                .send()
                .await
                .unwrap()
                .status();
            if status != 202 {
                return status.as_u16();
            }
        }
    });
    orchestrator
        .until("the trainer waits", |status| {
            status["trainer"]["waiting"] == true
        })
        .await;
    engine.kill().await;
    let error = orchestrator.end().await.expect_err("the run fails");
    assert_eq!(
        waiting.await.unwrap(),
        500,
        "to the trainer a failed run is not a finished one"
    );
    assert!(matches!(*error, RunError::NoEngine { .. }), "{error}");
    assert!(error.to_string().contains(&url), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_lies_about_its_weights_gets_no_traffic() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let faults = Faults {
        wrong_digest: true,
        ..Faults::default()
    };
    let liar = Engine::start(MockConfig {
        faults,
        ..MockConfig::default()
    })
    .await;
    orchestrator.join(&liar.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let status = orchestrator
        .until("the engine is lost", |status| {
            status["engines"][0]["doing"]
                .as_str()
                .unwrap()
                .contains("digest")
        })
        .await;
    assert_eq!(status["engines"][0]["version"], Value::Null);
    assert_eq!(status["run"]["policy_version"], Value::Null);
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    liar.stop().await;
}

/// Its answers before the fault is found are held back, and another engine answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_computes_with_other_weights_than_it_proved_is_found_out() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let faults = Faults {
        wrong_weights: true,
        ..Faults::default()
    };
    let first = Engine::start(MockConfig::default()).await;
    orchestrator.join(&first.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator.until("it is proved", all_proved).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    first.stop().await;
    // They wait for the next engine that proves its weights.
    let requests: Vec<_> = (0..8)
        .map(|session| {
            let lease = lease.clone();
            let body = json!({"messages": [user("hi")], "max_tokens": 1, "logprobs": true,
                              "return_token_ids": true});
            tokio::spawn(async move { chat(&lease, &format!("s{session}"), &body).await })
        })
        .collect();
    let wrong = Engine::start(MockConfig { faults, ..slow() }).await;
    orchestrator.join(&wrong.url).await;
    orchestrator
        .until("it is lost", |status| {
            let doing = status["engines"][1]["doing"].as_str().unwrap_or("");
            doing.contains("it does not compute with them")
        })
        .await;
    let sound = Engine::start(MockConfig::default()).await;
    orchestrator.join(&sound.url).await;
    for request in requests {
        let (status, answer) = request.await.unwrap();
        assert_eq!(status, 200, "{answer}");
        let mut ids: Vec<i32> = serde_json::from_value(answer["prompt_token_ids"].clone()).unwrap();
        let mut versions = vec![-1; ids.len()];
        ids.push(answer["choices"][0]["token_ids"][0].as_i64().unwrap() as i32);
        versions.push(0);
        let entry = &answer["choices"][0]["logprobs"]["content"][0];
        let expected = expected_logprobs(&ids, &versions);
        assert_eq!(
            entry["logprob"].as_f64().unwrap() as f32,
            expected[ids.len() - 1]
        );
    }
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    wrong.stop().await;
    sound.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_whose_engines_all_fail_the_probe_ends_by_name() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let first = Engine::start(MockConfig::default()).await;
    orchestrator.join(&first.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator.until("it is proved", all_proved).await;
    let faults = Faults {
        wrong_weights: true,
        ..Faults::default()
    };
    let wrong = Engine::start(MockConfig { faults, ..slow() }).await;
    orchestrator.join(&wrong.url).await;
    first.stop().await;
    let error = orchestrator.end().await.expect_err("the run fails");
    assert!(matches!(*error, RunError::NoEngine { .. }), "{error}");
    assert!(error.to_string().contains("failed its probe"), "{error}");
    wrong.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_that_are_not_whole_are_refused() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let manifest = trainer::write_weights(&place.output(), 0);
    let (status, answer) = announce(&orchestrator, 1, &manifest).await;
    assert_eq!(status, 400);
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("version 0"),
        "{answer}"
    );
    std::fs::write(
        place.output().join("broadcasts/step_0/model.safetensors"),
        b"cut",
    )
    .unwrap();
    let (status, answer) = announce(&orchestrator, 0, &manifest).await;
    assert_eq!(status, 400);
    assert!(
        answer["error"]["message"]
            .as_str()
            .unwrap()
            .contains("3 bytes"),
        "{answer}"
    );
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_workers_rollouts_go_to_another() {
    let place = Place::new();
    let config = place
        .toml("", "")
        .replace("worker_s = 5.0", "worker_s = 3.0");
    let orchestrator =
        Orchestrator::start(primerl_orchestrator::Config::from_toml(&config, "test").unwrap())
            .await;
    let engine = Engine::start(MockConfig::default()).await;
    orchestrator.join(&engine.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let dead = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "dead").await;
    let lost = dead.one().await;
    orchestrator
        .until("the worker is lost", |status| {
            status["workers"].as_array().unwrap().is_empty()
        })
        .await;
    assert_eq!(
        dead.lease(1).await.err(),
        Some(410),
        "it has to register again"
    );
    assert_eq!(dead.heartbeat(&[]).await.err(), Some(410));
    let (status, answer) = chat(&lost, "s", &json!({"messages": [user("hi")]})).await;
    assert_eq!(status, 410, "{answer}");
    let alive = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "alive").await;
    let again = alive.one().await;
    assert_eq!((again.group, again.example), (lost.group, lost.example));
    assert_ne!(again.rollout, lost.rollout);
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_that_falls_silent_ends_the_run() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "trainer_s = 1.0")).await;
    let (status, answer) = orchestrator
        .post(
            "/trainer/heartbeat",
            &json!({"step": 3, "doing": "optimizer"}),
        )
        .await;
    assert_eq!(status, 200, "{answer}");
    let error = orchestrator.end().await.unwrap_err();
    assert!(
        matches!(&*error, RunError::TrainerSilent { doing, .. } if doing == "optimizer"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_trainer_that_is_started_again_has_the_time_of_a_start() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "trainer_s = 3.0")).await;
    let beat = json!({"step": 3, "doing": "optimizer"});
    assert_eq!(orchestrator.post("/trainer/heartbeat", &beat).await.0, 200);
    let starting = json!({"within_s": 4.5, "why": "was killed by SIGKILL"});
    let began = std::time::Instant::now();
    assert_eq!(
        orchestrator.post("/trainer/starting", &starting).await.0,
        200
    );
    let error = orchestrator.end().await.unwrap_err();
    assert!(began.elapsed() >= Duration::from_secs_f64(4.5));
    assert!(
        matches!(&*error, RunError::TrainerNotBack { why, .. } if why == "was killed by SIGKILL"),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_trainer_is_refused_and_learns_who_the_first_is() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "trainer_s = 60.0")).await;
    let identity = |id: &str| json!({"id": id, "pid": 4711, "host": format!("node-{id}")});
    let begin = |id: &str| json!({"trainer": identity(id)});
    let beat = |id: &str| json!({"step": 0, "doing": "x", "trainer": identity(id)});
    assert_eq!(
        orchestrator.post("/trainer/begin", &begin("a")).await.0,
        200
    );
    let (asked, alive) = (begin("b"), beat("a"));
    let (status, answer) = {
        let asking = orchestrator.post("/trainer/begin", &asked);
        tokio::pin!(asking);
        // The first sends heartbeats while the second asks.
        loop {
            tokio::select! {
                answer = &mut asking => break answer,
                (status, _) = orchestrator.post("/trainer/heartbeat", &alive) => assert_eq!(status, 200),
            }
        }
    };
    assert_eq!(
        (status, &answer["error"]["code"]),
        (409, &json!("trainer_taken"))
    );
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(message.contains("process 4711 on node-a"), "{message}");
    let resume = json!({"step": 0, "trainer": identity("b")});
    for (path, body) in [
        ("/trainer/heartbeat", beat("b")),
        ("/trainer/resume", resume),
        ("/trainer/batch", json!({"step": 1, "rank": 0})),
    ] {
        let (status, answer) = orchestrator.post(path, &body).await;
        assert_eq!(
            (status, &answer["error"]["code"]),
            (409, &json!("trainer_taken")),
            "{path}"
        );
    }
    let process = &orchestrator.status().await["trainer"]["process"];
    assert_eq!(*process, json!({"pid": 4711, "host": "node-a"}));
    // A trainer that has left makes room.
    let mut last = beat("a");
    last["leaving"] = json!(true);
    assert_eq!(orchestrator.post("/trainer/heartbeat", &last).await.0, 200);
    assert_eq!(
        orchestrator.post("/trainer/begin", &begin("b")).await.0,
        200
    );
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_first_prompt_that_is_too_long_is_named_and_tried_once() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let engine = Engine::start(MockConfig::default()).await;
    orchestrator.join(&engine.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    let too_long = json!({"messages": [user(&"word ".repeat(4000))]});
    assert_eq!(chat(&lease, "s", &too_long).await.0, 400);
    let outcome = Outcome {
        ok: true,
        ..Outcome::default()
    };
    assert!(worker.result(lease.rollout, outcome).await);
    let status = orchestrator.status().await;
    assert_eq!(status["failures"]["prompt_too_long"], 1);
    assert_eq!(status["buffer"][0]["resting"], 1);
    let first = status["environments"][0]["first_errors"]["model"]["message"]
        .as_str()
        .unwrap();
    assert!(
        first.starts_with("its first prompt has ") && first.contains("and the context is"),
        "{first}"
    );
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    engine.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_that_are_not_due_are_refused() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let manifest = trainer::write_weights(&place.output(), 1);
    let (status, answer) = announce(&orchestrator, 1, &manifest).await;
    assert_eq!(status, 409, "{answer}");
    assert_eq!(answer["error"]["code"], "version_not_due");
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_run_answers_every_waiting_request() {
    let place = Place::new();
    // By themselves the requests would be answered after this time, longer than any wait here.
    let config = place
        .toml("", "")
        .replace("long_poll_s = 2.0", "long_poll_s = 60.0");
    let config = primerl_orchestrator::Config::from_toml(&config, "test").unwrap();
    let orchestrator = Orchestrator::start(config).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let leasing = tokio::spawn(async move { worker.lease(1).await });
    let url = orchestrator.url.clone();
    let waiting = tokio::spawn(async move { trainer::batch_bytes(&url, 1, 0).await });
    orchestrator
        .until("the trainer and the worker wait", |status| {
            let waits = status["waits"].as_array().unwrap();
            let worker_waits = waits.iter().any(|wait| wait["who"] == "worker w");
            status["trainer"]["waiting"] == true && worker_waits
        })
        .await;
    let begun = std::time::Instant::now();
    orchestrator.shutdown.cancel();
    assert!(leasing.await.unwrap().unwrap().finished);
    assert_eq!(waiting.await.unwrap(), None);
    orchestrator.end().await.unwrap();
    assert!(begun.elapsed() < PATIENCE, "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_list_other_examples_are_refused_and_named() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let first = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "first").await;
    let other = json!({
        "environment": "task", "role": "train", "name": "other", "pid": 1, "examples": 5
    });
    let (status, answer) = orchestrator.post("/envs/register", &other).await;
    assert_eq!(status, 409);
    assert_eq!(answer["error"]["code"], "examples_differ");
    let reason = answer["error"]["message"].as_str().unwrap().to_owned();
    let words = [
        "`task`",
        "\"other\" lists 5 examples, the first one listed 16",
        "a new run in another output_dir",
    ];
    assert!(words.iter().all(|word| reason.contains(word)), "{reason}");
    let waits_for_others = |status: &Value| {
        let waits = status["waits"].as_array().unwrap();
        waits.iter().any(|wait| {
            let what = wait["for"].as_str().unwrap();
            wait["who"] == "environment \"task\"" && what.contains(&reason)
        })
    };
    let status = orchestrator.status().await;
    assert_eq!(status["refused_workers"][0]["reason"], reason);
    assert!(!waits_for_others(&status), "the first one is there");
    first.leave().await;
    let status = orchestrator.status().await;
    assert!(waits_for_others(&status), "{:#}", status["waits"]);
    Worker::register(&orchestrator.url, "task", WorkerRole::Train, "alike").await;
    let status = orchestrator.status().await;
    assert_eq!(status["refused_workers"], json!([]));
    assert!(!waits_for_others(&status));
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_gateway_saw_of_a_failed_rollout_overrides_its_workers_report() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let engine = Engine::start(MockConfig::default()).await;
    orchestrator.join(&engine.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let failed = |exception: &str| Outcome {
        error: Some(RolloutError {
            kind: "environment".into(),
            message: "it raised".into(),
            exception: Some(exception.into()),
            ..RolloutError::default()
        }),
        // Not reported by a worker.
        refusal: Some(Refusal {
            code: "engine_unavailable".into(),
            status: 503,
            overflow: None,
        }),
        ..Outcome::default()
    };
    let too_long = json!({"messages": [user(&"word ".repeat(4000))]});
    let short = json!({"messages": [user("hi")]});

    let lease = worker.one().await;
    assert_eq!(chat(&lease, "s", &short).await.0, 200);
    let (status, answer) = chat(&lease, "s", &too_long).await;
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("context_length_exceeded"))
    );
    // The same refusal, in the words of a client.
    assert!(worker.result(lease.rollout, failed("ProviderError")).await);
    let model = lease.rollout;

    // An agent that continued after a refusal.
    let lease = worker.one().await;
    assert_eq!(chat(&lease, "s", &too_long).await.0, 400);
    assert_eq!(chat(&lease, "s", &short).await.0, 200);
    assert!(worker.result(lease.rollout, failed("ToolError")).await);
    let lease = worker.one().await;
    assert!(worker.result(lease.rollout, failed("SandboxError")).await);

    let status = orchestrator.status().await;
    let kinds = json!({"model": 1, "tool": 1, "infrastructure": 1});
    assert_eq!(status["errors"], kinds);
    assert_eq!(status["environments"][0]["errors"], kinds);
    let text = crate::common::metrics(&orchestrator.url).await;
    for (kind, count) in [("model", 1), ("engine", 0), ("tool", 1)] {
        let line =
            format!(r#"primerl_rollout_errors_total{{environment="task",kind="{kind}"}} {count}"#);
        assert!(
            text.lines().any(|found| found == line),
            "{line} is not in {text}"
        );
    }
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    let trace = primerl_record::inspect::rollout(&place.output(), model).unwrap();
    let end = trace.end.unwrap();
    assert_eq!(end.error, Some(primerl_core::ErrorKind::Model));
    assert_eq!(end.reason.as_deref(), Some("model"));
}

/// The answer to the trainer that waits for a batch.
async fn told_to_publish_again(url: &str) -> Value {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let body = rmp_serde::to_vec_named(&json!({"step": 1, "rank": 0})).unwrap();
        let request = client()
            .post(format!("{url}/trainer/batch"))
            .header("content-type", "application/msgpack")
            .body(body);
        let answer = request.send().await.unwrap();
        assert_eq!(answer.status().as_u16(), 202);
        let answer: Value = rmp_serde::from_slice(&answer.bytes().await.unwrap()).unwrap();
        if !answer["publish_again"].is_null() {
            return answer["publish_again"].clone();
        }
        assert!(tokio::time::Instant::now() < deadline, "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_that_no_engine_can_load_are_asked_for_again() {
    type Damage = (&'static str, fn(&Path), &'static str);
    let damages: [Damage; 4] = [
        (
            "gone",
            |folder| std::fs::remove_dir_all(folder).unwrap(),
            "cannot read",
        ),
        (
            "an empty manifest",
            |folder| std::fs::write(folder.join("manifest.json"), b"").unwrap(),
            "is not a manifest",
        ),
        (
            "no weights",
            |folder| std::fs::remove_file(folder.join("model.safetensors")).unwrap(),
            "cannot read",
        ),
        (
            "a bit that flipped",
            |folder| {
                let file = folder.join("model.safetensors");
                let mut bytes = std::fs::read(&file).unwrap();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(file, bytes).unwrap();
            },
            "the bytes of w have",
        ),
    ];
    for (name, damage, words) in damages {
        let place = Place::new();
        let tables = "no_engine_s = 60.0";
        let config = place.toml("", "").replace("no_engine_s = 3.0", tables);
        let config = config.replace("long_poll_s = 2.0", "long_poll_s = 0.2");
        let config = primerl_orchestrator::Config::from_toml(&config, "test").unwrap();
        let orchestrator = Orchestrator::start(config).await;
        trainer::publish(&orchestrator.url, &place.output(), 0).await;
        damage(&place.output().join("broadcasts/step_0"));
        let engine = Engine::start(MockConfig::default()).await;
        orchestrator.join(&engine.url).await;
        let told = told_to_publish_again(&orchestrator.url).await;
        assert_eq!(told["version"], 0, "{name}");
        let why = told["why"].as_str().unwrap();
        assert!(why.contains(words), "{name}: {why}");
        // Written again, they are the same as those published before.
        trainer::publish(&orchestrator.url, &place.output(), 0).await;
        orchestrator
            .until("the engine is proved", |status| {
                status["engines"][0]["version"] == 0
            })
            .await;
        orchestrator.shutdown.cancel();
        orchestrator.end().await.unwrap();
        engine.stop().await;
    }
}
