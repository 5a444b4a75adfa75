//! A run over loopback: the orchestrator, mock engines, scripted environment workers, a scripted trainer.

#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

pub mod engine;
pub mod session;
pub mod trainer;
pub mod worker;

use self::engine::Engine;
use self::trainer::Batch;
use self::worker::Worker;
use primerl_engine_server::mock::MockConfig;
use primerl_gateway::RUN_KEY_VARIABLE;
use primerl_orchestrator::envs::wire::{Lease, WorkerRole};
use primerl_orchestrator::{Config, ExitReason, Prepared, RunError, Running};
use primerl_service::secret::Secret;
use reqwest::RequestBuilder;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Longest wait in any test.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The run's key of the orchestrators here.
pub const RUN_KEY: &str = "the-key-of-the-tests-runs";

/// A folder with a tiny model, and an output folder in it.
pub struct Place {
    folder: TempDir,
}

impl Place {
    pub fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        primerl_render::testing::write_tiny_model(&folder.path().join("model")).unwrap();
        Place { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn output(&self) -> PathBuf {
        self.path("out")
    }

    /// A small run; `extra` are further lines before the tables, `tables` after.
    pub fn toml(&self, extra: &str, tables: &str) -> String {
        let max_steps = match extra.contains("max_steps") {
            true => "",
            false => "max_steps = 4",
        };
        format!(
            r#"
output_dir = {output:?}
{max_steps}
seq_len = 512
batch_size = 8
group_size = 4
{extra}
[model]
path = {model:?}
name = "m"
[sampling]
max_tokens = 12
[[train.env]]
id = "task"
[timeouts]
worker_s = 5.0
long_poll_s = 2.0
rollout_s = 20.0
no_engine_s = 3.0
{tables}
"#,
            output = self.output(),
            model = self.path("model"),
        )
    }

    pub fn config(&self, extra: &str, tables: &str) -> Config {
        Config::from_toml(&self.toml(extra, tables), "test").unwrap()
    }
}

/// With the key that [`client`] sends.
pub fn prepared(config: Config) -> Prepared {
    let prepared = Prepared::new(config, None).unwrap();
    prepared.with_run_key(Some(Secret::new(RUN_KEY)))
}

/// The command, with the key that [`client`] sends.
pub fn orchestrate() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_primerl-orchestrate"));
    command.env(RUN_KEY_VARIABLE, RUN_KEY);
    command
}

/// An orchestrator in this process.
pub struct Orchestrator {
    pub url: String,
    pub shutdown: CancellationToken,
    end: JoinHandle<Result<ExitReason, Arc<RunError>>>,
}

impl Orchestrator {
    pub async fn start(config: Config) -> Orchestrator {
        Orchestrator::start_prepared(prepared(config)).await
    }

    pub async fn start_prepared(prepared: Prepared) -> Orchestrator {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let running: Running = prepared.start(listener).await.unwrap();
        let url = running.url().to_owned();
        // Its port may have been that of a run before.
        OVER.lock().unwrap().remove(&format!("{url}/"));
        let shutdown = CancellationToken::new();
        let ending = (running.wait(shutdown.clone()), url.clone());
        let end = tokio::spawn(async move {
            let (wait, url) = ending;
            let reason = wait.await;
            OVER.lock().unwrap().insert(format!("{url}/"));
            reason
        });
        Orchestrator { url, shutdown, end }
    }

    pub async fn end(self) -> Result<ExitReason, Arc<RunError>> {
        tokio::time::timeout(PATIENCE, self.end)
            .await
            .expect("the run ends")
            .unwrap()
    }

    pub async fn status(&self) -> Value {
        get(&format!("{}/status", self.url)).await
    }

    /// Poll `/status` until `reached`.
    pub async fn until(&self, what: &str, reached: impl Fn(&Value) -> bool) -> Value {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let status = self.status().await;
            if reached(&status) {
                return status;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "not reached: {what}; status {status:#}"
            );
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    pub async fn join(&self, engine_url: &str) {
        let (status, answer) = self
            .post("/engines/join", &json!({"url": engine_url}))
            .await;
        assert_eq!(status, 200, "{answer}");
    }

    /// POST a msgpack body, get a msgpack answer.
    pub async fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let bytes = rmp_serde::to_vec_named(body).unwrap();
        let answer = client()
            .post(format!("{}{path}", self.url))
            .header("content-type", "application/msgpack")
            .body(bytes)
            .send()
            .await
            .unwrap();
        let status = answer.status().as_u16();
        let bytes = answer.bytes().await.unwrap();
        let value = serde_json::from_slice(&bytes).or_else(|_| rmp_serde::from_slice(&bytes));
        (status, value.unwrap_or(Value::Null))
    }
}

