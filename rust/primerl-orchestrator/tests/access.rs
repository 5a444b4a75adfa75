//! Who may do what, and what the gateway says to those who may not.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::engine::Engine;
use common::worker::{Worker, outcome, registration};
use common::{Orchestrator, PATIENCE, Place, RUN_KEY, chat, prepared, stranger, trainer, user};
use primerl_core::RolloutId;
use primerl_engine_server::mock::MockConfig;
use primerl_orchestrator::Prepared;
use primerl_orchestrator::envs::client::{EnvClient, Notice, Options};
use primerl_orchestrator::envs::wire::{self, Lease, WorkerRole};
use primerl_record::inspect::{self, Question};
use primerl_service::secret::Secret;
use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use std::io::Write;
use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

struct Scene {
    place: Place,
    orchestrator: Orchestrator,
    engine: Engine,
    worker: Worker,
}

impl Scene {
    async fn new() -> Scene {
        let place = Place::new();
        let orchestrator = Orchestrator::start(place.config("", "")).await;
        let engine = Engine::start(MockConfig::default()).await;
        let join = json!({"url": engine.url});
        orchestrator.post("/engines/join", &join).await;
        trainer::publish(&orchestrator.url, &place.output(), 0).await;
        let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
        Scene {
            place,
            orchestrator,
            engine,
            worker,
        }
    }

    async fn end(self) -> Place {
        self.orchestrator.shutdown.cancel();
        self.orchestrator.end().await.unwrap();
        self.engine.stop().await;
        self.place
    }
}

fn hello() -> Value {
    json!({"messages": [user("hi")]})
}

