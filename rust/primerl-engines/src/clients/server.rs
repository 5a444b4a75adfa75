//! One server that is not an engine of the run: its address, its key, its refusals.

use super::ClientConfig;
use bytes::Bytes;
use primerl_service::config_error::{ConfigError, field};
use primerl_service::secret::Secret;
use primerl_service::tls::{self, NoAuthorities, chain};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue, LOCATION, RETRY_AFTER};
use reqwest::{RequestBuilder, Response};
use serde_json::Value;
use std::time::Duration;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// vLLM, and others, close a connection that was idle for 5 s; a reused one must be younger.
pub const IDLE_CONNECTION: Duration = Duration::from_secs(3);
/// Characters shown of a server's message.
const SHOWN: usize = 500;
/// Largest answer, bytes; the log-probabilities of a million tokens need as much.
const LARGEST_ANSWER: usize = 256 << 20;
/// Largest body of a refusal; more of it would not help.
const LARGEST_REFUSAL: usize = 64 << 10;

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
    pub fn is_retryable(&self) -> bool {
        match self {
            EndpointError::Status { status, .. } => {
                *status >= 500 || matches!(status, 408 | 409 | 425 | 429)
            }
            EndpointError::Transport(_) | EndpointError::Malformed(_) => true,
            EndpointError::Deadline { .. } => false,
        }
    }

    /// The server does not answer, or says that it cannot.
    pub fn is_outage(&self) -> bool {
        let is_malformed = matches!(self, EndpointError::Malformed(_));
        matches!(self, EndpointError::Deadline { .. }) || (self.is_retryable() && !is_malformed)
    }

    /// The server refuses every request: the key is no longer valid, or the account is empty.
    pub fn is_shut(&self) -> bool {
        matches!(
            self,
            EndpointError::Status {
                status: 401 | 402,
                ..
            }
        )
    }

    /// The server refuses every request, or the model is gone; or the server refuses this one request.
    pub fn may_be_shut(&self) -> bool {
        matches!(
            self,
            EndpointError::Status {
                status: 403 | 404,
                ..
            }
        )
    }

    /// The request or the key is at fault, not the moment.
    pub fn is_refusal(&self) -> bool {
        matches!(self, EndpointError::Status { .. }) && !self.is_retryable()
    }
}

/// `http[s]://host[:port][/path]` without a trailing slash, or what is wrong with it.
pub fn parse_base_url(url: &str) -> Result<String, String> {
    let parsed =
        reqwest::Url::parse(url).map_err(|error| format!("`{url}` is not a URL ({error})"))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err(format!("`{url}` is neither http nor https"));
    }
    if !parsed.username().is_empty() || parsed.password().is_some() {
        // The URL is not shown: it holds a password.
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

#[derive(Debug)]
pub(super) struct Server {
    /// Name of the config's table.
    name: String,
    base_url: String,
    model: String,
    key: Option<Secret>,
    /// The variable, named when the server refuses the key.
    key_variable: Option<String>,
    timeout: Duration,
    client: reqwest::Client,
}

impl Server {
    /// The first of the table's servers; see [`Server::open_all`].
    pub(super) fn open(name: &str, config: &ClientConfig) -> Result<Server, ConfigError> {
        Server::open_at(
            name,
            config,
            config.base_urls.first().map_or("", String::as_str),
        )
    }

    /// `name` is that of the table, empty for the whole file's. The key is read now: a missing key must not be found at
    /// the end of a run.
    pub(super) fn open_all(name: &str, config: &ClientConfig) -> Result<Vec<Server>, ConfigError> {
        let urls = config.base_urls.iter();
        urls.map(|url| Server::open_at(name, config, url)).collect()
    }

    fn open_at(name: &str, config: &ClientConfig, url: &str) -> Result<Server, ConfigError> {
        Server::open_over(name, config, url, tls::client)
    }

    /// `client` is the HTTP client for that URL.
    pub(super) fn open_over(
        name: &str,
        config: &ClientConfig,
        url: &str,
        client: impl FnOnce(&str) -> Result<reqwest::ClientBuilder, NoAuthorities>,
    ) -> Result<Server, ConfigError> {
        let refuse = |key: &str, problem: String, hint: &str| refused(name, key, problem, hint);
        let base_url = parse_base_url(url).map_err(|problem| {
            refuse("base_url", problem, "give a URL like http://host:port/v1")
        })?;
        let key = read_key(config).map_err(|problem| {
            refuse("api_key_env", problem, "set it for the process of the run")
        })?;
        Ok(Server {
            name: name.to_owned(),
            client: connect(&base_url, key.as_ref(), client, &refuse)?,
            base_url,
            model: config.model.clone(),
            key,
            key_variable: config.api_key_env.clone(),
            timeout: Duration::from_secs_f64(config.timeout_s),
        })
    }

    /// The config's table that names it.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn base_url(&self) -> &str {
        &self.base_url
    }

    /// The name of the model there.
    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// Longest time of one answer.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// One answer of status 200. An error says how long the server asked not to be called.
    pub(super) async fn post(
        &self,
        url: &str,
        body: Bytes,
        timeout: Duration,
    ) -> Result<Bytes, (EndpointError, Option<Duration>)> {
        let request = self.client.post(url);
        let request = request.header(CONTENT_TYPE, "application/json");
        self.send(request.timeout(timeout).body(body)).await
    }

    /// See [`Server::post`].
    pub(super) async fn get(
        &self,
        url: &str,
        timeout: Duration,
    ) -> Result<Bytes, (EndpointError, Option<Duration>)> {
        self.send(self.client.get(url).timeout(timeout)).await
    }

    /// Reads up to that many bytes of an answer of any status.
    pub(super) async fn look(
        &self,
        url: &str,
        timeout: Duration,
        most: usize,
    ) -> reqwest::Result<(u16, Vec<u8>)> {
        let answer = self.client.get(url).timeout(timeout).send().await?;
        let status = answer.status().as_u16();
        Ok((status, beginning(answer, most).await?.0))
    }

    /// Why there is no answer, and what can be done.
    pub(super) fn told(&self, error: reqwest::Error) -> String {
        let error = error.without_url();
        let text = self.cleaned(&chain(&error));
        match tls::mend(&error, self.base_url()) {
            Some(hint) => format!("{text}; {hint}"),
            None => text,
        }
    }

    async fn send(
        &self,
        request: RequestBuilder,
    ) -> Result<Bytes, (EndpointError, Option<Duration>)> {
        let lost = |error| (EndpointError::Transport(self.told(error)), None);
        let answer = request.send().await.map_err(lost)?;
        let status = answer.status().as_u16();
        let wait = answer.headers().get(RETRY_AFTER).and_then(seconds);
        if status != 200 {
            let place = answer.headers().get(LOCATION).cloned();
            let (bytes, _) = beginning(answer, LARGEST_REFUSAL).await.map_err(lost)?;
            let message = self.refusal(status, &bytes, place.as_ref());
            return Err((EndpointError::Status { status, message }, wait));
        }
        match beginning(answer, LARGEST_ANSWER).await.map_err(lost)? {
            (bytes, true) => Ok(bytes.into()),
            (_, false) => {
                let problem = format!("it is longer than {LARGEST_ANSWER} bytes");
                Err((EndpointError::Malformed(problem), None))
            }
        }
    }

    /// A body that cannot be read.
    pub(super) fn malformed(&self, problem: &str) -> EndpointError {
        EndpointError::Malformed(self.cleaned(problem))
    }

    fn refusal(&self, status: u16, body: &[u8], place: Option<&HeaderValue>) -> String {
        let value: Value = serde_json::from_slice(body).unwrap_or_default();
        let error = &value["error"];
        let message = match error["message"].as_str().or(error.as_str()) {
            Some(message) => self.cleaned(message),
            None => self.cleaned(&String::from_utf8_lossy(body)),
        };
        match (status, &self.key_variable) {
            (300..=399, _) => {
                let place = place.map(|place| String::from_utf8_lossy(place.as_bytes()));
                let place = self.cleaned(&place.unwrap_or_default());
                format!(
                    "redirected to {place}; not followed, because the API key would be sent there. Set base_url to \
                     that URL"
                )
            }
            (401 | 403, Some(variable)) => format!("{message} (the key is that of {variable})"),
            (401 | 403, None) => format!("{message} (no key was sent: api_key_env is not set)"),
            _ => message,
        }
    }

    /// Servers repeat what they were sent, at any length, and a terminal obeys control characters. The key is removed
    /// before the text is cut, because a cut could leave a part of the key.
    fn cleaned(&self, text: &str) -> String {
        let text = match &self.key {
            Some(key) => text.replace(key.reveal(), "***"),
            None => text.to_owned(),
        };
        let shown = text.chars().take(SHOWN);
        let mut shown: String = shown
            .map(|letter| if letter.is_control() { ' ' } else { letter })
            .collect();
        if text.chars().nth(SHOWN).is_some() {
            shown.push_str(" [...]");
        }
        shown
    }
}

