//! Engines that return at another address, that report to be well and are not, and that can never serve the run.

use crate::common::engine::Engine;
use crate::common::worker::Worker;
use crate::common::{Orchestrator, Place, all_proved, chat, trainer, user};
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::envs::wire::WorkerRole;
use serde_json::{Value, json};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// Its place, its number and the path of its requests are the same; it is not looked for at its old place.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_returns_at_another_address_takes_its_place_by_name() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let join_as = async |engine: &Engine, name: &str| {
        let body = json!({"url": engine.url, "name": name});
        let (status, answer) = orchestrator.post("/engines/join", &body).await;
        assert_eq!(status, 200, "{answer}");
        answer["engine"].as_u64().unwrap()
    };
    let (first, other) = (
        Engine::start(MockConfig::default()).await,
        Engine::start(MockConfig::default()).await,
    );
    assert_eq!(join_as(&first, "a").await, 0);
    assert_eq!(join_as(&other, "b").await, 1);
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator.until("both are proved", all_proved).await;
    let (port, mock) = first.kill().await;
    let again = Engine::start(mock).await;
    assert_eq!(join_as(&again, "a").await, 0);
    let status = orchestrator
        .until("it is proved again", |status| {
            status["engines"][0]["url"] == again.url.as_str() && all_proved(status)
        })
        .await;
    assert_eq!(status["engines"].as_array().unwrap().len(), 2, "{status:#}");
    // `b` gets the port that `a` had first, and then `a` the one that `b` had.
    let old_b = other.kill().await;
    let b = Engine::restart((port, MockConfig::default())).await;
    assert_eq!(join_as(&b, "b").await, 1);
    again.kill().await;
    let a = Engine::restart(old_b).await;
    assert_eq!(join_as(&a, "a").await, 0);
    let status = orchestrator
        .until("both are proved again", |status| {
            status["engines"][1]["url"] == b.url.as_str() && all_proved(status)
        })
        .await;
    assert_eq!(status["engines"][0]["url"], a.url.as_str());
    // Another name at its address: `b` is not there any more.
    b.kill().await;
    let c = Engine::restart((port, MockConfig::default())).await;
    assert_eq!(join_as(&c, "c").await, 2);
    let status = orchestrator
        .until("the new one is proved", |status| {
            status["engines"][2]["version"] == 0 && status["engines"][1]["version"].is_null()
        })
        .await;
    let doing = status["engines"][1]["doing"].as_str().unwrap();
    assert!(
        doing.contains("another engine registered at its address"),
        "{doing}"
    );
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    let seats = std::fs::read_to_string(place.output().join("run/engines.json")).unwrap();
    let seats: Value = serde_json::from_str(&seats).unwrap();
    let names = seats.as_array().unwrap().iter().map(|seat| &seat["name"]);
    assert_eq!(names.collect::<Vec<_>>(), ["a", "c"]);
    // The journal has `b` at the address of `c`; it is not looked for there.
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let engines = orchestrator.status().await["engines"].clone();
    let engines = engines.as_array().unwrap().iter();
    let numbers = engines.map(|engine| engine["engine"].as_u64());
    assert_eq!(numbers.collect::<Vec<_>>(), [Some(0), Some(2)]);
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    a.stop().await;
    c.stop().await;
}

/// A server that answers every route of a health check, but fails or never ends its requests.
async fn broken_engine(good: &str, mode: Broken) -> (String, tokio::task::JoinHandle<()>) {
    let good = good.to_owned();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let handler = move |request: axum::extract::Request| {
        let good = good.clone();
        async move {
            use axum::response::IntoResponse;
            let (parts, body) = request.into_parts();
            let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
            let path = parts.uri.path();
            if path == "/pause" && matches!(mode, Broken::NeverPauses) {
                std::future::pending::<()>().await;
            }
            let is_stuck = matches!(mode, Broken::Sticks(stuck) if stuck.load(Ordering::SeqCst));
            if path == "/weight_info" && is_stuck {
                std::future::pending::<()>().await;
            }
            if path == "/inference/v1/generate"
                && !String::from_utf8_lossy(&body).contains("primerl-probe")
            {
                match mode {
                    Broken::Fails => {
                        return (axum::http::StatusCode::INTERNAL_SERVER_ERROR, "broken")
                            .into_response();
                    }
                    Broken::Hangs => std::future::pending().await,
                    Broken::Sticks(_) if is_stuck => {
                        return (axum::http::StatusCode::INTERNAL_SERVER_ERROR, "broken")
                            .into_response();
                    }
                    Broken::Sticks(_) | Broken::NeverPauses => {}
                }
            }
            let query = parts
                .uri
                .query()
                .map(|query| format!("?{query}"))
                .unwrap_or_default();
            let request = crate::common::client()
                .request(parts.method.clone(), format!("{good}{path}{query}"));
            let request = request
                .header("content-type", "application/json")
                .body(body);
            let answer = request.send().await.unwrap();
            let status = answer.status();
            let bytes = answer.bytes().await.unwrap();
            (status, bytes).into_response()
        }
    };
    let app = axum::Router::new().fallback(handler);
    let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    (url, serving)
}

