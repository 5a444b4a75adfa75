//! Clients that use more than their share, over raw sockets.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use common::worker::Worker;
use common::{Orchestrator, PATIENCE, Place, prepared};
use primerl_orchestrator::envs::wire::WorkerRole;
use primerl_service::http::{BodyLimits, Limits};
use std::io::ErrorKind;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const SHORT: Duration = Duration::from_millis(300);
const NEVER: Duration = Duration::from_secs(3600);

/// The limits; each test shortens the one that it tests.
fn limits() -> Limits {
    Limits {
        connections: 1024,
        headers: NEVER,
        idle: NEVER,
        stalled: NEVER,
        bodies: BodyLimits {
            deadline: NEVER,
            ..BodyLimits::default()
        },
    }
}

async fn start(place: &Place, limits: Limits) -> Orchestrator {
    let prepared = prepared(place.config("", ""));
    Orchestrator::start_prepared(prepared.with_limits(limits)).await
}

async fn stop(orchestrator: Orchestrator) {
    orchestrator.shutdown.cancel();
    orchestrator.end().await.unwrap();
}

async fn connect(orchestrator: &Orchestrator) -> TcpStream {
    let address = orchestrator.url.strip_prefix("http://").unwrap();
    TcpStream::connect(address).await.unwrap()
}

