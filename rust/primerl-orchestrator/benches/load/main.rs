//! The whole orchestrator under load: 10,240 rollouts in flight, over loopback, with the trainer taking every batch.
//!
//! `cargo bench -p primerl-orchestrator --bench load [-- --full] [-- --seconds S]`
//!
//! The orchestrator runs as its own process. This process has the rest, as cheap as it gets, for both share the machine:
//! 4 mock engines (half of a rollout's time is theirs: 32 tokens, a step at a time), 8 scripted workers of 1,280 rollouts
//! each (before its one chat request a rollout waits for the other half, on average), and a trainer that takes batches
//! of 1,024 and publishes tiny weights. A rollout takes `S` seconds, 4.5 by default, so the offered load is
//! 10,240 / S rollouts a second.
//!
//! After 20,000 rollouts of warm-up, 60,000 are measured (250,000 and 200,000 with `--full`): rollouts a second, CPU of
//! the orchestrator, the delay of its decisions (from an event's arrival in the inbox to the last of its effects issued),
//! and whether its memory grows. Each of the 12,000 connections has a buffer that its requests fill one after the other
//! before it is used again, so memory is flat from about 20 requests a connection on.

#![allow(clippy::unwrap_used, reason = "a bench may panic")]

#[path = "../../tests/common/mod.rs"]
mod common;
mod http;
mod measure;
mod world;

use common::Place;
use measure::Orchestrator;
use primerl_engine_server::{Config, MockBackend, MockConfig};
use std::time::Duration;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

// As in the orchestrator's binary.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const IN_FLIGHT: u32 = 10_240;
const BATCH: u32 = 1_024;
const ENGINES: u32 = 4;
const TOKENS: u32 = 32;

fn toml(place: &Place) -> String {
    let steps_in_flight = IN_FLIGHT / BATCH;
    let replaced = place
        .toml(
            &format!(
                "max_steps = 1000000\nmax_async_level = {}\nmax_off_policy_steps = {}\noversampling_factor = {:.1}",
                4 * steps_in_flight,
                4 * steps_in_flight,
                f64::from(IN_FLIGHT) / f64::from(BATCH)
            ),
            &format!("[admission]\nlimit = \"fixed\"\nstart_per_engine = {IN_FLIGHT}\nmax_per_engine = {IN_FLIGHT}\n"),
        )
        .replace("batch_size = 8", &format!("batch_size = {BATCH}"))
        .replace("group_size = 4", "group_size = 8")
        .replace("max_tokens = 12", &format!("max_tokens = {TOKENS}"));
    replaced
        .replace("worker_s = 5.0", "worker_s = 20.0")
        .replace("rollout_s = 20.0", "rollout_s = 120.0")
        .replace("long_poll_s = 2.0", "long_poll_s = 10.0")
}

/// Engines that answer after `seconds`, on a separate thread; returns the addresses, and the handle that keeps them
/// running.
fn engines(seconds: f64) -> (Runtime, Vec<String>) {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .thread_name("engines")
        .enable_all()
        .build()
        .unwrap();
    let config = Config {
        served_model_name: "m".into(),
        max_num_seqs: IN_FLIGHT,
        kv_cache_tokens: u64::from(IN_FLIGHT) * 256,
        max_num_batched_tokens: 4 * IN_FLIGHT,
        ..Config::default()
    };
    let mock = MockConfig {
        slots: IN_FLIGHT,
        eos_token_id: None,
        step_latency: Duration::from_secs_f64(seconds / f64::from(TOKENS)),
        ..MockConfig::default()
    };
    let urls = (0..ENGINES)
        .map(|_| {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let url = format!("http://{}", listener.local_addr().unwrap());
            let (config, backend) = (config.clone(), MockBackend::new(mock.clone()));
            runtime.spawn(async move {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                primerl_engine_server::run(config, backend, listener, CancellationToken::new())
                    .await
                    .unwrap();
            });
            url
        })
        .collect();
    (runtime, urls)
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    // `cargo test --benches` only has to check that it builds.
    if !has("--bench") {
        return;
    }
    let mut named = arguments
        .iter()
        .skip_while(|argument| *argument != "--seconds");
    let seconds: f64 = named.nth(1).map_or(4.5, |value| value.parse().unwrap());
    let (warm_up, rollouts) = match has("--full") {
        true => (250_000, 200_000),
        false => (20_000, 60_000),
    };
    let place = Place::new();
    let config = place.path("orchestrator.toml");
    std::fs::write(&config, toml(&place)).unwrap();
    let mut orchestrator = Orchestrator::start(&config, &place.output());
    let (serving, urls) = engines(seconds / 2.0);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let load = world::Load {
        url: orchestrator.url.clone(),
        engines: urls,
        output: place.output(),
        seconds_before_chat: seconds / 2.0,
    };
    tokio::task::LocalSet::new().block_on(&runtime, async {
        let world = world::start(load).await;
        orchestrator.measure(&world, warm_up, rollouts).await;
    });
    drop(runtime);
    orchestrator.stop();
    serving.shutdown_background();
}
