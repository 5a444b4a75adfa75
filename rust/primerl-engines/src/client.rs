//! One engine over HTTP: the part of vLLM's API that a run needs. No state, no retries, no policy.

use super::body::RequestBody;
use super::error::EngineError;
use super::generate::{Bounds, GenerateAnswer, Generated, Progress};
use super::served_version::Named;
use super::stream::Assembly;
use crate::clients::{self, ModelCard, Models};
use primerl_service::tls::{self, NoAuthorities};
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Health and model-card calls answer at once or not at all; a machine whose cores are all busy needs some room.
pub(super) const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer, bytes, if no request bounds its length: rendered ids of a long conversation, metrics.
const LARGEST_ANSWER: usize = 64 << 20;
/// Largest body of a refusal, whose message is short.
const LARGEST_REFUSAL: usize = 64 << 10;

/// `http://host:port`, or `https`, without a trailing slash, or what is wrong with it.
pub fn parse_url(url: &str) -> Result<String, String> {
    let parsed =
        reqwest::Url::parse(url).map_err(|error| format!("`{url}` is not a URL ({error})"))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err(format!("`{url}` is neither http nor https"));
    }
    let extra = !parsed.username().is_empty()
        || parsed.password().is_some()
        || parsed.query().is_some()
        || parsed.fragment().is_some();
    if extra {
        return Err(format!(
            "`{url}` has a user, query or fragment, which engines have no use for"
        ));
    }
    Ok(parsed.as_str().trim_end_matches('/').to_owned())
}

#[derive(Clone, Debug)]
pub struct EngineClient {
    url: String,
    generate: reqwest::Url,
    /// Pooled: generate requests.
    requests: reqwest::Client,
    /// Not pooled: vLLM closes the connection after a failed administrative call without saying so.
    administration: reqwest::Client,
}

impl EngineClient {
    /// `url` in the form that [`parse_url`] returns.
    pub fn new(url: String) -> Result<EngineClient, EngineError> {
        EngineClient::over(url, tls::client)
    }

