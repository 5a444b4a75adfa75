//! One such server: what it is asked, how often, for how long.

use super::answer::ChatAnswer;
use crate::config::{ClientConfig, ConfigError, field};
use crate::secret::Secret;
use bytes::Bytes;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, RETRY_AFTER};
use serde::Serialize;
use serde_json::{Map, Value};
use std::time::{Duration, Instant};

/// Attempts at one answer.
const MAX_ATTEMPTS: u32 = 6;
const FIRST_BACKOFF: Duration = Duration::from_millis(250);
/// No server's word about when to come again counts for more.
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes shown of an error that is not in OpenAI's shape.
const SHOWN: usize = 500;

#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    #[error("no answer: {0}")]
    Transport(String),
    #[error("status {status}: {message}")]
    Status { status: u16, message: String },
    #[error("malformed answer: {0}")]
    Malformed(String),
    #[error("no answer within the time that was left; last: {last}")]
    Deadline { last: String },
}

impl EndpointError {
    fn is_retryable(&self) -> bool {
        match self {
            EndpointError::Status { status, .. } => {
                *status >= 500 || matches!(status, 408 | 409 | 425 | 429)
            }
            EndpointError::Transport(_) | EndpointError::Malformed(_) => true,
            EndpointError::Deadline { .. } => false,
        }
    }

    /// The request or the key is at fault, not the moment.
    pub fn is_refusal(&self) -> bool {
        matches!(self, EndpointError::Status { .. }) && !self.is_retryable()
    }
}

/// `scheme://host[:port][/path]` without a trailing slash, or what is wrong with it.
pub fn parse_base_url(url: &str) -> Result<String, String> {
    let parsed =
        reqwest::Url::parse(url).map_err(|error| format!("`{url}` is no URL ({error})"))?;
    match parsed.scheme() {
        "http" => {}
        "https" => {
            return Err(format!(
                "`{url}` is https, and the orchestrator speaks no TLS: reach that server through a proxy on this machine \
                 that does"
            ));
        }
        other => return Err(format!("`{url}` is {other}, not http")),
    }
    if !parsed.username().is_empty() || parsed.password().is_some() {
        // Not shown: it holds a password.
        return Err(
            "has a user or a password; name the variable that holds the key in api_key_env".into(),
        );
    }
    if parsed.query().is_some() || parsed.fragment().is_some() {
        return Err(format!(
            "`{url}` has a query or a fragment, to which no path can be added"
        ));
    }
    Ok(parsed.as_str().trim_end_matches('/').to_owned())
}

/// What is asked.
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
    /// Further fields.
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
pub(crate) fn with_messages(messages: &[u8], others: &[u8]) -> Bytes {
    let mut body = b"{\"messages\":".to_vec();
    body.extend_from_slice(messages);
    body.push(b',');
    // A comma takes the place of its brace.
    body.extend_from_slice(&others[1..]);
    body.into()
}

#[derive(Debug)]
pub struct Endpoint {
    url: String,
    model: String,
    key: Option<Secret>,
    /// Named where the server refuses the key.
    key_variable: Option<String>,
    timeout: Duration,
    client: reqwest::Client,
}

