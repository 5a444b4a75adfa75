//! The env worker's client against a scripted orchestrator: capacity, lost answers, new registrations, silence.

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use parking_lot::Mutex;
use primerl_core::event::Outcome;
use primerl_core::{EnvironmentId, ExampleIndex, GroupId, RolloutId, WorkerId};
use primerl_orchestrator::envs::client::{Call, CallError, End, EnvClient, Notice, Options};
use primerl_orchestrator::envs::wire::*;
use primerl_service::secret::Secret;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A hang must fail, and a loaded machine must not.
const PATIENCE: Duration = Duration::from_secs(20);

const LONG_POLL: Duration = Duration::from_millis(200);

#[derive(Default)]
struct Script {
    /// Rollouts that the server will lease.
    offered: VecDeque<u64>,
    lease_sizes: Vec<u32>,
    /// Calls for leases that are never answered, as on a dead connection.
    lost: u32,
    registrations: u64,
    /// Rollouts that are leased only together; 0 is 1.
    together: u32,
    results: Vec<(WorkerId, RolloutId)>,
    /// Statuses with which the next results are answered; 200 when empty.
    result_statuses: VecDeque<StatusCode>,
    heartbeats: Vec<Vec<RolloutId>>,
    /// What the last heartbeat reported about the owner.
    last_heartbeat: Option<HeartbeatRequest>,
    /// Why heartbeats are answered by a 410: the worker was given up, because its owner did not move.
    blocked: Option<String>,
    /// Retry counts of the chat requests seen.
    chats: Vec<String>,
    left: bool,
}

type Shared = Arc<Mutex<Script>>;

fn answer<T: serde::Serialize>(body: &T) -> Response {
    encode(body).expect("encodes").into_response()
}

fn refusal(status: StatusCode, message: &str) -> Response {
    (
        status,
        serde_json::json!({"error": {"message": message}}).to_string(),
    )
        .into_response()
}

async fn register(State(script): State<Shared>, body: Bytes) -> Response {
    let request: RegisterRequest = decode(&body).expect("a registration");
    if request.environment == "unknown" {
        return refusal(StatusCode::NOT_FOUND, "the run has no such environment");
    }
    let mut script = script.lock();
    script.registrations += 1;
    answer(&RegisterAnswer {
        worker: WorkerId(script.registrations),
        environment: EnvironmentId(0),
        model: "policy".into(),
        heartbeat_s: 0.05,
        leased_together: script.together,
        long_poll_s: LONG_POLL.as_secs_f64(),
        demonstration: None,
    })
}

