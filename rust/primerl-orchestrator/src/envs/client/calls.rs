//! Model calls of the environments: one connection pool for all rollouts, whatever their base URLs.

use super::{Notice, Shared};
use bytes::Bytes;
use parking_lot::Mutex;
use primerl_service::secret::Secret;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::AbortHandle;

/// Wait before the second attempt of a call whose connection failed; it doubles with each.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Call {
    pub url: String,
    /// API key of the rollout.
    pub api_key: Secret,
    /// `X-Session-ID`: the conversation of the rollout that this call belongs to.
    pub session: String,
    /// JSON.
    pub body: Bytes,
    pub timeout: Duration,
}

#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub body: Bytes,
}

#[derive(Clone, Debug, thiserror::Error)]
pub enum CallError {
    #[error("no answer from {url} within {seconds} s")]
    Timeout { url: String, seconds: f64 },
    #[error("cannot reach {url}: {reason}")]
    Unreachable { url: String, reason: String },
}

/// Calls in flight, by number. Written by the owner's thread (start, abort) and by the calls as they end.
#[derive(Default)]
pub(super) struct Calls {
    in_flight: Mutex<InFlight>,
}

#[derive(Default)]
struct InFlight {
    last: u64,
    handles: HashMap<u64, AbortHandle>,
}

impl Calls {
    /// Starts a call; its end arrives as [`Notice::Answered`] with the number returned here.
    pub(super) fn start(
        &self,
        shared: &Arc<Shared>,
        runtime: &tokio::runtime::Handle,
        call: Call,
    ) -> u64 {
        let mut in_flight = self.in_flight.lock();
        in_flight.last += 1;
        let number = in_flight.last;
        let shared = shared.clone();
        // The task removes itself under the same lock, so it cannot end before it is listed.
        let task = runtime.spawn(async move {
            let answer = send(&shared.http, &call, shared.options.give_up).await;
            if shared.calls.take(number).is_some() {
                shared.mailbox.put(Notice::Answered {
                    call: number,
                    answer,
                });
            }
        });
        in_flight.handles.insert(number, task.abort_handle());
        number
    }

    /// Hangs up: the gateway aborts the engine's request when its client disconnects.
    pub(super) fn abort(&self, call: u64) {
        if let Some(handle) = self.take(call) {
            handle.abort();
        }
    }

    /// `None` if it has ended, or was aborted.
    fn take(&self, call: u64) -> Option<AbortHandle> {
        self.in_flight.lock().handles.remove(&call)
    }
}

/// A failed connection is tried again for as long as a restart of the orchestrator may take, marked as a retry so that
/// the gateway answers from its record if it has one. An answer of any status is final: the gateway does the failover
/// to another engine.
async fn send(http: &reqwest::Client, call: &Call, give_up: Duration) -> Result<Answer, CallError> {
    let deadline = tokio::time::Instant::now() + call.timeout;
    let mut pause = FIRST_PAUSE;
    let mut unreachable_since = None;
    let mut attempt = 0;
    loop {
        match tokio::time::timeout_at(deadline, attempt_once(http, call, attempt)).await {
            Err(_) => {
                return Err(CallError::Timeout {
                    url: call.url.clone(),
                    seconds: call.timeout.as_secs_f64(),
                });
            }
            Ok(Ok(answer)) => return Ok(answer),
            Ok(Err(error)) => {
                let now = tokio::time::Instant::now();
                let since = *unreachable_since.get_or_insert(now);
                if now.duration_since(since) >= give_up {
                    return Err(CallError::Unreachable {
                        url: call.url.clone(),
                        reason: super::request::chain(&error),
                    });
                }
            }
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        attempt += 1;
    }
}

async fn attempt_once(
    http: &reqwest::Client,
    call: &Call,
    attempt: usize,
) -> Result<Answer, reqwest::Error> {
    let response = http
        .post(&call.url)
        .bearer_auth(call.api_key.reveal())
        .header("content-type", "application/json")
        .header("x-session-id", &call.session)
        .header("x-stainless-retry-count", attempt)
        .body(call.body.clone())
        .send()
        .await?;
    let status = response.status().as_u16();
    Ok(Answer {
        status,
        body: response.bytes().await?,
    })
}