/// All data until the other side closes; a reset is an end too.
async fn rest(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut bytes));
    match read.await.expect("the connection ends") {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The data that arrives as an answer, without waiting for the connection's end.
async fn answer(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let whole = async {
        while !String::from_utf8_lossy(&bytes).contains("\r\n\r\n") {
            if stream.read_buf(&mut bytes).await.unwrap() == 0 {
                break;
            }
        }
    };
    tokio::time::timeout(PATIENCE, whole)
        .await
        .expect("answers");
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Sends `piece` again and again until the other side stops reading; returns how often it was sent.
async fn drip(stream: &mut TcpStream, piece: &[u8]) -> u32 {
    let begun = Instant::now();
    for sent in 0.. {
        assert!(begun.elapsed() < PATIENCE, "it continues for ever");
        if stream.write_all(piece).await.is_err() {
            return sent;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    unreachable!("numbers do not end")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_says_nothing_or_never_comes_to_an_end_is_cut() {
    let place = Place::new();
    // Whole headers have to arrive within this time, on a busy machine too.
    let headers = 4 * SHORT;
    let orchestrator = start(
        &place,
        Limits {
            headers,
            ..limits()
        },
    )
    .await;
    let silent = async {
        let mut silent = connect(&orchestrator).await;
        assert_eq!(rest(&mut silent).await, "");
    };
    let slow = async {
        let mut slow = connect(&orchestrator).await;
        slow.write_all(b"GET /health HTTP/1.1\r\nx: ")
            .await
            .unwrap();
        drip(&mut slow, b"y").await;
    };
    let kept = async {
        // Between two requests it may be idle for longer.
        let mut kept = connect(&orchestrator).await;
        for _ in 0..2 {
            kept.write_all(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
                .await
                .unwrap();
            assert!(answer(&mut kept).await.starts_with("HTTP/1.1 200"));
            tokio::time::sleep(2 * headers).await;
        }
        // And then the next headers are too slow.
        kept.write_all(b"GET /health HTTP/1.1\r\nx: ")
            .await
            .unwrap();
        drip(&mut kept, b"y").await;
    };
    tokio::join!(silent, slow, kept);
    stop(orchestrator).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_not_used_is_closed() {
    let place = Place::new();
    let orchestrator = start(
        &place,
        Limits {
            idle: SHORT,
            ..limits()
        },
    )
    .await;
    let mut kept = connect(&orchestrator).await;
    kept.write_all(b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n")
        .await
        .unwrap();
    assert!(rest(&mut kept).await.starts_with("HTTP/1.1 200"));
    stop(orchestrator).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_and_many_headers_are_refused() {
    let place = Place::new();
    let orchestrator = start(&place, limits()).await;
    let large = format!("x: {}\r\n", "y".repeat(300 << 10));
    let many: String = (0..200).map(|number| format!("x{number}: y\r\n")).collect();
    for headers in [large, many] {
        let mut stream = connect(&orchestrator).await;
        let request = format!("GET /health HTTP/1.1\r\n{headers}\r\n");
        // The refusal may come before all is sent.
        let _ = stream.write_all(request.as_bytes()).await;
        let answer = rest(&mut stream).await;
        assert!(answer.starts_with("HTTP/1.1 431"), "{answer}");
    }
    stop(orchestrator).await;
}

/// The head of a request to an open rollout.
async fn head(orchestrator: &Orchestrator, headers: &str) -> String {
    let worker = Worker::register(&orchestrator.url, "task", WorkerRole::Train, "w").await;
    let lease = worker.one().await;
    format!(
        "POST /rollouts/{}/v1/chat/completions HTTP/1.1\r\nauthorization: Bearer {}\r\n{headers}\r\n",
        lease.rollout,
        lease.api_key.reveal()
    )
}

fn bodies(bodies: BodyLimits) -> Limits {
    Limits { bodies, ..limits() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_that_does_not_come_is_not_waited_for() {
    let place = Place::new();
    let limits = bodies(BodyLimits {
        deadline: SHORT,
        ..limits().bodies
    });
    let orchestrator = start(&place, limits).await;
    common::trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let (_engine, head) = serve(&orchestrator, "content-length: 100\r\n").await;
    let mut stream = connect(&orchestrator).await;
    stream.write_all(head.as_bytes()).await.unwrap();
    let (mut reading, mut writing) = stream.into_split();
    let dripping = tokio::spawn(async move {
        while writing.write_all(b"{").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let mut answer = Vec::new();
    let _ = reading.read_to_end(&mut answer).await;
    let answer = String::from_utf8_lossy(&answer);
    assert!(answer.starts_with("HTTP/1.1 408"), "{answer}");
    assert!(answer.contains("request_timeout"), "{answer}");
    dripping.await.unwrap();
    stop(orchestrator).await;
}

async fn serve(orchestrator: &Orchestrator, headers: &str) -> (common::engine::Engine, String) {
    let engine = common::engine::Engine::start(Default::default()).await;
    let join = serde_json::json!({"url": engine.url});
    orchestrator.post("/engines/join", &join).await;
    (engine, head(orchestrator, headers).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_without_end_is_refused() {
    let place = Place::new();
    let limits = bodies(BodyLimits {
        rollout_bytes: 1 << 20,
        ..limits().bodies
    });
    let orchestrator = start(&place, limits).await;
    common::trainer::publish(&orchestrator.url, &place.output(), 0).await;
    // Announced: refused before any of it is there.
    let (_engine, head) = serve(&orchestrator, "content-length: 1048577\r\n").await;
    let mut stream = connect(&orchestrator).await;
    stream.write_all(head.as_bytes()).await.unwrap();
    let refusal = rest(&mut stream).await;
    assert!(
        refusal.starts_with("HTTP/1.1 413") && refusal.contains("request_too_large"),
        "{refusal}"
    );
    // Not announced: data after the refusal is dropped, and the client gets the refusal.
    let head = head.replace("content-length: 1048577", "transfer-encoding: chunked");
    let mut stream = connect(&orchestrator).await;
    stream.write_all(head.as_bytes()).await.unwrap();
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(0x10000));
    for _ in 0..40 {
        stream.write_all(chunk.as_bytes()).await.unwrap();
    }
    stream.write_all(b"0\r\n\r\n").await.unwrap();
    assert!(answer(&mut stream).await.starts_with("HTTP/1.1 413"));
    stop(orchestrator).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_have_a_limit_together() {
    let place = Place::new();
    let limits = bodies(BodyLimits {
        rollout_bytes: 1 << 20,
        total_bytes: 3 << 19,
        deadline: 10 * SHORT,
        ..limits().bodies
    });
    let orchestrator = start(&place, limits).await;
    common::trainer::publish(&orchestrator.url, &place.output(), 0).await;
    let (_engine, head) = serve(&orchestrator, "content-length: 1048576\r\n").await;
    let (mut first, mut second) = (connect(&orchestrator).await, connect(&orchestrator).await);
    first.write_all(head.as_bytes()).await.unwrap();
    tokio::time::sleep(7 * SHORT).await;
    second.write_all(head.as_bytes()).await.unwrap();
    // The first never sends its body, and releases its room at its own deadline; by then the second has used a third of
    // its time, and gets the room: the rest is enough for its body on a busy machine too.
    assert!(rest(&mut first).await.starts_with("HTTP/1.1 408"));
    second.write_all(&vec![b'['; 1 << 20]).await.unwrap();
    assert!(answer(&mut second).await.starts_with("HTTP/1.1 400"));
    stop(orchestrator).await;
}

fn resident_bytes() -> usize {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = status.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

/// Each requests more than the buffers hold, and reads none of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_that_do_not_read_hold_no_memory_and_are_cut() {
    let place = Place::new();
    let orchestrator = start(
        &place,
        Limits {
            stalled: 2 * SHORT,
            ..limits()
        },
    )
    .await;
    let before = resident_bytes();
    let mut readers = Vec::new();
    for _ in 0..16 {
        let mut stream = connect(&orchestrator).await;
        readers.push(tokio::spawn(async move {
            let requests = "GET /metrics HTTP/1.1\r\nhost: h\r\n\r\n".repeat(64);
            let mut sent = 0;
            while stream.write_all(requests.as_bytes()).await.is_ok() {
                sent += 64;
            }
            sent
        }));
    }
    for reader in readers {
        let sent = tokio::time::timeout(PATIENCE, reader)
            .await
            .expect("is cut")
            .unwrap();
        assert!(sent > 0);
    }
    let grown = resident_bytes().saturating_sub(before);
    assert!(grown < 32 << 20, "{grown} bytes for 16 readers");
    stop(orchestrator).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_connection_too_many_waits_for_another_to_end() {
    let place = Place::new();
    let orchestrator = start(
        &place,
        Limits {
            connections: 2,
            ..limits()
        },
    )
    .await;
    let health = b"GET /health HTTP/1.1\r\nhost: h\r\n\r\n";
    let (mut first, mut second) = (connect(&orchestrator).await, connect(&orchestrator).await);
    for stream in [&mut first, &mut second] {
        stream.write_all(health).await.unwrap();
        assert!(answer(stream).await.starts_with("HTTP/1.1 200"));
    }
    let mut third = connect(&orchestrator).await;
    third.write_all(health).await.unwrap();
    let waited = tokio::time::timeout(SHORT, third.readable()).await;
    assert!(waited.is_err(), "it is not served yet");
    drop(first);
    assert!(answer(&mut third).await.starts_with("HTTP/1.1 200"));
    drop(second);
    stop(orchestrator).await;
}
