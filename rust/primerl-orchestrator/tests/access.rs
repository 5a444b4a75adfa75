//! Who may do what, and what the gateway says to those who may not.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::engine::Engine;
use common::worker::{Worker, outcome};
use common::{Orchestrator, PATIENCE, Place, chat, client, trainer, user};
use primerl_engine::mock::MockConfig;
use primerl_orchestrator::Prepared;
use primerl_orchestrator::envs::client::{EnvClient, Notice, Options};
use primerl_orchestrator::envs::wire::{Lease, RegisterRequest, WorkerRole};
use primerl_orchestrator::inspect::{self, Question};
use primerl_orchestrator::secret::Secret;
use reqwest::RequestBuilder;
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

    // A rollout that never was, and one that cannot be, are answered in the same words.
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
    // A large body is not waited for.
    let large = json!({"messages": [user(&"x".repeat(2 << 20))]});
    assert_eq!(chat(&with_key(&mine, ""), "s", &large).await.0, 401);
    let models = client()
        .get(format!("{}/models", mine.base_url))
        .send()
        .await
        .unwrap();
    assert_eq!(models.status(), 401);
    for header in ["x-api-key", "api-key"] {
        let request = client().get(format!("{}/models", mine.base_url));
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
async fn a_rollout_that_is_over_is_told_to_its_owner_only() {
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

/// How an env worker's client gets on that shows this key.
fn registers(url: &str, api_key: Option<&str>) -> Result<(), String> {
    let registration = RegisterRequest {
        environment: "task".into(),
        role: WorkerRole::Train,
        name: "w".into(),
        pid: 1,
        examples: 16,
        whole_groups: false,
        max_concurrent: None,
        listing: None,
    };
    let client = EnvClient::start(Options {
        orchestrator_url: url.into(),
        api_key: api_key.map(Secret::new),
        registration,
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
async fn a_run_with_a_key_serves_nobody_without_it() {
    LazyLock::force(&LOG);
    let place = Place::new();
    let prepared = Prepared::new(place.config("", ""), None).unwrap();
    let prepared = prepared.with_run_key(Some(Secret::new("the-runs-key")));
    let orchestrator = Orchestrator::start_prepared(prepared).await;
    let url = orchestrator.url.clone();
    let get = |path: &str| client().get(format!("{url}{path}"));
    let post = |path: &str| client().post(format!("{url}{path}"));
    assert_eq!(status_of(get("/health"), None).await, 200);
    for key in [None, Some("another"), Some("the-runs-key0")] {
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
    assert_eq!(status_of(get("/status"), Some("the-runs-key")).await, 200);
    let rollout = get("/rollouts/0/v1/models");
    assert_eq!(status_of(rollout, Some("the-runs-key")).await, 401);
    let worker = url.clone();
    let (without, with) = tokio::task::spawn_blocking(move || {
        (
            registers(&worker, None),
            registers(&worker, Some("the-runs-key")),
        )
    })
    .await
    .unwrap();
    let refusal = without.unwrap_err();
    assert!(refusal.contains("PRIMERL_API_KEY"));
    assert_eq!(with, Ok(()));
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    let said = refusal + &LOG.text();
    assert!(!said.contains("the-runs-key"), "{said}");
    for file in files_under(&place.output()) {
        let bytes = std::fs::read(&file).unwrap();
        assert!(!contains(&bytes, b"the-runs-key"), "{}", file.display());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_machines_are_served_only_where_there_is_a_key() {
    let place = Place::new();
    let start = async |key: Option<Secret>| {
        let prepared = Prepared::new(place.config("", ""), None).unwrap();
        let listener = TcpListener::bind("0.0.0.0:0").await.unwrap();
        prepared.with_run_key(key).start(listener).await
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

/// All that this process logs, however unimportant.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

/// Of all tests, from the first one that asks.
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

/// Everything the run writes and says, but the file that is there to hold the secret.
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
