//! One server of OpenAI's chat completions: its requests, how often and how long they are tried.

use super::ClientConfig;
use super::answer::ChatAnswer;
use super::outage::Outage;
use super::server::{EndpointError, Server};
use bytes::Bytes;
use primerl_service::config_error::ConfigError;
use serde::Serialize;
use serde_json::{Map, Value};
use std::time::{Duration, Instant};

/// Attempts at one answer.
const MAX_ATTEMPTS: u32 = 6;
const FIRST_BACKOFF: Duration = Duration::from_millis(250);
/// Longest `Retry-After` that counts.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
/// Least time between two warnings about a server that fails.
const BETWEEN_WARNINGS: Duration = Duration::from_secs(60);

/// The settings of a request.
#[derive(Debug, Serialize)]
pub struct ChatRequest<'a> {
    pub model: &'a str,
    /// A JSON list of messages.
    #[serde(skip)]
    pub messages: &'a [u8],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub temperature: Option<f64>,
    pub max_completion_tokens: u32,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    pub stop: &'a [String],
    /// Further fields of the request.
    #[serde(flatten)]
    pub others: Map<String, Value>,
}

impl ChatRequest<'_> {
    fn encode(&self) -> Result<Bytes, EndpointError> {
        let others = serde_json::to_vec(self)
            .map_err(|error| EndpointError::Malformed(error.to_string()))?;
        Ok(with_messages(self.messages, &others))
    }
}

/// `others`, a JSON object with fields, and `messages`.
pub fn with_messages(messages: &[u8], others: &[u8]) -> Bytes {
    let mut body = b"{\"messages\":".to_vec();
    body.extend_from_slice(messages);
    body.push(b',');
    // A comma replaces the opening brace.
    body.extend_from_slice(&others[1..]);
    body.into()
}

#[derive(Debug)]
pub struct Endpoint {
    server: Server,
    url: String,
    outage: Outage,
}

impl Endpoint {
    /// `name` is that of the table.
    pub fn open(name: &str, config: &ClientConfig) -> Result<Endpoint, ConfigError> {
        let server = Server::open(name, config)?;
        let url = format!("{}/chat/completions", server.base_url());
        Ok(Endpoint {
            server,
            url,
            outage: Outage::default(),
        })
    }

    /// The config's table that names it.
    pub fn name(&self) -> &str {
        self.server.name()
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The outage over all rollouts that use the server.
    pub fn outage(&self) -> &Outage {
        &self.outage
    }

    /// The name of the model there.
    pub fn model(&self) -> &str {
        self.server.model()
    }

    /// One answer; the request is repeated if that may help, until the deadline.
    pub async fn ask(
        &self,
        request: &ChatRequest<'_>,
        deadline: Instant,
    ) -> Result<ChatAnswer, EndpointError> {
        let body = request.encode()?;
        let mut attempt = 1;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let (error, wait) = match self
                .ask_once(body.clone(), left.min(self.server.timeout()))
                .await
            {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            if error.is_outage() {
                self.outage.failed(&error);
            }
            // Many rollouts may be refused together, again and again.
            if self.outage.is_news(Instant::now(), BETWEEN_WARNINGS) {
                tracing::warn!(url = self.url, %error, attempt, "a request of another server failed");
            }
            if !error.is_retryable() || attempt >= MAX_ATTEMPTS {
                return Err(error);
            }
            let wait = wait.unwrap_or(FIRST_BACKOFF * 2_u32.pow(attempt - 1));
            let wait = wait.min(LONGEST_BACKOFF);
            if Instant::now() + wait >= deadline {
                let last = error.to_string();
                return Err(EndpointError::Deadline { last });
            }
            tokio::time::sleep(wait).await;
            attempt += 1;
        }
    }

    async fn ask_once(
        &self,
        body: Bytes,
        timeout: Duration,
    ) -> Result<ChatAnswer, (EndpointError, Option<Duration>)> {
        let bytes = self.server.post(&self.url, body, timeout).await?;
        ChatAnswer::parse(&bytes, self.model())
            .map_err(|problem| (self.server.malformed(&problem), None))
    }
}

#[cfg(test)]
mod tests;