/// Reads up to that many bytes of a body, and whether they are all.
pub async fn beginning(mut answer: Response, most: usize) -> reqwest::Result<(Vec<u8>, bool)> {
    let mut body = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        let room = most - body.len();
        body.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if chunk.len() > room {
            return Ok((body, false));
        }
    }
    Ok((body, true))
}

/// `name` is that of the table, empty for the whole file's.
fn refused(name: &str, key: &str, problem: String, hint: &str) -> ConfigError {
    let table = if name.is_empty() { "" } else { "." };
    field(&format!("{name}{table}{key}"), problem, hint)
}

fn read_key(config: &ClientConfig) -> Result<Option<Secret>, String> {
    let Some(variable) = &config.api_key_env else {
        return Ok(None);
    };
    match std::env::var(variable).ok().filter(|key| !key.is_empty()) {
        Some(key) => Ok(Some(Secret::new(key))),
        None => Err(format!(
            "names {variable}, which is not set (or is not text)"
        )),
    }
}

/// The HTTP client, which sends the key with every request. `refuse` makes an error of a key of the config.
fn connect(
    base_url: &str,
    key: Option<&Secret>,
    client: impl FnOnce(&str) -> Result<reqwest::ClientBuilder, NoAuthorities>,
    refuse: &dyn Fn(&str, String, &str) -> ConfigError,
) -> Result<reqwest::Client, ConfigError> {
    let headers = headers(key)
        .map_err(|problem| refuse("api_key_env", problem, "set the variable to the key alone"))?;
    let client = client(base_url).map_err(|error| {
        let problem = format!("`{base_url}` {}", error.problem);
        refuse("base_url", problem, &error.hint)
    })?;
    client
        .connect_timeout(CONNECT_TIMEOUT)
        .pool_idle_timeout(IDLE_CONNECTION)
        .tcp_nodelay(true)
        .default_headers(headers)
        // Another host must not get the key.
        .redirect(reqwest::redirect::Policy::none())
        .build()
        .map_err(|error| refuse("base_url", error.to_string(), "give another URL"))
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

/// `Retry-After` in seconds; the form with a date is ignored.
fn seconds(value: &HeaderValue) -> Option<Duration> {
    let seconds: f64 = value.to_str().ok()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

#[cfg(test)]
mod tests;