impl Endpoint {
    /// `name` is that of the table. The key is read now: a run must not find out at its end that there is none.
    pub fn open(name: &str, config: &ClientConfig) -> Result<Endpoint, ConfigError> {
        let refuse = |key: &str, problem: String, mend: &str| {
            Err(field(&format!("{name}.{key}"), problem, mend))
        };
        let url = match parse_base_url(&config.base_url) {
            Ok(url) => format!("{url}/chat/completions"),
            Err(problem) => {
                return refuse("base_url", problem, "give a URL like http://host:port/v1");
            }
        };
        let key = match &config.api_key_env {
            None => None,
            Some(variable) => match std::env::var(variable).ok().filter(|key| !key.is_empty()) {
                Some(key) => Some(Secret::new(key)),
                None => {
                    let problem = format!("names {variable}, which is not set (or is no text)");
                    return refuse("api_key_env", problem, "set it for the process of the run");
                }
            },
        };
        let headers = match headers(key.as_ref()) {
            Ok(headers) => headers,
            Err(problem) => {
                return refuse("api_key_env", problem, "set the variable to the key alone");
            }
        };
        let client = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            .tcp_nodelay(true)
            .default_headers(headers)
            // Another host must not get the key.
            .redirect(reqwest::redirect::Policy::none())
            .no_proxy()
            .build();
        let client = match client {
            Ok(client) => client,
            Err(error) => return refuse("base_url", error.to_string(), "give another URL"),
        };
        Ok(Endpoint {
            url,
            model: config.model.clone(),
            key,
            key_variable: config.api_key_env.clone(),
            timeout: Duration::from_secs_f64(config.timeout_s),
            client,
        })
    }

    /// The name of the model there.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// One answer; asked again where that may help, until the deadline.
    pub async fn ask(
        &self,
        request: &ChatRequest<'_>,
        deadline: Instant,
    ) -> Result<ChatAnswer, EndpointError> {
        let body = request.encode()?;
        let mut attempt = 1;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let (error, wait) = match self.ask_once(body.clone(), left.min(self.timeout)).await {
                Ok(answer) => return Ok(answer),
                Err(failed) => failed,
            };
            tracing::warn!(url = self.url, %error, attempt, "a request of another server failed");
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

    /// With an error, for how long the server wants to be left alone.
    async fn ask_once(
        &self,
        body: Bytes,
        timeout: Duration,
    ) -> Result<ChatAnswer, (EndpointError, Option<Duration>)> {
        let lost = |error: reqwest::Error| {
            let text = crate::engines::client::chain(&error.without_url());
            (EndpointError::Transport(self.cleaned(&text)), None)
        };
        let request = self
            .client
            .post(&self.url)
            .header(CONTENT_TYPE, "application/json")
            .timeout(timeout)
            .body(body);
        let answer = request.send().await.map_err(lost)?;
        let status = answer.status().as_u16();
        let wait = answer.headers().get(RETRY_AFTER).and_then(seconds);
        let bytes = answer.bytes().await.map_err(lost)?;
        if status != 200 {
            let message = self.refusal(status, &bytes);
            return Err((EndpointError::Status { status, message }, wait));
        }
        ChatAnswer::parse(&bytes, &self.model)
            .map_err(|problem| (EndpointError::Malformed(self.cleaned(&problem)), None))
    }

    fn refusal(&self, status: u16, body: &[u8]) -> String {
        let value: Value = serde_json::from_slice(body).unwrap_or_default();
        let error = &value["error"];
        let message = match error["message"].as_str().or(error.as_str()) {
            Some(message) => message.to_owned(),
            None => String::from_utf8_lossy(body).chars().take(SHOWN).collect(),
        };
        let message = self.cleaned(&message);
        match (status, &self.key_variable) {
            (401 | 403, Some(variable)) => format!("{message} (the key is that of {variable})"),
            (401 | 403, None) => format!("{message} (no key was sent: api_key_env is not set)"),
            _ => message,
        }
    }

    /// Servers repeat what they were sent.
    fn cleaned(&self, text: &str) -> String {
        match &self.key {
            Some(key) => text.replace(key.reveal(), "***"),
            None => text.to_owned(),
        }
    }
}

fn headers(key: Option<&Secret>) -> Result<HeaderMap, String> {
    let mut headers = HeaderMap::new();
    if let Some(key) = key {
        let value = format!("Bearer {}", key.reveal());
        let mut value = HeaderValue::from_str(&value).map_err(|_| {
            "names a variable that holds something else than visible ASCII characters".to_owned()
        })?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    Ok(headers)
}

/// `Retry-After` in seconds; the form with a date is not heeded.
fn seconds(value: &HeaderValue) -> Option<Duration> {
    let seconds: f64 = value.to_str().ok()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests;
