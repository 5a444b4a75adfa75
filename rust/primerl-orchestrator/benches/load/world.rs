//! Everything around the orchestrator: engines that join, workers with many rollouts each, a trainer.

use super::IN_FLIGHT;
use super::common::{client, trainer};
use super::http::Client;
use primerl_core::event::{Outcome, Trace};
use primerl_core::{RolloutId, WorkerId};
use primerl_orchestrator::envs::wire::{self, *};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;
use tokio::sync::Notify;

const WORKERS: u32 = 8;
/// A worker asks for all it has room for, this often.
const BETWEEN_LEASES: Duration = Duration::from_millis(20);
const EXAMPLES: u32 = 100_000;

pub struct Load {
    pub url: String,
    pub engines: Vec<String>,
    pub output: PathBuf,
    /// On average.
    pub seconds_before_chat: f64,
}

/// The observations so far.
#[derive(Default)]
pub struct World {
    /// Rollouts whose result was accepted.
    pub finished: Cell<u64>,
    /// Rollouts that ended otherwise, and the last reason.
    pub failed: Cell<u64>,
    pub failure: RefCell<String>,
    pub in_flight: Cell<u32>,
    pub steps: Cell<u64>,
    pub batch_bytes: Cell<u64>,
}

struct Worker {
    id: WorkerId,
    http: Client,
    world: Rc<World>,
    running: RefCell<BTreeSet<RolloutId>>,
    /// A rollout has ended: there is room.
    room: Notify,
    rng: RefCell<ChaCha8Rng>,
    seconds_before_chat: f64,
}

pub async fn start(load: Load) -> Rc<World> {
    let world = Rc::new(World::default());
    for url in &load.engines {
        let join = client().post(format!("{}/engines/join", load.url));
        let joined = join.json(&serde_json::json!({"url": url})).send().await;
        assert!(joined.unwrap().status().is_success());
    }
    let trained = Rc::clone(&world);
    tokio::task::spawn_local(train(load.url.clone(), load.output.clone(), trained));
    for number in 0..WORKERS {
        let worker = Rc::new(register(number, &load, &world).await);
        tokio::task::spawn_local(beat(Rc::clone(&worker)));
        tokio::task::spawn_local(work(worker));
    }
    world
}

async fn train(url: String, output: PathBuf, world: Rc<World>) {
    trainer::publish(&url, &output, 0).await;
    for step in 1.. {
        let Some(body) = trainer::batch_bytes(&url, step, 0).await else {
            return;
        };
        world.steps.set(step);
        world
            .batch_bytes
            .set(world.batch_bytes.get() + body.len() as u64);
        trainer::publish(&url, &output, step).await;
    }
}

async fn register(number: u32, load: &Load, world: &Rc<World>) -> Worker {
    let http = Client::new(&load.url);
    let request = RegisterRequest {
        environment: "task".into(),
        role: WorkerRole::Train,
        name: format!("worker-{number}"),
        pid: std::process::id(),
        examples: EXAMPLES,
        whole_groups: false,
        max_concurrent: None,
        listing: None,
    };
    let answer: RegisterAnswer = call(&http, wire::REGISTER, &request).await.unwrap();
    Worker {
        id: answer.worker,
        http,
        world: Rc::clone(world),
        running: RefCell::default(),
        room: Notify::new(),
        rng: RefCell::new(ChaCha8Rng::seed_from_u64(u64::from(number))),
        seconds_before_chat: load.seconds_before_chat,
    }
}

async fn beat(worker: Rc<Worker>) {
    loop {
        tokio::time::sleep(Duration::from_secs(4)).await;
        let request = HeartbeatRequest {
            worker: worker.id,
            running: worker.running.borrow().iter().copied().collect(),
            still_s: Some(0.0),
            held_at: None,
            held_by: None,
        };
        let answer: Result<HeartbeatAnswer, String> =
            call(&worker.http, wire::HEARTBEAT, &request).await;
        if let Err(problem) = answer {
            *worker.world.failure.borrow_mut() = format!("heartbeat: {problem}");
        }
    }
}

async fn work(worker: Rc<Worker>) {
    loop {
        let room = IN_FLIGHT / WORKERS - worker.running.borrow().len() as u32;
        if room == 0 {
            worker.room.notified().await;
            tokio::time::sleep(BETWEEN_LEASES).await;
            continue;
        }
        let request = LeaseRequest {
            worker: worker.id,
            max: room,
        };
        let answer: LeaseAnswer = match call(&worker.http, wire::LEASE, &request).await {
            Ok(answer) => answer,
            Err(problem) => {
                *worker.world.failure.borrow_mut() = format!("lease: {problem}");
                return;
            }
        };
        for lease in answer.rollouts {
            worker.running.borrow_mut().insert(lease.rollout);
            tokio::task::spawn_local(rollout(Rc::clone(&worker), lease));
        }
        tokio::time::sleep(BETWEEN_LEASES).await;
    }
}

async fn rollout(worker: Rc<Worker>, lease: Lease) {
    let world = &worker.world;
    world.in_flight.set(world.in_flight.get() + 1);
    match run_rollout(&worker, &lease).await {
        Ok(()) => world.finished.set(world.finished.get() + 1),
        Err(problem) => {
            world.failed.set(world.failed.get() + 1);
            *world.failure.borrow_mut() = problem;
        }
    }
    world.in_flight.set(world.in_flight.get() - 1);
    worker.running.borrow_mut().remove(&lease.rollout);
    worker.room.notify_one();
}

async fn run_rollout(worker: &Worker, lease: &Lease) -> Result<(), String> {
    let share: f64 = worker.rng.borrow_mut().random_range(0.0..2.0);
    tokio::time::sleep(Duration::from_secs_f64(share * worker.seconds_before_chat)).await;
    let path = format!("/rollouts/{}/v1/chat/completions", lease.rollout);
    let session = format!("trace-{}", lease.rollout);
    let headers = format!(
        "content-type: application/json\r\nx-session-id: {session}\r\nauthorization: Bearer {}\r\n",
        lease.api_key.reveal()
    );
    let body = format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"example {}"}}]}}"#,
        lease.example
    );
    let chat = worker.http.post(&path, &headers, body.as_bytes()).await;
    let (status, answer) = chat.map_err(|error| error.to_string())?;
    if status != 200 {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&answer)));
    }
    let trace = Trace {
        session,
        trainable: true,
        ok: true,
        reward: f64::from(answer.iter().fold(0u8, |sum, byte| sum ^ byte)),
        ..Trace::default()
    };
    let request = ResultRequest {
        worker: worker.id,
        rollout: lease.rollout,
        outcome: Outcome {
            ok: true,
            traces: vec![trace],
            error: None,
            refusal: None,
        },
    };
    let answer: ResultAnswer = call(&worker.http, wire::RESULT, &request).await?;
    match answer.accepted {
        true => Ok(()),
        false => Err("its result was not accepted".to_owned()),
    }
}

async fn call<T: Serialize, A: DeserializeOwned>(
    http: &Client,
    path: &str,
    body: &T,
) -> Result<A, String> {
    let body = wire::encode(body).map_err(|error| error.to_string())?;
    let headers = "content-type: application/msgpack\r\n";
    let answer = http.post(path, headers, &body).await;
    let (status, bytes) = answer.map_err(|error| error.to_string())?;
    if status != 200 {
        return Err(format!("{status}: {}", String::from_utf8_lossy(&bytes)));
    }
    wire::decode(&bytes).map_err(|error| error.to_string())
}