#[derive(Clone, Copy)]
enum Broken {
    Fails,
    Hangs,
    NeverPauses,
    /// From then on its requests fail, and its label cannot be read.
    Sticks(&'static AtomicBool),
}

/// It reports that it is well, and its metrics stand still or its answers are errors: the rules on requests notice it.
async fn is_taken_out(mode: Broken, reason: &str) {
    let place = Place::new();
    let toml = place
        .toml("", "")
        .replace("worker_s = 5.0", "worker_s = 60.0");
    let toml = toml.replace("rollout_s = 20.0", "rollout_s = 60.0");
    let config = primerl_orchestrator::Config::from_toml(&toml, "test").unwrap();
    let orchestrator = Orchestrator::start(config).await;
    let (behind, sound) = (
        Engine::start(MockConfig::default()).await,
        Engine::start(MockConfig::default()).await,
    );
    let (url, serving) = broken_engine(&behind.url, mode).await;
    for url in [&url, &sound.url] {
        orchestrator.join(url).await;
    }
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator.until("both are proved", all_proved).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    let over = Arc::new(AtomicBool::new(false));
    let requests: Vec<_> = (0..12)
        .map(|session| {
            let (lease, over) = (lease.clone(), Arc::clone(&over));
            let body = json!({"messages": [user("hi")]});
            tokio::spawn(async move {
                let mut turn = 0;
                loop {
                    let answered = chat(&lease, &format!("s{session}-{turn}"), &body).await;
                    turn += 1;
                    if answered.0 != 200 || over.load(Ordering::SeqCst) {
                        return answered;
                    }
                    // A rollout has 1024 conversations at most.
                    tokio::time::sleep(Duration::from_millis(500)).await;
                }
            })
        })
        .collect();
    let status = orchestrator
        .until("it is taken out", |status| {
            status["engines"][0]["version"].is_null()
        })
        .await;
    let doing = status["engines"][0]["doing"].as_str().unwrap();
    assert!(doing.contains(reason), "{doing}");
    over.store(true, Ordering::SeqCst);
    for request in requests {
        let (status, answer) = request.await.unwrap();
        assert_eq!(status, 200, "{answer}");
    }
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    serving.abort();
    behind.stop().await;
    sound.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_requests_fail_is_taken_out_though_it_says_that_it_is_well() {
    is_taken_out(Broken::Fails, "requests failed").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_makes_no_tokens_is_taken_out_though_it_says_that_it_is_well() {
    is_taken_out(Broken::Hangs, "has made no token for").await;
}

/// Like a server whose computing process was stopped: it is named long before an update has to end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_does_not_pause_for_new_weights_is_named() {
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let sound = Engine::start(MockConfig::default()).await;
    let (url, serving) = broken_engine(&sound.url, Broken::NeverPauses).await;
    orchestrator.join(&url).await;
    orchestrator.join(&sound.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator
        .until("it is named", |status| {
            let doing = status["engines"][0]["doing"].as_str().unwrap_or_default();
            doing.contains("pause: no answer within 20s") && status["engines"][1]["version"] == 0
        })
        .await;
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    serving.abort();
    sound.stop().await;
}

/// The only engine, whose server reports that it is well: no other engine would ever find out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_does_not_say_what_it_serves_is_given_up() {
    static STUCK: AtomicBool = AtomicBool::new(false);
    let place = Place::new();
    let toml = place
        .toml("", "")
        .replace("no_engine_s = 3.0", "no_engine_s = 600.0")
        .replace("rollout_s = 20.0", "rollout_s = 60.0");
    let config = primerl_orchestrator::Config::from_toml(&toml, "test").unwrap();
    let orchestrator = Orchestrator::start(config).await;
    let behind = Engine::start(MockConfig::default()).await;
    let (url, serving) = broken_engine(&behind.url, Broken::Sticks(&STUCK)).await;
    orchestrator.join(&url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    orchestrator.until("it is proved", all_proved).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    STUCK.store(true, Ordering::SeqCst);
    let request = tokio::spawn(async move {
        let body = json!({"messages": [user("hi")]});
        chat(&lease, "s", &body).await
    });
    orchestrator
        .until("it is given up", |status| {
            let doing = status["engines"][0]["doing"].as_str().unwrap_or_default();
            doing.contains("looked at, but weight_info")
                && status["engines"][0]["version"].is_null()
        })
        .await;
    request.abort();
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    serving.abort();
    behind.stop().await;
}

/// Everything that vLLM lacks by itself is reported at once, and the run ends long before `no_engine_s`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_can_never_serve_the_run_ends_it_by_name() {
    let place = Place::new();
    let timeouts = place
        .toml("", "")
        .replace("no_engine_s = 3.0", "no_engine_s = 600.0");
    let config = primerl_orchestrator::Config::from_toml(&timeouts, "test").unwrap();
    let orchestrator = Orchestrator::start(config).await;
    let card = json!({"data": [{"id": "m", "max_model_len": 10}]});
    let refused = (
        axum::http::StatusCode::FORBIDDEN,
        "Scale-out endpoints are disabled.",
    );
    let app = axum::Router::new()
        .route("/health", axum::routing::get(async || ""))
        .route(
            "/v1/models",
            axum::routing::get(async move || axum::Json(card)),
        )
        .route(
            "/inference/v1/abort_requests",
            axum::routing::post(async move || refused),
        );
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let serving = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    orchestrator.join(&url).await;
    let error = orchestrator
        .end()
        .await
        .expect_err("the run fails")
        .to_string();
    for word in [
        url.as_str(),
        "--enable-scale-out",
        "VLLM_SERVER_DEV_MODE=1",
        "--max-model-len",
        "docs/vllm.md",
    ] {
        assert!(error.contains(word), "{word}: {error}");
    }
    serving.abort();
}
