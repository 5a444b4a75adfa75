//! Server-sent events through the whole gateway: 1,000 clients read streams of one mock engine at the same time.
//!
//! `cargo bench -p primerl-orchestrator --bench streams`
//!
//! The orchestrator is a separate process; engines and clients run here, on the same two cores. It prints
//! * tokens for each second of the orchestrator's CPU, with an engine that gives them as fast as it can;
//! * what the gateway adds to a token's way, from the end of the engine's step to the client: the same streams straight from
//!   the engines and through the gateway, medians and 99th percentiles, of the tokens behind each stream's first (those
//!   measure how fast 1,000 requests of one instant are taken). Eight engines of 125 sequences, each at its own pace as
//!   machines do: stepping every 90 to 118 ms, which with engines, gateway and clients takes most of two cores, and at a
//!   half of that load; and one engine that gives all 1,000 streams a token in the same instant;
//! * memory for each idle conversation of 32,000 tokens.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

#[path = "../tests/common/mod.rs"]
mod common;

use bytes::Bytes;
use common::engine::Engine;
use common::worker::Worker;
use common::{Place, cpu_seconds, trainer};
use futures_util::future::join_all;
use parking_lot::Mutex;
use primerl_engine_server::backend::{BackendError, StepOutput};
use primerl_engine_server::mock::MockConfig;
use primerl_engine_server::model_info::ModelInfo;
use primerl_engine_server::{Backend, Batch, Checkpoint, MockBackend};
use primerl_orchestrator::envs::wire::{Lease, WorkerRole};
use serde_json::{Value, json};
use std::process::Child;
use std::sync::Arc;
use std::time::{Duration, Instant};

const STREAMS: usize = 1_000;
const TOKENS: usize = 300;
/// Pace of the engine that serves all; of the first of several.
const PACE: Duration = Duration::from_millis(100);
const FIRST_PACE: Duration = Duration::from_millis(90);
const ENGINES: usize = 8;
/// Tokens of each stream at that pace, and how many of them are not measured: by then all streams run.
const PACED_TOKENS: usize = 80;
const FIRST_TOKENS: usize = 20;
/// The tiny model's tokens begin with the characters from `!` on.
const FIRST_LETTER: u32 = b'a' as u32 - b'!' as u32;
const IDLE: usize = 200;
const CONVERSATION: usize = 32_000;

struct Scene {
    child: Child,
    engines: Vec<Paced>,
    worker: Worker,
    leases: Vec<Lease>,
    _place: Place,
}

/// A mock that always says one letter, a token of the tiny model, and notes the end of each step.
struct Paced {
    engine: Engine,
    letter: u32,
    steps: Arc<Mutex<Vec<Instant>>>,
}

struct Noting {
    mock: MockBackend,
    steps: Arc<Mutex<Vec<Instant>>>,
}

impl Backend for Noting {
    fn info(&self) -> &ModelInfo {
        self.mock.info()
    }

    fn forward(&mut self, batch: &Batch) -> Result<StepOutput, BackendError> {
        let output = self.mock.forward(batch);
        self.steps.lock().push(Instant::now());
        output
    }

    fn load_weights(&mut self, checkpoint: &Checkpoint) -> Result<(), BackendError> {
        self.mock.load_weights(checkpoint)
    }

    fn digest(&mut self) -> Result<String, BackendError> {
        self.mock.digest()
    }
}

impl Paced {
    async fn start(letter: u32, slots: u32, step_latency: Duration) -> Paced {
        let config = MockConfig {
            slots,
            max_model_len: 40_000,
            eos_token_id: None,
            first_token: letter,
            last_token: letter + 1,
            step_latency,
            ..MockConfig::default()
        };
        let steps = Arc::<Mutex<Vec<Instant>>>::default();
        let backend = Noting {
            mock: MockBackend::new(config.clone()),
            steps: Arc::clone(&steps),
        };
        Paced {
            engine: Engine::start_with(config, backend).await,
            letter,
            steps,
        }
    }

    /// An engine that steps this often, large enough for all streams.
    async fn alone(step_latency: Duration) -> Vec<Paced> {
        vec![Paced::start(FIRST_LETTER, 1024, step_latency).await]
    }

    /// The first steps every `first_pace`, the others more and more slowly.
    async fn several(first_pace: Duration) -> Vec<Paced> {
        let slots = (STREAMS / ENGINES) as u32;
        let mut engines = Vec::new();
        for number in 0..ENGINES as u32 {
            let pace = first_pace + first_pace * number / 22;
            engines.push(Paced::start(FIRST_LETTER + number, slots, pace).await);
        }
        engines
    }
}

