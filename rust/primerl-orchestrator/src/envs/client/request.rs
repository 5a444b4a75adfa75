//! One call of the lease protocol: msgpack out, msgpack or an OpenAI-shaped error back.

use super::super::wire;
use super::{Notice, Shared};
use reqwest::StatusCode;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::time::Duration;
use tokio::time::Instant;

/// Why a call got no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum RequestError {
    #[error("the worker is unknown")]
    WorkerUnknown,
    /// It is unknown because its owner did not move for too long; the orchestrator's message.
    #[error("{0}")]
    WorkerBlocked(String),
    /// The same request would be refused again.
    #[error("{0}")]
    Refused(String),
    /// Worth trying again.
    #[error("{0}")]
    Failed(String),
}

/// When the orchestrator answered last, and what went wrong since.
pub(super) struct Contact {
    answered: Instant,
    problem: Option<String>,
}

impl Contact {
    pub(super) fn new() -> Self {
        Self {
            answered: Instant::now(),
            problem: None,
        }
    }

    pub(super) fn silence(&self) -> (Duration, String) {
        match &self.problem {
            Some(problem) => (self.answered.elapsed(), problem.clone()),
            // No failure since the last answer: no request was made, or one is in progress.
            None => (Duration::ZERO, String::new()),
        }
    }
}

impl Shared {
    pub(super) async fn post<B: Serialize, A: DeserializeOwned>(
        &self,
        path: &str,
        body: &B,
        timeout: Duration,
    ) -> Result<A, RequestError> {
        let body = wire::encode(body)
            .map_err(|error| RequestError::Refused(format!("cannot encode {path}: {error}")))?;
        let result = self.exchange(path, body, timeout).await;
        self.note_contact(path, &result);
        let bytes = result?;
        wire::decode(&bytes).map_err(|error| {
            RequestError::Refused(format!("cannot read the answer to {path}: {error}"))
        })
    }

    /// A problem is reported once per outage, not once per attempt.
    fn note_contact(&self, path: &str, result: &Result<bytes::Bytes, RequestError>) {
        let mut contact = self.contact.lock();
        match result {
            Err(RequestError::Failed(problem)) => {
                if contact.problem.replace(problem.clone()).is_none() {
                    self.mailbox
                        .put(Notice::Problem(format!("{path}: {problem}; trying again")));
                }
            }
            _ => *contact = Contact::new(),
        }
    }

    async fn exchange(
        &self,
        path: &str,
        body: Vec<u8>,
        timeout: Duration,
    ) -> Result<bytes::Bytes, RequestError> {
        let failed = |error: reqwest::Error| RequestError::Failed(chain(&error));
        let mut request = self
            .http
            .post(format!("{}{path}", self.options.orchestrator_url));
        if let Some(key) = &self.options.api_key {
            request = request.bearer_auth(key.reveal());
        }
        let response = request
            .header("content-type", wire::CONTENT_TYPE)
            .timeout(timeout)
            .body(body)
            .send()
            .await
            .map_err(failed)?;
        let status = response.status();
        let bytes = response.bytes().await.map_err(failed)?;
        accepted(status, bytes)
    }
}

fn accepted(status: StatusCode, bytes: bytes::Bytes) -> Result<bytes::Bytes, RequestError> {
    match status {
        StatusCode::OK => Ok(bytes),
        StatusCode::GONE if code(&bytes).as_deref() == Some(wire::WORKER_BLOCKED) => {
            Err(RequestError::WorkerBlocked(message(&bytes)))
        }
        StatusCode::GONE => Err(RequestError::WorkerUnknown),
        StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS => {
            Err(RequestError::Failed(explain(status, &bytes)))
        }
        status if status.is_client_error() => Err(RequestError::Refused(explain(status, &bytes))),
        status => Err(RequestError::Failed(explain(status, &bytes))),
    }
}

/// The message of an OpenAI-shaped error body, or the body itself.
fn explain(status: StatusCode, body: &[u8]) -> String {
    format!("{status}: {}", message(body))
}

fn message(body: &[u8]) -> String {
    let message = field(body, "/error/message");
    let message = message.unwrap_or_else(|| String::from_utf8_lossy(body).into_owned());
    message.chars().take(2000).collect()
}

fn code(body: &[u8]) -> Option<String> {
    field(body, "/error/code")
}

fn field(body: &[u8], pointer: &str) -> Option<String> {
    let json: serde_json::Value = serde_json::from_slice(body).ok()?;
    Some(json.pointer(pointer)?.as_str()?.to_owned())
}

/// An error with all its causes: the outermost message of a connection error says nothing.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
