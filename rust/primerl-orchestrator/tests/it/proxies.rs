//! Variables that name a proxy are for other traffic: no request of a run goes through a proxy.

use crate::common::engine::Engine;
use crate::common::worker::registration;
use crate::common::{Orchestrator, PATIENCE, Place, RUN_KEY, trainer, user};
use primerl_engine_server::mock::MockConfig;
use primerl_engines::clients;
use primerl_engines::clients::ClientConfig;
use primerl_orchestrator::envs::client::{Call, EnvClient, Notice, Options};
use primerl_orchestrator::envs::wire::WorkerRole;
use primerl_service::secret::Secret;
use serde_json::json;
use std::net::{SocketAddr, TcpListener};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// Set in the process that has a proxy in its environment.
const INSIDE: &str = "PRIMERL_TEST_BEHIND_A_PROXY";
const PROXIES: [&str; 6] = [
    "HTTP_PROXY",
    "http_proxy",
    "HTTPS_PROXY",
    "https_proxy",
    "ALL_PROXY",
    "all_proxy",
];

/// Counts connections, and answers none.
fn trap() -> (SocketAddr, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, visitors) = (
        listener.local_addr().unwrap(),
        Arc::new(AtomicUsize::new(0)),
    );
    let count = Arc::clone(&visitors);
    std::thread::spawn(move || {
        for visitor in listener.incoming() {
            count.fetch_add(1, Ordering::SeqCst);
            drop(visitor);
        }
    });
    (address, visitors)
}

/// A process's clients read its environment, which only a child can change: this program runs again, for the test below
/// alone.
#[test]
fn no_client_asks_through_a_proxy() {
    let (address, visitors) = trap();
    let mut inside = Command::new(std::env::current_exe().unwrap());
    inside.args(["--exact", "proxies::a_run_behind_a_proxy", "--ignored"]);
    for name in PROXIES {
        inside.env(name, format!("http://{address}"));
    }
    for name in ["NO_PROXY", "no_proxy", "REQUEST_METHOD"] {
        inside.env_remove(name);
    }
    let output = inside.env(INSIDE, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
    let came = visitors.load(Ordering::SeqCst);
    assert_eq!(came, 1, "the client that was to come, and no other");
}

/// Every kind of client, and one that does use the proxy: the variables are set, and have an effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a part of no_client_asks_through_a_proxy, in a process of its own"]
async fn a_run_behind_a_proxy() {
    if std::env::var_os(INSIDE).is_none() {
        return;
    }
    let place = Place::new();
    let engine = Engine::start(MockConfig::default()).await;
    #[expect(clippy::disallowed_methods, reason = "it shall heed the variables")]
    let heeds = reqwest::Client::builder()
        .tls_backend_preconfigured(no_tls())
        .build()
        .unwrap();
    let lost = heeds.get(format!("{}/health", engine.url)).send().await;
    assert!(lost.is_err(), "the proxy answers no request");

    let orchestrator = Orchestrator::start(place.config("", "")).await;
    orchestrator.join(&engine.url).await;
    trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let (url, models) = (orchestrator.url.clone(), format!("{}/v1", engine.url));
    tokio::task::spawn_blocking(move || {
        rollout(&url);
        let server: ClientConfig =
            serde_json::from_value(json!({"base_url": models, "model": "m", "timeout_s": 60.0}))
                .unwrap();
        assert_eq!(clients::look(&server, PATIENCE).unwrap().status, 200);
    })
    .await
    .unwrap();
    let sampled = orchestrator.status().await["tokens"]["sampled"].clone();
    assert!(sampled.as_u64().unwrap() > 0);
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
    engine.stop().await;
}

fn no_tls() -> rustls::ClientConfig {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth()
}

/// An env worker's client registers, leases, and asks the model.
fn rollout(url: &str) {
    let worker = EnvClient::start(Options {
        orchestrator_url: url.into(),
        api_key: Some(Secret::new(RUN_KEY)),
        registration: registration("task", WorkerRole::Train, "w"),
        max_concurrent: 1,
        give_up: PATIENCE,
        end_process: |reason| panic!("{reason}"),
    })
    .unwrap();
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        for notice in worker.take_notices() {
            match notice {
                Notice::Leased(leases) => {
                    worker.call(Call {
                        url: format!("{}/chat/completions", leases[0].base_url),
                        api_key: leases[0].api_key.clone(),
                        session: "s".into(),
                        body: json!({"messages": [user("hi")]}).to_string().into(),
                        timeout: PATIENCE,
                    });
                }
                Notice::Answered { answer, .. } => {
                    assert_eq!(answer.unwrap().status, 200);
                    worker.leave(PATIENCE);
                    return;
                }
                Notice::Ended(end) => panic!("{end}"),
                _ => {}
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    panic!("no answer");
}