/// A whole run with one engine and one worker, whose rollouts have so many turns.
pub async fn trained(place: &Place, config: Config, mock: MockConfig, turns: usize) -> Vec<Batch> {
    let orchestrator = Orchestrator::start(config).await;
    let engine = Engine::start(mock).await;
    orchestrator.join(&engine.url).await;
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "a").await;
    let worker = tokio::spawn(worker.work(turns));
    let batches = trainer::train(orchestrator.url.clone(), place.output()).await;
    orchestrator.end().await.unwrap();
    worker.await.unwrap();
    engine.stop().await;
    batches
}

/// User and system time of a process, seconds.
pub fn cpu_seconds(process: &str) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields = stat.rsplit_once(')').unwrap().1.split_whitespace();
    let ticks = |field: &str| field.parse::<f64>().unwrap();
    fields.skip(11).take(2).map(ticks).sum::<f64>() / 100.0
}

/// Whether all engines of `/status` have proved their weights.
pub fn all_proved(status: &Value) -> bool {
    status["engines"]
        .as_array()
        .unwrap()
        .iter()
        .all(|engine| !engine["version"].is_null())
}

/// Metrics of an orchestrator or an engine, in the Prometheus text format.
pub async fn metrics(url: &str) -> String {
    let answer = client().get(format!("{url}/metrics")).send().await.unwrap();
    answer.text().await.unwrap()
}

/// It sends the run's key, unless a request has another.
pub fn client() -> reqwest::Client {
    let key = HeaderValue::try_from(format!("Bearer {RUN_KEY}")).unwrap();
    builder()
        .default_headers(HeaderMap::from_iter([(AUTHORIZATION, key)]))
        .build()
        .unwrap()
}

/// It has no key.
pub fn stranger() -> reqwest::Client {
    builder().build().unwrap()
}

fn builder() -> reqwest::ClientBuilder {
    primerl_service::tls::plain().timeout(PATIENCE)
}

pub async fn get(url: &str) -> Value {
    client()
        .get(url)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap()
}

/// A chat request to a rollout.
pub async fn chat(lease: &Lease, session: &str, body: &Value) -> (u16, Value) {
    chat_with(&client(), lease, session, body).await
}

/// The same over open connections.
pub async fn chat_with(
    http: &reqwest::Client,
    lease: &Lease,
    session: &str,
    body: &Value,
) -> (u16, Value) {
    let request = http
        .post(format!("{}/chat/completions", lease.base_url))
        .bearer_auth(lease.api_key.reveal())
        .header("x-session-id", session)
        .json(body);
    let answer = persistently(request).await;
    let status = answer.status().as_u16();
    (status, answer.json().await.unwrap_or(Value::Null))
}

/// Sends until the orchestrator, which may just be restarting, has answered in full; repeats are marked as SDKs mark
/// them.
pub async fn persistently(request: RequestBuilder) -> reqwest::Response {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    for attempt in 0.. {
        let (http, request) = request
            .try_clone()
            .unwrap()
            .header("x-stainless-retry-count", attempt)
            .build_split();
        let request = request.unwrap();
        let sent = request.try_clone().unwrap();
        let whole = async {
            let answer = http.execute(sent).await?;
            let (status, headers) = (answer.status(), answer.headers().clone());
            let body = answer.bytes().await?;
            let failed =
                status.as_u16() == 500 && String::from_utf8_lossy(&body).contains("run_failed");
            let mut whole = axum::http::Response::new(body);
            *whole.status_mut() = status;
            *whole.headers_mut() = headers;
            Ok::<_, reqwest::Error>((!failed).then(|| whole.into()))
        };
        match whole.await {
            Ok(Some(answer)) => return answer,
            // It is about to end, and may be started again.
            Ok(None) => assert!(tokio::time::Instant::now() < deadline, "the run failed"),
            Err(_) if is_over(&request) => return over(),
            Err(error) => assert!(tokio::time::Instant::now() < deadline, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    unreachable!("attempts are not counted out")
}

/// Addresses of orchestrators in this process whose run is over. A client that a busy machine kept from asking in the
/// time that a run waits for its clients finds nothing there.
static OVER: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());

fn is_over(request: &reqwest::Request) -> bool {
    let asked = request.url().as_str();
    let over = OVER.lock().unwrap();
    over.iter().any(|url| asked.starts_with(url.as_str()))
}

/// What a run that is over answers as long as it listens.
fn over() -> reqwest::Response {
    let mut answer = axum::http::Response::new("");
    *answer.status_mut() = axum::http::StatusCode::GONE;
    answer.into()
}

/// An address that refuses connections. The socket holds its port, which the system would otherwise give away.
pub fn unserved() -> (String, TcpSocket) {
    let held = TcpSocket::new_v4().unwrap();
    held.bind(([127, 0, 0, 1], 0).into()).unwrap();
    (format!("http://{}", held.local_addr().unwrap()), held)
}

pub fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

pub fn read_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}