async fn scene(engines: Vec<Paced>, rollouts: usize) -> Scene {
    let place = Place::new();
    let toml = place
        .toml(
            "max_async_level = 2",
            &format!(
                "[admission]\nlimit = \"fixed\"\nstart_per_engine = {}\n",
                4096 / engines.len()
            ),
        )
        .replace("seq_len = 512", "seq_len = 40000")
        .replace("batch_size = 8", "batch_size = 1024")
        .replace("max_tokens = 12", &format!("max_tokens = {TOKENS}"))
        .replace("rollout_s = 20.0", "rollout_s = 600.0")
        .replace("worker_s = 5.0", "worker_s = 600.0");
    let config = place.path("orchestrator.toml");
    std::fs::write(&config, toml).unwrap();
    let child = common::orchestrate()
        .arg("--config")
        .arg(&config)
        .spawn()
        .unwrap();
    let address = place.output().join("run/orchestrator.json");
    let url = loop {
        if let Ok(text) = std::fs::read(&address) {
            let address: Value = serde_json::from_slice(&text).unwrap();
            break address["url"].as_str().unwrap().to_owned();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    for paced in &engines {
        let join = json!({"url": paced.engine.url});
        let joined = common::client()
            .post(format!("{url}/engines/join"))
            .json(&join);
        assert!(joined.send().await.unwrap().status().is_success());
    }
    trainer::publish(&url, &place.output(), 0).await;
    let worker = Worker::register(&url, "task", WorkerRole::Train, "w").await;
    let mut leases = Vec::new();
    while leases.len() < rollouts {
        let most = (rollouts - leases.len()) as u32;
        leases.extend(worker.lease(most).await.unwrap().rollouts);
    }
    Scene {
        child,
        engines,
        worker,
        leases,
        _place: place,
    }
}

impl Scene {
    async fn end(mut self) {
        drop(self.worker);
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        for paced in self.engines {
            paced.engine.stop().await;
        }
    }
}

fn resident_kilobytes(process: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Reads a stream to its end: its pieces, and when they came.
async fn read(request: reqwest::RequestBuilder) -> Vec<(Instant, Bytes)> {
    let mut answer = request.send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let mut pieces = Vec::new();
    while let Some(piece) = answer.chunk().await.unwrap() {
        pieces.push((Instant::now(), piece));
    }
    let last = pieces.last().map(|(_, piece)| piece.clone());
    assert!(last.unwrap_or_default().ends_with(b"data: [DONE]\n\n"));
    pieces
}

fn chat(http: &reqwest::Client, lease: &Lease, tokens: usize) -> reqwest::RequestBuilder {
    let body = json!({"messages": [common::user("Write.")], "stream": true, "max_tokens": tokens});
    post(http, lease).json(&body)
}

fn post(http: &reqwest::Client, lease: &Lease) -> reqwest::RequestBuilder {
    http.post(format!("{}/chat/completions", lease.base_url))
        .bearer_auth(lease.api_key.reveal())
}

/// The tokens of one event, all of one letter.
fn letters(event: &[u8]) -> Vec<u32> {
    let data = event.strip_prefix(b"data: ").unwrap_or_default();
    let event: Value = serde_json::from_slice(data).unwrap_or_default();
    let choice = &event["choices"][0];
    match (&choice["delta"]["content"], &choice["token_ids"]) {
        (Value::String(text), _) => text.bytes().map(|byte| u32::from(byte - b'!')).collect(),
        (_, Value::Array(ids)) => ids.iter().map(|id| id.as_u64().unwrap() as u32).collect(),
        _ => Vec::new(),
    }
}

/// Milliseconds from the end of the step that sampled it to the client, of each token of a stream.
fn ways(pieces: &[(Instant, Bytes)], engines: &[Paced]) -> Vec<f64> {
    let mut came = Vec::new();
    let mut buffer = Vec::new();
    for (time, piece) in pieces {
        buffer.extend_from_slice(piece);
        while let Some(end) = buffer.windows(2).position(|two| two == b"\n\n") {
            let event: Vec<u8> = buffer.drain(..end + 2).collect();
            came.extend(letters(&event[..end]).iter().map(|letter| (*time, *letter)));
        }
    }
    assert_eq!(came.len(), PACED_TOKENS);
    let (first, letter) = came[0];
    let engine = engines.iter().find(|engine| engine.letter == letter);
    let steps = engine.unwrap().steps.lock();
    // A step takes far longer than a token's way: the last one that had ended sampled the first token.
    let begin = steps.partition_point(|end| *end <= first) - 1;
    let way = |((time, _), end): (&(Instant, u32), &Instant)| (*time - *end).as_secs_f64() * 1e3;
    let ways = came.iter().zip(&steps[begin..]).map(way);
    ways.skip(FIRST_TOKENS).collect()
}

/// Median and 99th percentile.
fn quantiles(streams: &[Vec<(Instant, Bytes)>], engines: &[Paced]) -> [f64; 2] {
    let ways = streams.iter().flat_map(|pieces| ways(pieces, engines));
    let mut ways: Vec<f64> = ways.collect();
    ways.sort_by(f64::total_cmp);
    [ways[ways.len() / 2], ways[ways.len() * 99 / 100]]
}

async fn throughput() {
    let scene = scene(Paced::alone(Duration::ZERO).await, STREAMS).await;
    let http = common::client();
    let (begun, before) = (Instant::now(), cpu_seconds(&scene.child.id().to_string()));
    join_all(
        scene
            .leases
            .iter()
            .map(|lease| read(chat(&http, lease, TOKENS))),
    )
    .await;
    let cpu = cpu_seconds(&scene.child.id().to_string()) - before;
    let (tokens, wall) = ((STREAMS * TOKENS) as f64, begun.elapsed().as_secs_f64());
    println!(
        "{STREAMS} streams of {TOKENS} tokens: {:.0} tokens a second of CPU (goal 150000), {:.0} of wall time",
        tokens / cpu,
        tokens / wall
    );
    scene.end().await;
}

async fn latency(engines: Vec<Paced>, pace: Duration) {
    let scene = scene(engines, STREAMS).await;
    let http = common::client();
    let direct = |index: usize| {
        let body = json!({"token_ids": [97, 98, index % 256], "stream": true,
            "sampling_params": {"max_tokens": PACED_TOKENS, "logprobs": 0}});
        let url = &scene.engines[index % scene.engines.len()].engine.url;
        http.post(format!("{url}/inference/v1/generate"))
            .json(&body)
    };
    let straight = join_all((0..STREAMS).map(|index| read(direct(index)))).await;
    let cpu = cpu_seconds(&scene.child.id().to_string());
    let through = scene.leases.iter();
    let through = join_all(through.map(|lease| read(chat(&http, lease, PACED_TOKENS)))).await;
    let cpu =
        (cpu_seconds(&scene.child.id().to_string()) - cpu) / (STREAMS * PACED_TOKENS) as f64 * 1e6;
    let straight = quantiles(&straight, &scene.engines);
    let through = quantiles(&through, &scene.engines);
    println!(
        "{STREAMS} streams of {} engines, steps of {pace:?} on: a token's way takes {:.1} ms, p99 {:.1} ms, through the gateway, {:.1} and {:.1} ms \
         straight: {:.1} and {:.1} ms more (goal p99: 5); {cpu:.0} us of CPU a token",
        scene.engines.len(),
        through[0],
        through[1],
        straight[0],
        straight[1],
        through[0] - straight[0],
        through[1] - straight[1],
    );
    scene.end().await;
}

async fn memory() {
    let scene = scene(Paced::alone(Duration::ZERO).await, IDLE + 1).await;
    let http = common::client();
    let ask = |lease: &Lease| {
        let words = "word ".repeat(CONVERSATION / 5);
        let body = json!({"messages": [common::user(&words)], "max_tokens": 100});
        let request = post(&http, lease).json(&body);
        async move { assert_eq!(request.send().await.unwrap().status(), 200) }
    };
    ask(&scene.leases[0]).await;
    let before = resident_kilobytes(scene.child.id());
    for lease in &scene.leases[1..] {
        ask(lease).await;
    }
    let each = (resident_kilobytes(scene.child.id()) - before) / IDLE as f64;
    println!("{each:.0} kB for an idle conversation of {CONVERSATION} tokens (goal 300)");
    scene.end().await;
}

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(async {
        throughput().await;
        latency(Paced::several(FIRST_PACE).await, FIRST_PACE).await;
        latency(Paced::several(FIRST_PACE * 2).await, FIRST_PACE * 2).await;
        latency(Paced::alone(PACE).await, PACE).await;
        memory().await;
    });
}