async fn lease(State(script): State<Shared>, body: Bytes) -> Response {
    let request: LeaseRequest = decode(&body).expect("a lease request");
    let is_lost = {
        let mut script = script.lock();
        let is_lost = script.lost > 0;
        script.lost -= u32::from(is_lost);
        is_lost
    };
    if is_lost {
        std::future::pending::<()>().await;
    }
    let deadline = Instant::now() + LONG_POLL;
    while script.lock().offered.is_empty() && Instant::now() < deadline {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut script = script.lock();
    script.lease_sizes.push(request.max);
    let count = script.offered.len().min(request.max as usize);
    let rollouts = script.offered.drain(..count).map(|rollout| Lease {
        rollout: RolloutId(rollout),
        group: GroupId(0),
        example: ExampleIndex(0),
        base_url: format!("http://unused/rollouts/{rollout}/v1"),
        api_key: Secret::new("key"),
        sampling: serde_json::Map::new(),
        deadline_s: 60.0,
    });
    answer(&LeaseAnswer {
        rollouts: rollouts.collect(),
        finished: false,
        reason: String::new(),
    })
}

async fn heartbeat(State(script): State<Shared>, body: Bytes) -> Response {
    let request: HeartbeatRequest = decode(&body).expect("a heartbeat");
    let mut script = script.lock();
    script.heartbeats.push(request.running.clone());
    script.last_heartbeat = Some(request);
    if let Some(reason) = script.blocked.take() {
        let error = serde_json::json!({"error": {"message": reason, "code": WORKER_BLOCKED}});
        return (StatusCode::GONE, error.to_string()).into_response();
    }
    answer(&HeartbeatAnswer {
        cancel: vec![],
        finished: false,
    })
}

async fn result(State(script): State<Shared>, body: Bytes) -> Response {
    let request: ResultRequest = decode(&body).expect("a result");
    let mut script = script.lock();
    script.results.push((request.worker, request.rollout));
    match script.result_statuses.pop_front() {
        Some(status) if status != StatusCode::OK => refusal(status, "as scripted"),
        _ => answer(&ResultAnswer { accepted: true }),
    }
}

async fn leave(State(script): State<Shared>) -> Response {
    script.lock().left = true;
    answer(&LeaveAnswer::default())
}

async fn chat(State(script): State<Shared>, headers: HeaderMap) -> Response {
    let count = &headers["x-stainless-retry-count"];
    let count = count.to_str().expect("text").to_owned();
    script.lock().chats.push(count);
    "{}".into_response()
}

struct Server {
    script: Shared,
    url: String,
    runtime: tokio::runtime::Runtime,
}

impl Server {
    fn start() -> Self {
        let script = Shared::default();
        let app = Router::new()
            .route(REGISTER, post(register))
            .route(LEASE, post(lease))
            .route(HEARTBEAT, post(heartbeat))
            .route(RESULT, post(result))
            .route(LEAVE, post(leave))
            .route("/chat", post(chat))
            .with_state(script.clone());
        let runtime = tokio::runtime::Runtime::new().expect("a runtime");
        let listener = runtime
            .block_on(tokio::net::TcpListener::bind("127.0.0.1:0"))
            .expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        runtime.spawn(async move { axum::serve(listener, app).await });
        Self {
            script,
            url,
            runtime,
        }
    }

    fn client(&self, max_concurrent: u32, give_up: Duration) -> EnvClient {
        start(&self.url, "env", max_concurrent, give_up)
    }

    fn wait(&self, what: &str, condition: impl Fn(&Script) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !condition(&self.script.lock()) {
            assert!(Instant::now() < deadline, "no {what} within {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// The process that was to end, and why.
static ENDED: Mutex<Vec<String>> = Mutex::new(Vec::new());

fn start(url: &str, environment: &str, max_concurrent: u32, give_up: Duration) -> EnvClient {
    let options = options(url, environment, max_concurrent, give_up);
    EnvClient::start(options).expect("the client starts")
}

fn options(url: &str, environment: &str, max_concurrent: u32, give_up: Duration) -> Options {
    let registration = RegisterRequest {
        environment: environment.into(),
        role: WorkerRole::Train,
        name: "worker".into(),
        pid: std::process::id(),
        examples: 1,
        whole_groups: false,
        max_concurrent: None,
        listing: None,
    };
    Options {
        orchestrator_url: url.into(),
        api_key: Some(Secret::new(crate::common::RUN_KEY)),
        registration,
        max_concurrent,
        give_up,
        end_process: |reason| ENDED.lock().push(reason.to_owned()),
    }
}

/// Notices until `last` picks one.
fn until<T>(client: &EnvClient, what: &str, last: impl Fn(&Notice) -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let notices = client.take_notices();
        if let Some(found) = notices.iter().find_map(&last) {
            return found;
        }
        assert!(Instant::now() < deadline, "no {what} within {PATIENCE:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn leased(notice: &Notice) -> Option<Vec<RolloutId>> {
    match notice {
        Notice::Leased(leases) => Some(leases.iter().map(|lease| lease.rollout).collect()),
        _ => None,
    }
}

#[test]
fn an_unanswered_call_for_leases_is_repeated() {
    let server = Server::start();
    server.script.lock().lost = 1;
    server.script.lock().offered.push_back(1);
    let client = server.client(1, PATIENCE);
    assert_eq!(until(&client, "lease", leased), [RolloutId(1)]);
    let script = server.script.lock();
    assert_eq!((script.lost, script.registrations), (0, 1));
}

#[test]
fn holds_no_more_than_its_capacity_and_fills_what_becomes_free() {
    let server = Server::start();
    server.script.lock().offered.extend(1..=5);
    let client = server.client(2, PATIENCE);
    let first = until(&client, "lease", leased);
    assert_eq!(first, [RolloutId(1), RolloutId(2)]);
    server.wait("heartbeat of both", |script| {
        script
            .heartbeats
            .last()
            .is_some_and(|running| running.len() == 2)
    });
    assert_eq!(server.script.lock().offered.len(), 3);
    client.report(first[0], Outcome::default());
    assert_eq!(until(&client, "third lease", leased), [RolloutId(3)]);
    client.release(first[1]);
    assert_eq!(until(&client, "fourth lease", leased), [RolloutId(4)]);
    assert!(
        server
            .script
            .lock()
            .lease_sizes
            .iter()
            .all(|size| *size <= 2)
    );
    // A rollout that is not held is not reported.
    client.report(first[1], Outcome::default());
    client.leave(PATIENCE);
    let script = server.script.lock();
    assert_eq!(script.results, [(WorkerId(1), RolloutId(1))]);
    assert!(script.left);
}

#[test]
fn asks_for_whole_groups_only_when_they_fit() {
    let server = Server::start();
    server.script.lock().together = 2;
    server.script.lock().offered.extend(1..=4);
    let client = server.client(5, PATIENCE);
    let first = until(&client, "lease", leased);
    assert_eq!(first.len(), 4, "five would be half a group");
    client.report(first[0], Outcome::default());
    server.wait("a result", |script| script.results.len() == 1);
    // Two are free: the place of one, and the fifth.
    server.wait("another request", |script| script.lease_sizes.len() >= 2);
    client.leave(PATIENCE);
    let script = server.script.lock();
    assert_eq!(script.lease_sizes[..2], [4, 2]);
}

#[test]
fn a_report_is_sent_until_it_is_answered_also_under_a_new_number() {
    let server = Server::start();
    let statuses = [
        StatusCode::INTERNAL_SERVER_ERROR,
        StatusCode::SERVICE_UNAVAILABLE,
        StatusCode::GONE,
    ];
    server.script.lock().result_statuses.extend(statuses);
    server.script.lock().offered.extend([7, 8]);
    let client = server.client(2, PATIENCE);
    let held = until(&client, "lease", leased);
    client.report(held[0], Outcome::default());
    let void = |notice: &Notice| matches!(notice, Notice::LeasesVoid).then_some(());
    until(&client, "void leases", void);
    server.wait("fourth attempt", |script| script.results.len() == 4);
    client.leave(PATIENCE);
    let script = server.script.lock();
    let workers: Vec<u64> = script.results.iter().map(|(worker, _)| worker.0).collect();
    assert_eq!(workers, [1, 1, 1, 2]);
    assert!(
        script
            .results
            .iter()
            .all(|(_, rollout)| *rollout == RolloutId(7))
    );
    assert_eq!(script.registrations, 2);
}

#[test]
fn a_refused_result_is_reported_and_not_sent_again() {
    let server = Server::start();
    server
        .script
        .lock()
        .result_statuses
        .push_back(StatusCode::BAD_REQUEST);
    server.script.lock().offered.push_back(7);
    let client = server.client(1, PATIENCE);
    client.report(until(&client, "lease", leased)[0], Outcome::default());
    let problem = until(&client, "problem", |notice| match notice {
        Notice::Problem(message) => Some(message.clone()),
        _ => None,
    });
    assert_eq!(
        problem,
        "result of rollout 7 refused: 400 Bad Request: as scripted"
    );
    client.leave(PATIENCE);
    assert_eq!(server.script.lock().results.len(), 1);
}

#[test]
fn silence_ends_the_client_with_the_reason() {
    let server = Server::start();
    // It has to register within this time.
    let client = server.client(1, Duration::from_secs(3));
    until(&client, "registration", |notice| {
        matches!(notice, Notice::Registered(_)).then_some(())
    });
    let url = server.url.clone();
    server.runtime.shutdown_background();
    let end = until(&client, "end", |notice| match notice {
        Notice::Ended(end) => Some(end.clone()),
        _ => None,
    });
    let End::Unreachable {
        url: named, reason, ..
    } = end
    else {
        panic!("ended otherwise: {end}");
    };
    assert_eq!(named, url);
    assert!(!reason.is_empty());
    let asked = Instant::now();
    client.leave(Duration::from_secs(1));
    assert!(asked.elapsed() < PATIENCE);
}

#[test]
fn a_refused_worker_learns_why() {
    let server = Server::start();
    let client = start(&server.url, "unknown", 1, PATIENCE);
    let end = until(&client, "end", |notice| match notice {
        Notice::Ended(end) => Some(end.to_string()),
        _ => None,
    });
    assert!(end.contains("the run has no such environment"), "{end}");
}

#[test]
fn a_model_call_is_answered_once_and_says_how_often_it_was_tried() {
    let server = Server::start();
    let client = server.client(1, Duration::from_secs(2));
    let call = |url: String| {
        client.call(Call {
            url,
            api_key: Secret::new("key"),
            session: "s".into(),
            body: "{}".into(),
            timeout: PATIENCE,
        })
    };
    let number = call(format!("{}/chat", server.url));
    let status = until(&client, "answer", |notice| match notice {
        Notice::Answered { call, answer } if *call == number => {
            Some(answer.as_ref().expect("answered").status)
        }
        _ => None,
    });
    assert_eq!(status, 200);
    assert_eq!(server.script.lock().chats, ["0"]);

    // A port without a listener: all attempts fail.
    let (unserved, _held) = crate::common::unserved();
    let unserved = format!("{unserved}/chat");
    let number = call(unserved.clone());
    let error = until(&client, "failure", |notice| match notice {
        Notice::Answered {
            call,
            answer: Err(error),
        } if *call == number => Some(error.clone()),
        _ => None,
    });
    assert!(
        matches!(&error, CallError::Unreachable { url, .. } if *url == unserved),
        "{error}"
    );
}

#[test]
fn heartbeats_say_whether_the_owner_moves_and_where_it_is_held_up() {
    let server = Server::start();
    let client = server.client(1, PATIENCE);
    client.held(Some("task.py:3".into()), Some(RolloutId(7)));
    server.wait("heartbeat that says where", |script| {
        script.last_heartbeat.as_ref().is_some_and(|said| {
            said.held_at.as_deref() == Some("task.py:3") && said.held_by == Some(RolloutId(7))
        })
    });
    let still = |script: &Script| script.last_heartbeat.as_ref().and_then(|said| said.still_s);
    server.wait("stillness that lasts", |script| still(script) > Some(0.3));
    let moved = Instant::now();
    client.turned();
    server.wait("heartbeat of an owner that moves", |script| {
        let held = script.last_heartbeat.as_ref().map(|said| &said.held_at);
        still(script) < Some(moved.elapsed().as_secs_f64()) && held == Some(&None)
    });
}

#[test]
fn a_worker_that_was_given_up_ends_where_its_owner_does_not_move_and_else_registers_again() {
    let server = Server::start();
    let client = server.client(1, PATIENCE);
    server.wait("heartbeat", |script| !script.heartbeats.is_empty());
    client.turned();
    server.script.lock().blocked = Some("it moves again".into());
    server.wait("second registration", |script| script.registrations == 2);

    server.wait("stillness that lasts", |script| {
        let said = script.last_heartbeat.as_ref();
        said.and_then(|said| said.still_s) > Some(2.5)
    });
    server.script.lock().blocked = Some("task.py:3 has blocked it".into());
    server.wait("third registration", |script| script.registrations == 3);
    assert_eq!(*ENDED.lock(), ["task.py:3 has blocked it"]);
}

#[test]
fn what_cannot_be_an_orchestrator_is_refused_by_its_field() {
    for url in ["", "localhost:80", "https://host:1", "http://"] {
        let options = options(url, "env", 1, PATIENCE);
        let error = EnvClient::start(options).err().expect("is refused");
        assert!(error.to_string().starts_with("orchestrator_url"), "{error}");
    }
}