/// The lease with another key.
fn with_key(lease: &Lease, key: &str) -> Lease {
    Lease {
        api_key: Secret::new(key),
        ..lease.clone()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rollout_takes_no_key_but_its_own() {
    let scene = Scene::new().await;
    let (mine, other) = (scene.worker.one().await, scene.worker.one().await);
    assert_eq!(chat(&mine, "s", &hello()).await.0, 200);
    let (status, foreign) = chat(&with_key(&mine, other.api_key.reveal()), "s", &hello()).await;
    assert_eq!(status, 401);
    assert_eq!(foreign["error"]["code"], "invalid_api_key");
    let message = foreign["error"]["message"].as_str().unwrap();
    assert!(
        message.contains("`api_key` of the rollout's lease"),
        "{message}"
    );

    // A rollout that never existed, and one that cannot exist, get the same answer.
    for rollout in ["999999", "none"] {
        let base_url = mine
            .base_url
            .replace(&format!("/{}/", mine.rollout), &format!("/{rollout}/"));
        let unknown = Lease {
            base_url,
            ..mine.clone()
        };
        assert_eq!(chat(&unknown, "s", &hello()).await, (401, foreign.clone()));
    }
    // The server does not wait for a large body.
    let large = json!({"messages": [user(&"x".repeat(2 << 20))]});
    assert_eq!(chat(&with_key(&mine, ""), "s", &large).await.0, 401);
    let models = stranger()
        .get(format!("{}/models", mine.base_url))
        .send()
        .await
        .unwrap();
    assert_eq!(models.status(), 401);
    for header in ["x-api-key", "api-key"] {
        let request = stranger().get(format!("{}/models", mine.base_url));
        let answer = request
            .header(header, mine.api_key.reveal())
            .send()
            .await
            .unwrap();
        assert_eq!(answer.status(), 200, "{header}");
    }
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_its_owner_learns_that_a_rollout_is_over() {
    let scene = Scene::new().await;
    let lease = scene.worker.one().await;
    assert_eq!(chat(&lease, "s", &hello()).await.0, 200);
    assert!(scene.worker.result(lease.rollout, outcome("s", 1.0)).await);
    assert_eq!(chat(&lease, "s", &hello()).await.0, 410);
    assert_eq!(chat(&with_key(&lease, "guess"), "s", &hello()).await.0, 401);
    scene.end().await;
}

async fn status_of(request: RequestBuilder, key: Option<&str>) -> u16 {
    let request = match key {
        Some(key) => request.bearer_auth(key),
        None => request,
    };
    request.send().await.unwrap().status().as_u16()
}

/// The result of an env worker's client with this key.
fn registers(url: &str, api_key: Option<&str>) -> Result<(), String> {
    let client = EnvClient::start(Options {
        orchestrator_url: url.into(),
        api_key: api_key.map(Secret::new),
        registration: registration("task", WorkerRole::Train, "w"),
        max_concurrent: 1,
        give_up: PATIENCE,
        end_process: |reason| panic!("{reason}"),
    });
    let client = client.unwrap();
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        for notice in client.take_notices() {
            match notice {
                Notice::Registered(_) => return Ok(()),
                Notice::Ended(end) => return Err(end.to_string()),
                _ => {}
            }
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Err("no answer".into())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_configured_key_is_needed_and_is_in_no_file_and_no_log() {
    LazyLock::force(&LOG);
    let place = Place::new();
    let orchestrator = Orchestrator::start(place.config("", "")).await;
    let url = orchestrator.url.clone();
    let get = |path: &str| stranger().get(format!("{url}{path}"));
    let post = |path: &str| stranger().post(format!("{url}{path}"));
    assert_eq!(status_of(get("/health"), None).await, 200);
    for key in [None, Some("another"), Some(&format!("{RUN_KEY}0"))] {
        for path in ["/status", "/metrics", "/v1/models", "/nowhere"] {
            assert_eq!(status_of(get(path), key).await, 401, "{path}");
        }
        for path in [
            "/envs/register",
            "/engines/join",
            "/trainer/batch",
            "/shutdown",
        ] {
            assert_eq!(status_of(post(path), key).await, 401, "{path}");
        }
    }
    assert_eq!(status_of(get("/status"), Some(RUN_KEY)).await, 200);
    let rollout = get("/rollouts/0/v1/models");
    assert_eq!(status_of(rollout, Some(RUN_KEY)).await, 401);
    let worker = url.clone();
    let (without, with) = tokio::task::spawn_blocking(move || {
        (registers(&worker, None), registers(&worker, Some(RUN_KEY)))
    })
    .await
    .unwrap();
    let refusal = without.unwrap_err();
    assert!(refusal.contains("PRIMERL_API_KEY"));
    assert_eq!(with, Ok(()));
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    let said = refusal + &LOG.text();
    assert!(!said.contains(RUN_KEY), "{said}");
    for file in files_under(&place.output()) {
        let bytes = std::fs::read(&file).unwrap();
        assert!(!contains(&bytes, RUN_KEY.as_bytes()), "{}", file.display());
    }
}

/// Which key opens a route.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Opens {
    Anyone,
    Rollout,
    Run,
}

/// A new route belongs to the run, unless it is named here.
fn opened_by(path: &str) -> Opens {
    match path {
        "/health" | "/" | "/page/assets/{name}" => Opens::Anyone,
        "/rollouts/{rollout}/limits" => Opens::Run,
        _ if path.starts_with("/rollouts/{rollout}/") => Opens::Rollout,
        _ => Opens::Run,
    }
}

/// Every method of every route with no key, with each kind of key, and with one that is not of this run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_route_is_opened_by_its_own_key_alone() {
    let place = Place::new();
    // Nothing is configured, as in most runs: the key is generated.
    let prepared = Prepared::new(place.config("", ""), None).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let running = prepared.with_run_key(None).start(listener).await.unwrap();
    let run_key = std::fs::read_to_string(place.output().join("run/key")).unwrap();
    let run_key = run_key.trim_end();
    let (mine, others) = (
        running.rollout_key(RolloutId(0)),
        running.rollout_key(RolloutId(1)),
    );
    let (url, paths) = (running.url().to_owned(), running.paths());
    for path in ["/shutdown", "/envs/result", "/trainer/weights", "/status"] {
        assert!(paths.iter().any(|known| known == path), "{path}");
    }
    let http = stranger();
    let mut rollout_routes = 0;
    for path in &paths {
        let opens = opened_by(path);
        rollout_routes += u32::from(opens == Opens::Rollout);
        let at = path
            .replace("{rollout}", "0")
            .replace("{turn}", "0")
            .replace("{*model}", "m")
            .replace(['{', '}'], "");
        for method in ["GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"] {
            let method = Method::from_bytes(method.as_bytes()).unwrap();
            let ask = |key: Option<&str>| {
                let request = http.request(method.clone(), format!("{url}{at}"));
                let key = key.map(str::to_owned);
                async move { status_of(request, key.as_deref()).await }
            };
            let refused = [
                (None, opens != Opens::Anyone),
                (Some(""), opens != Opens::Anyone),
                (Some(mine.reveal()), opens == Opens::Run),
                (Some(others.reveal()), opens != Opens::Anyone),
                (Some(run_key), opens == Opens::Rollout),
            ];
            for (key, is_refused) in refused {
                // Accepted requests would act: a POST to /shutdown ends the run. No route accepts OPTIONS.
                if is_refused || method == Method::OPTIONS {
                    let status = ask(key).await;
                    assert_eq!(status == 401, is_refused, "{method} {at} {key:?}: {status}");
                }
            }
        }
    }
    assert!(rollout_routes > 10, "{paths:?}");
    let shutdown = CancellationToken::new();
    shutdown.cancel();
    running.wait(shutdown).await.unwrap();
}

/// What an agent could have done to its run with its rollout's key, before every run had a key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_cannot_report_its_reward_or_end_the_run() {
    let scene = Scene::new().await;
    let lease = scene.worker.one().await;
    let url = scene.orchestrator.url.clone();
    let key = Some(lease.api_key.reveal());
    let result = wire::ResultRequest {
        worker: scene.worker.id,
        rollout: lease.rollout,
        outcome: outcome("s", 1e6),
    };
    for (path, body) in [
        (wire::RESULT, wire::encode(&result).unwrap()),
        (wire::LEAVE, Vec::new()),
        (
            "/shutdown",
            rmp_serde::to_vec_named(&json!({"reason": "me"})).unwrap(),
        ),
    ] {
        let request = stranger()
            .post(format!("{url}{path}"))
            .header("content-type", wire::CONTENT_TYPE)
            .body(body);
        assert_eq!(status_of(request, key).await, 401, "{path}");
    }
    assert_eq!(
        chat(&lease, "s", &hello()).await.0,
        200,
        "the run continues"
    );
    assert!(scene.worker.result(lease.rollout, outcome("s", 1.0)).await);
    scene.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_machines_are_served_only_where_there_is_a_key() {
    let place = Place::new();
    let start = async |key: Option<Secret>| {
        let prepared = prepared(place.config("", "")).with_run_key(key);
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        prepared.start(listener).await
    };
    let refused = start(None).await.err().unwrap();
    assert!(refused.is_input());
    let message = refused.to_string();
    assert!(
        message.contains("host") && message.contains("PRIMERL_API_KEY"),
        "{message}"
    );
    assert!(!place.output().exists(), "nothing was started");
    let running = start(Some(Secret::new("key"))).await.unwrap();
    let shutdown = CancellationToken::new();
    shutdown.cancel();
    running.wait(shutdown).await.unwrap();
}

fn files_under(folder: &Path) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => found.extend(files_under(&path)),
            false => found.push(path),
        }
    }
    found
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Everything that this process logs, at any level.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

/// The log of all tests, from the first one that asks.
static LOG: LazyLock<Log> = LazyLock::new(|| {
    let log = Log::default();
    let writer = log.clone();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(move || writer.clone())
        .init();
    log
});

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Everything the run writes and prints, except the file that holds the secret.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_that_is_written_or_said_holds_a_key() {
    LazyLock::force(&LOG);
    let scene = Scene::new().await;
    let lease = scene.worker.one().await;
    let key = lease.api_key.reveal().to_owned();
    let mut said = format!("{lease:?}");
    said += &chat(&lease, "s", &hello()).await.1.to_string();
    said += &chat(&lease, "s", &json!({"messages": 1}))
        .await
        .1
        .to_string();
    said += &chat(&with_key(&lease, "wrong-key"), "s", &hello())
        .await
        .1
        .to_string();
    said += &scene.orchestrator.status().await.to_string();
    said += &common::metrics(&scene.orchestrator.url).await;
    assert!(scene.worker.result(lease.rollout, outcome("s", 1.0)).await);
    let place = scene.end().await;
    let output = place.output();
    let secret = std::fs::read(output.join("run/secret")).unwrap();
    assert_eq!(secret.len(), 32);
    said += &inspect::answer(&output, Question::Rollout(lease.rollout))
        .unwrap()
        .to_string();
    let logged = LOG.text();
    assert!(logged.contains("worker joined"), "{logged}");
    said += &logged;
    for hidden in [key.as_str(), "wrong-key"] {
        assert!(!said.contains(hidden), "{said}");
    }
    let journal = output.join("journal");
    assert!(
        files_under(&output)
            .iter()
            .any(|file| file.starts_with(&journal))
    );
    for file in files_under(&output) {
        let bytes = std::fs::read(&file).unwrap();
        assert!(!contains(&bytes, key.as_bytes()), "{}", file.display());
        if !file.ends_with("run/secret") {
            assert!(!contains(&bytes, &secret), "{}", file.display());
        }
    }
}
