//! A scripted environment worker.

use super::{PATIENCE, chat_with, client, persistently, user};
use primerl_core::event::{Outcome, Trace};
use primerl_core::{RolloutId, WorkerId};
use primerl_orchestrator::envs::wire::{self, *};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// The answer to requests that come too late: a run that was stopped waits for no one.
const RUN_OVER: u16 = 410;

pub fn registration(environment: &str, role: WorkerRole, name: &str) -> RegisterRequest {
    RegisterRequest {
        environment: environment.into(),
        role,
        name: name.into(),
        pid: std::process::id(),
        examples: 16,
        whole_groups: false,
        max_concurrent: None,
        listing: None,
    }
}

#[derive(Clone)]
pub struct Worker {
    pub url: String,
    pub id: WorkerId,
    http: reqwest::Client,
}

impl Worker {
    /// It lists 16 examples.
    pub async fn register(url: &str, environment: &str, role: WorkerRole, name: &str) -> Worker {
        Worker::register_as(url, &registration(environment, role, name)).await
    }

    pub async fn register_as(url: &str, request: &RegisterRequest) -> Worker {
        let http = client();
        let answer: RegisterAnswer = call(&http, url, wire::REGISTER, request).await.unwrap();
        assert_eq!(answer.model, "m");
        Worker {
            url: url.into(),
            id: answer.worker,
            http,
        }
    }

    pub async fn lease(&self, max: u32) -> Result<LeaseAnswer, u16> {
        call(
            &self.http,
            &self.url,
            wire::LEASE,
            &LeaseRequest {
                worker: self.id,
                max,
            },
        )
        .await
    }

    /// Asks once, and only the product answers: a connection that fails is an error.
    pub async fn lease_once(&self) -> reqwest::Result<Result<LeaseAnswer, u16>> {
        let request = LeaseRequest {
            worker: self.id,
            max: 1,
        };
        let call = self.http.post(format!("{}{}", self.url, wire::LEASE));
        let call = call
            .header("content-type", wire::CONTENT_TYPE)
            .body(wire::encode(&request).unwrap());
        let answer = call.send().await?;
        let (status, body) = (answer.status().as_u16(), answer.bytes().await?);
        Ok(match status {
            200 => Ok(wire::decode(&body).unwrap()),
            status => Err(status),
        })
    }

    /// Leases until there is a rollout.
    pub async fn one(&self) -> Lease {
        let deadline = tokio::time::Instant::now() + PATIENCE;
        loop {
            let answer = self.lease(1).await.unwrap();
            if let Some(lease) = answer.rollouts.into_iter().next() {
                return lease;
            }
            assert!(
                tokio::time::Instant::now() < deadline,
                "no lease: {}",
                answer.reason
            );
        }
    }

    pub async fn heartbeat(&self, running: &[RolloutId]) -> Result<HeartbeatAnswer, u16> {
        let request = HeartbeatRequest {
            worker: self.id,
            running: running.to_vec(),
            still_s: None,
            held_at: None,
            held_by: None,
        };
        call(&self.http, &self.url, wire::HEARTBEAT, &request).await
    }

    pub async fn result(&self, rollout: RolloutId, outcome: Outcome) -> bool {
        self.report(rollout, outcome).await.unwrap()
    }

    async fn report(&self, rollout: RolloutId, outcome: Outcome) -> Result<bool, u16> {
        let request = ResultRequest {
            worker: self.id,
            rollout,
            outcome,
        };
        let answer: ResultAnswer = call(&self.http, &self.url, wire::RESULT, &request).await?;
        Ok(answer.accepted)
    }

    /// The orchestrator may be gone by now.
    pub async fn leave(&self) {
        let request = wire::encode(&LeaveRequest {
            worker: self.id,
            reason: None,
        })
        .unwrap();
        let call = self.http.post(format!("{}{}", self.url, wire::LEAVE));
        let call = call
            .header("content-type", wire::CONTENT_TYPE)
            .body(request);
        if let Ok(answer) = call.send().await {
            assert_eq!(answer.status(), 200);
        }
    }

    /// Leases and runs rollouts of `turns` turns until the run is over.
    pub async fn work(self, turns: usize) {
        let mut running = JoinSet::new();
        loop {
            let answer = match self.lease(4).await {
                Ok(answer) if !answer.finished => answer,
                Ok(_) | Err(RUN_OVER) => break,
                Err(status) => panic!("lease: status {status}"),
            };
            for lease in answer.rollouts {
                running.spawn(run_rollout(self.clone(), lease, turns));
            }
            while running.try_join_next().is_some_and(|joined| joined.is_ok()) {}
        }
        while let Some(joined) = running.join_next().await {
            joined.unwrap();
        }
        self.leave().await;
    }
}

/// `turns` user messages; the reward is the number of characters of the last answer.
async fn run_rollout(worker: Worker, lease: Lease, turns: usize) {
    let session = format!("trace-{}", lease.rollout);
    let mut messages = Vec::new();
    let mut reward = 0.0;
    for turn in 0..turns {
        messages.push(user(&format!("example {} turn {turn}", lease.example)));
        let body = json!({"model": "m", "messages": messages, "temperature": lease.sampling["temperature"]});
        let (status, answer) = chat_with(&worker.http, &lease, &session, &body).await;
        if status != 200 {
            assert_eq!(status, RUN_OVER, "{answer}");
            return;
        }
        let message = answer["choices"][0]["message"].clone();
        reward = message["content"]
            .as_str()
            .unwrap_or_default()
            .chars()
            .count() as f64;
        messages.push(message);
    }
    let reported = worker.report(lease.rollout, outcome(&session, reward));
    if let Err(status) = reported.await {
        assert_eq!(status, RUN_OVER);
    }
}

pub fn outcome(session: &str, reward: f64) -> Outcome {
    let trace = Trace {
        session: session.into(),
        trainable: true,
        ok: true,
        reward,
        ..Trace::default()
    };
    Outcome {
        ok: true,
        traces: vec![trace],
        error: None,
        refusal: None,
    }
}

async fn call<T: Serialize, A: DeserializeOwned>(
    http: &reqwest::Client,
    url: &str,
    path: &str,
    body: &T,
) -> Result<A, u16> {
    let request = http
        .post(format!("{url}{path}"))
        .header("content-type", wire::CONTENT_TYPE)
        .body(wire::encode(body).unwrap());
    let answer = persistently(request).await;
    let status = answer.status().as_u16();
    let bytes = answer.bytes().await.unwrap();
    if status != 200 {
        return Err(status);
    }
    Ok(wire::decode::<A>(&bytes)
        .unwrap_or_else(|error| panic!("{path}: {error}: {:?}", Value::from(&bytes[..]))))
}
