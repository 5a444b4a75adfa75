//! Server-sent events through the whole gateway: 1,000 clients read streams of one mock engine at the same time.
//!
//! `cargo bench -p primerl-orchestrator --bench streams`
//!
//! The orchestrator is a process of its own; engine and clients run here, on the same two cores. Printed are
//! * tokens for each second of the orchestrator's CPU, with an engine that gives them as fast as it can;
//! * how much later than the engine's own stream the 99th percentile of events comes, with an engine that gives each
//!   stream a token every 100 ms: gaps between two events, through the gateway and straight from the engine;
//! * memory for each idle conversation of 32,000 tokens.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

#[path = "../tests/common/mod.rs"]
mod common;

use common::engine::Engine;
use common::worker::Worker;
use common::{Place, trainer};
use futures_util::future::join_all;
use primerl_engine::mock::MockConfig;
use primerl_orchestrator::envs::wire::{Lease, WorkerRole};
use serde_json::{Value, json};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const STREAMS: usize = 1_000;
const TOKENS: usize = 300;
const PACE: Duration = Duration::from_millis(100);
/// Of each stream at that pace.
const PACED_TOKENS: usize = 60;
const IDLE: usize = 200;
const CONVERSATION: usize = 32_000;

struct Scene {
    child: Child,
    engine: Engine,
    worker: Worker,
    leases: Vec<Lease>,
    _place: Place,
}

async fn scene(step_latency: Duration, rollouts: usize) -> Scene {
    let place = Place::new();
    let toml = place
        .toml(
            "max_async_level = 2",
            "[admission]\nlimit = \"fixed\"\nstart_per_engine = 4096\n",
        )
        .replace("seq_len = 512", "seq_len = 40000")
        .replace("batch_size = 8", "batch_size = 1024")
        .replace("max_tokens = 12", &format!("max_tokens = {TOKENS}"))
        .replace("rollout_s = 20.0", "rollout_s = 600.0")
        .replace("worker_s = 5.0", "worker_s = 600.0");
    let config = place.path("orchestrator.toml");
    std::fs::write(&config, toml).unwrap();
    let child = Command::new(env!("CARGO_BIN_EXE_primerl-orchestrate"))
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
    let engine = Engine::start_whole(MockConfig {
        slots: 1024,
        max_model_len: 40_000,
        eos_token_id: None,
        first_token: 97,
        last_token: 123,
        step_latency,
        ..MockConfig::default()
    })
    .await;
    let join = json!({"url": engine.url});
    let joined = common::client()
        .post(format!("{url}/engines/join"))
        .json(&join);
    assert!(joined.send().await.unwrap().status().is_success());
    trainer::publish(&url, &place.output(), 0).await;
    let worker = Worker::register(&url, "task", WorkerRole::Train, "w").await;
    let mut leases = Vec::new();
    while leases.len() < rollouts {
        let most = (rollouts - leases.len()) as u32;
        leases.extend(worker.lease(most).await.unwrap().rollouts);
    }
    Scene {
        child,
        engine,
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
        self.engine.stop().await;
    }
}

fn cpu_seconds(process: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap();
    let fields: Vec<f64> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .map(|field| field.parse().unwrap_or(0.0))
        .collect();
    (fields[11] + fields[12]) / 100.0
}

fn resident_kilobytes(process: u32) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS"))
        .unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}

/// Reads a stream to its end; the times at which its pieces came.
async fn read(request: reqwest::RequestBuilder) -> Vec<Instant> {
    let mut answer = request.send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let (mut times, mut tail) = (Vec::new(), Vec::new());
    while let Some(piece) = answer.chunk().await.unwrap() {
        times.push(Instant::now());
        tail = piece.to_vec();
    }
    assert!(tail.ends_with(b"data: [DONE]\n\n"));
    times
}

fn chat(http: &reqwest::Client, lease: &Lease, tokens: usize) -> reqwest::RequestBuilder {
    let body = json!({"messages": [common::user("Write.")], "stream": true, "max_tokens": tokens});
    post(http, lease).json(&body)
}

fn post(http: &reqwest::Client, lease: &Lease) -> reqwest::RequestBuilder {
    http.post(format!("{}/chat/completions", lease.base_url))
        .bearer_auth(lease.api_key.reveal())
}

/// 99th percentile of the time between two pieces, milliseconds.
fn gap(times: &[Vec<Instant>]) -> f64 {
    let gaps = times
        .iter()
        .flat_map(|times| times.windows(2).map(|two| two[1] - two[0]));
    let mut gaps: Vec<f64> = gaps.map(|gap| gap.as_secs_f64() * 1e3).collect();
    gaps.sort_by(f64::total_cmp);
    gaps[gaps.len() * 99 / 100]
}

async fn throughput() {
    let scene = scene(Duration::ZERO, STREAMS).await;
    let http = common::client();
    let (begun, before) = (Instant::now(), cpu_seconds(scene.child.id()));
    join_all(
        scene
            .leases
            .iter()
            .map(|lease| read(chat(&http, lease, TOKENS))),
    )
    .await;
    let cpu = cpu_seconds(scene.child.id()) - before;
    let (tokens, wall) = ((STREAMS * TOKENS) as f64, begun.elapsed().as_secs_f64());
    println!(
        "{STREAMS} streams of {TOKENS} tokens: {:.0} tokens a second of CPU (goal 150000), {:.0} of wall time",
        tokens / cpu,
        tokens / wall
    );
    scene.end().await;
}

async fn latency() {
    let scene = scene(PACE, STREAMS).await;
    let http = common::client();
    let direct = |index: usize| {
        let body = json!({"token_ids": [97, 98, index % 256], "stream": true,
            "sampling_params": {"max_tokens": PACED_TOKENS, "logprobs": 0}});
        http.post(format!("{}/inference/v1/generate", scene.engine.url))
            .json(&body)
    };
    let straight = join_all((0..STREAMS).map(|index| read(direct(index)))).await;
    let through = join_all(
        scene
            .leases
            .iter()
            .map(|lease| read(chat(&http, lease, PACED_TOKENS))),
    )
    .await;
    let (straight, through) = (gap(&straight), gap(&through));
    println!(
        "{STREAMS} streams, a token every {} ms: p99 gap {through:.1} ms through the gateway, {straight:.1} ms straight from the engine (goal: less than 5 ms more)",
        PACE.as_millis()
    );
    scene.end().await;
}

async fn memory() {
    let scene = scene(Duration::ZERO, IDLE + 1).await;
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
        latency().await;
        memory().await;
    });
}