    /// `client` is the HTTP client for that URL.
    fn over(
        url: String,
        client: impl Fn(&str) -> Result<reqwest::ClientBuilder, NoAuthorities>,
    ) -> Result<EngineClient, EngineError> {
        let failed = |source| EngineError::Transport {
            call: "client",
            source,
        };
        let builder = || {
            let client =
                client(&url).map_err(|error| EngineError::Unfit(format!("`{url}` {error}")))?;
            Ok(client
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                // Engines answer directly, and prompts must not be sent to another server.
                .redirect(reqwest::redirect::Policy::none()))
        };
        let requests = builder()?.pool_idle_timeout(clients::IDLE_CONNECTION);
        let administration = builder()?.pool_max_idle_per_host(0);
        let generate = format!("{url}/inference/v1/generate");
        let generate = reqwest::Url::parse(&generate).map_err(|error| EngineError::Malformed {
            call: "client",
            problem: format!("{generate}: {error}"),
        })?;
        Ok(EngineClient {
            url,
            generate,
            requests: requests.build().map_err(failed)?,
            administration: administration.build().map_err(failed)?,
        })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Sample one answer. Dropping the future closes the connection, which aborts the request in the engine.
    pub async fn generate(
        &self,
        body: RequestBody,
        named: &Named,
        bounds: Bounds<'_>,
        timeout: Duration,
    ) -> Result<Generated, EngineError> {
        let request = self.generate_request(body, timeout);
        let bytes = bytes_of("generate", request, bounds.longest_answer()).await?;
        named.answer(GenerateAnswer::parse(&bytes)?)?.check(&bounds)
    }

    /// Like [`EngineClient::generate`], for a body that requests a stream; `progress` sees the tokens as they come.
    /// `request_id` is the body's. The received tokens are in `assembly`, also after an error.
    pub(super) async fn generate_streamed(
        &self,
        body: RequestBody,
        request_id: &str,
        timeout: Duration,
        progress: &mut dyn Progress,
        assembly: &mut Assembly,
    ) -> Result<(), EngineError> {
        let call = "generate";
        let failed = |source| EngineError::Transport { call, source };
        let request = self.generate_request(body, timeout);
        let mut answer = request.send().await.map_err(failed)?;
        if answer.status().as_u16() != 200 {
            return Err(refusal(call, answer).await);
        }
        let mut ended_at = None;
        while let Some(bytes) = answer.chunk().await.map_err(failed)? {
            let (ids, logprobs) = assembly.push(&bytes)?;
            if ended_at.is_none() && !ids.is_empty() {
                ended_at = progress.tokens(ids, logprobs);
                if ended_at.is_some() {
                    // Read on: the last event says which weights sampled what.
                    self.abort(request_id).await?;
                }
            }
        }
        Ok(())
    }

    fn generate_request(&self, body: RequestBody, timeout: Duration) -> reqwest::RequestBuilder {
        self.requests
            .post(self.generate.clone())
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .timeout(timeout)
            .body(body)
    }

    async fn abort(&self, request_id: &str) -> Result<(), EngineError> {
        let ids = serde_json::json!({"request_ids": [format!("generate-tokens-{request_id}")]});
        let url = format!("{}/inference/v1/abort_requests", self.url);
        let request = self.requests.post(url).timeout(PROBE_TIMEOUT).json(&ids);
        bytes_of("abort_requests", request, LARGEST_ANSWER)
            .await
            .map(drop)
    }

    /// A call on a connection that stays open.
    pub(super) async fn call(
        &self,
        call: &'static str,
        path: &str,
        body: bytes::Bytes,
        timeout: Duration,
    ) -> Result<bytes::Bytes, EngineError> {
        self.call_up_to(call, path, body, timeout, LARGEST_ANSWER)
            .await
    }

    /// Like [`EngineClient::call`], with a limit on the answer's size in bytes.
    pub(super) async fn call_up_to(
        &self,
        call: &'static str,
        path: &str,
        body: bytes::Bytes,
        timeout: Duration,
        most: usize,
    ) -> Result<bytes::Bytes, EngineError> {
        let request = self
            .requests
            .post(format!("{}{path}", self.url))
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .timeout(timeout)
            .body(body);
        bytes_of(call, request, most).await
    }

    pub async fn health(&self) -> Result<(), EngineError> {
        self.get("health", "/health").await.map(drop)
    }

    /// A call whose answer comes at once.
    pub(super) async fn get(
        &self,
        call: &'static str,
        path: &str,
    ) -> Result<bytes::Bytes, EngineError> {
        self.get_within(call, path, PROBE_TIMEOUT).await
    }

    pub(super) async fn get_within(
        &self,
        call: &'static str,
        path: &str,
        within: Duration,
    ) -> Result<bytes::Bytes, EngineError> {
        let request = self.requests.get(format!("{}{path}", self.url));
        bytes_of(call, request.timeout(within), LARGEST_ANSWER).await
    }

    /// Metrics in the Prometheus text format.
    pub async fn metrics(&self) -> Result<String, EngineError> {
        let bytes = self.get("metrics", "/metrics").await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The card of the model the run samples from.
    pub async fn model(&self, name: &str) -> Result<ModelCard, EngineError> {
        let models = self.models().await?;
        let names: Vec<String> = models.iter().map(|card| card.id.clone()).collect();
        models
            .into_iter()
            .find(|card| card.id == name)
            .ok_or_else(|| {
                EngineError::Unfit(format!(
                    "it serves {names:?}, not the run's model `{name}`: start it with `--served-model-name {name}`, or \
                     set model.name"
                ))
            })
    }

    pub(super) async fn models(&self) -> Result<Vec<ModelCard>, EngineError> {
        let models: Models = parse("models", &self.get("models", "/v1/models").await?)?;
        Ok(models.data)
    }

    /// The caller bounds the time: an update may legitimately take long.
    pub(super) async fn administer(
        &self,
        call: &'static str,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<bytes::Bytes, EngineError> {
        let mut request = self.administration.post(format!("{}{path}", self.url));
        if let Some(body) = body {
            request = request.json(body);
        }
        bytes_of(call, request, LARGEST_ANSWER).await
    }
}

async fn refusal(call: &'static str, answer: reqwest::Response) -> EngineError {
    let status = answer.status().as_u16();
    match clients::beginning(answer, LARGEST_REFUSAL).await {
        Ok((body, _)) => EngineError::Status {
            call,
            status,
            message: error_message(&body),
        },
        Err(source) => EngineError::Transport { call, source },
    }
}

async fn bytes_of(
    call: &'static str,
    request: reqwest::RequestBuilder,
    most: usize,
) -> Result<bytes::Bytes, EngineError> {
    let failed = |source| EngineError::Transport { call, source };
    let answer = request.send().await.map_err(failed)?;
    if !answer.status().is_success() {
        return Err(refusal(call, answer).await);
    }
    match clients::beginning(answer, most).await.map_err(failed)? {
        (bytes, true) => Ok(bytes.into()),
        (_, false) => Err(EngineError::Malformed {
            call,
            problem: format!("it is longer than {most} bytes"),
        }),
    }
}

/// The message of vLLM's error envelope, else the beginning of the body.
fn error_message(body: &[u8]) -> String {
    let value: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    match value["error"]["message"].as_str() {
        Some(message) => message.to_owned(),
        None => String::from_utf8_lossy(body).chars().take(500).collect(),
    }
}

pub(super) fn parse<T: DeserializeOwned>(
    call: &'static str,
    bytes: &[u8],
) -> Result<T, EngineError> {
    serde_json::from_slice(bytes).map_err(|error| EngineError::Malformed {
        call,
        problem: error.to_string(),
    })
}

#[cfg(test)]
mod tests;
