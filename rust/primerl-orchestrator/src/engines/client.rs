//! One engine over HTTP: vLLM's surface, as much of it as a run needs. No state, no retries, no policy.

use super::body::RequestBody;
use super::generate::{Bounds, GenerateAnswer, Generated, Progress};
use super::stream::Assembly;
use primerl_core::PolicyVersion;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::time::Duration;

/// Health and model-card calls answer at once or not at all; a machine whose cores are all busy needs some room.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// vLLM closes idle connections after 5 s; a reused one must be younger.
const IDLE_CONNECTION: Duration = Duration::from_secs(3);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    #[error("{call}: no answer: {}", chain(source))]
    Transport {
        call: &'static str,
        source: reqwest::Error,
    },
    #[error("{call}: status {status}: {message}")]
    Status {
        call: &'static str,
        status: u16,
        message: String,
    },
    #[error("{call}: malformed answer: {problem}")]
    Malformed { call: &'static str, problem: String },
    /// The engine sampled with weights whose version nobody proved (it was restarted, or updated by somebody else).
    #[error("sampled with weights labelled `{label}`, which were never proved")]
    Unproved { label: String },
    #[error("generate: aborted by the engine after {tokens} tokens")]
    Aborted { tokens: usize },
    /// Weights were loaded while it answered, and the answer does not say which tokens are of which.
    #[error(
        "its weights changed from `{before}` to `{after}` while it answered, and a chat answer does not say which of \
         them sampled what"
    )]
    Crossed { before: String, after: String },
    /// It cannot do what the run's config asks of it.
    #[error("{0}")]
    Unfit(String),
    /// It was given other ids than those that it had said it would be given.
    #[error(
        "chat: the engine was given a prompt of {given} tokens, and /tokenize had rendered the same messages to {expected} \
         others: is a setting of its chat route another (--exclude-tools-when-tool-choice-none, \
         --default-chat-template-kwargs)?"
    )]
    PromptDiffers { given: usize, expected: usize },
    #[error("generate: the stream ended after {tokens} tokens, without its end")]
    CutOff { tokens: usize },
    #[error("generate: the engine was lost while it worked on the request")]
    Lost,
    #[error("serves weights with digest {served}, the manifest says {expected}")]
    Digest { served: String, expected: String },
    #[error("labels its weights `{served}` after it had proved version {expected}")]
    Label {
        served: String,
        expected: PolicyVersion,
    },
}

/// reqwest's own text leaves out the cause ("connection refused").
pub(crate) fn chain(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

impl EngineError {
    /// Whether the same request may succeed on another engine (or here, later).
    pub fn is_retryable(&self) -> bool {
        match self {
            EngineError::Status { status, .. } => {
                *status >= 500 || matches!(status, 404 | 408 | 429)
            }
            _ => true,
        }
    }

    /// Whether what a stream had brought by then can be relied on: the engine went away, but said nothing wrong.
    pub fn leaves_a_part(&self) -> bool {
        match self {
            EngineError::Transport { .. }
            | EngineError::Aborted { .. }
            | EngineError::CutOff { .. }
            | EngineError::Lost => true,
            EngineError::Status { status, .. } => *status >= 500,
            _ => false,
        }
    }
}

/// `http://host:port` without a trailing slash, or what is wrong with it.
pub fn parse_url(url: &str) -> Result<String, String> {
    let parsed =
        reqwest::Url::parse(url).map_err(|error| format!("`{url}` is no URL ({error})"))?;
    if parsed.scheme() != "http" {
        return Err(format!(
            "`{url}` is not http; engines are reached without TLS"
        ));
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

#[derive(Deserialize)]
struct Models {
    data: Vec<ModelCard>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct ModelCard {
    pub id: String,
    /// Prompt and answer together, tokens.
    pub max_model_len: Option<u32>,
}

#[derive(Deserialize)]
struct WeightInfo {
    weight_version: String,
}

#[derive(Deserialize)]
struct RpcAnswer {
    results: Vec<DigestResult>,
}

#[derive(Deserialize)]
struct DigestResult {
    digest: String,
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
    /// `url` as [`parse_url`] returns it.
    pub fn new(url: String) -> Result<EngineClient, EngineError> {
        let failed = |source| EngineError::Transport {
            call: "client",
            source,
        };
        let builder = || {
            reqwest::Client::builder()
                .connect_timeout(CONNECT_TIMEOUT)
                .tcp_nodelay(true)
                .no_proxy()
        };
        let generate = format!("{url}/inference/v1/generate");
        let generate = reqwest::Url::parse(&generate).map_err(|error| EngineError::Malformed {
            call: "client",
            problem: format!("{generate}: {error}"),
        })?;
        Ok(EngineClient {
            url,
            generate,
            requests: builder()
                .pool_idle_timeout(IDLE_CONNECTION)
                .build()
                .map_err(failed)?,
            administration: builder()
                .pool_max_idle_per_host(0)
                .build()
                .map_err(failed)?,
        })
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// Sample one answer. Dropping the future closes the connection, which aborts the request in the engine.
    pub async fn generate(
        &self,
        body: RequestBody,
        bounds: Bounds,
        timeout: Duration,
    ) -> Result<Generated, EngineError> {
        let request = self
            .requests
            .post(self.generate.clone())
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .timeout(timeout)
            .body(body);
        let bytes = bytes_of("generate", request).await?;
        GenerateAnswer::parse(&bytes)?.check(&bounds)
    }

    /// As [`EngineClient::generate`], of a body that asks for a stream; `progress` sees the tokens as they come.
    /// `request_id` is the body's. What came is in `assembly` after an error, too.
    pub(super) async fn generate_streamed(
        &self,
        body: RequestBody,
        request_id: &str,
        bounds: Bounds,
        timeout: Duration,
        progress: &mut dyn Progress,
        assembly: &mut Assembly,
    ) -> Result<Generated, EngineError> {
        let failed = |source| EngineError::Transport {
            call: "generate",
            source,
        };
        let request = self
            .requests
            .post(self.generate.clone())
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .timeout(timeout)
            .body(body);
        let mut answer = request.send().await.map_err(failed)?;
        let status = answer.status().as_u16();
        if status != 200 {
            let body = answer.bytes().await.map_err(failed)?;
            return Err(EngineError::Status {
                call: "generate",
                status,
                message: error_message(&body),
            });
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
        assembly
            .finish(ended_at.is_some())?
            .check(&bounds, ended_at)
    }

    async fn abort(&self, request_id: &str) -> Result<(), EngineError> {
        let ids = serde_json::json!({"request_ids": [format!("generate-tokens-{request_id}")]});
        let url = format!("{}/inference/v1/abort_requests", self.url);
        let request = self.requests.post(url).timeout(PROBE_TIMEOUT).json(&ids);
        bytes_of("abort_requests", request).await.map(drop)
    }

    /// A call on a connection that is kept.
    pub(super) async fn call(
        &self,
        call: &'static str,
        path: &str,
        body: bytes::Bytes,
        timeout: Duration,
    ) -> Result<bytes::Bytes, EngineError> {
        let request = self
            .requests
            .post(format!("{}{path}", self.url))
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .timeout(timeout)
            .body(body);
        bytes_of(call, request).await
    }

    /// What the engine calls the weights that it serves now.
    pub(super) async fn weight_label(&self) -> Result<String, EngineError> {
        let request = self
            .requests
            .get(format!("{}/weight_info", self.url))
            .timeout(PROBE_TIMEOUT);
        let info: WeightInfo = parse("weight_info", &bytes_of("weight_info", request).await?)?;
        Ok(info.weight_version)
    }

    pub async fn health(&self) -> Result<(), EngineError> {
        let request = self
            .requests
            .get(format!("{}/health", self.url))
            .timeout(PROBE_TIMEOUT);
        bytes_of("health", request).await.map(drop)
    }

    /// Metrics in the Prometheus text format.
    pub async fn metrics(&self) -> Result<String, EngineError> {
        let request = self
            .requests
            .get(format!("{}/metrics", self.url))
            .timeout(PROBE_TIMEOUT);
        let bytes = bytes_of("metrics", request).await?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The card of the model the run samples from.
    pub async fn model(&self, name: &str) -> Result<ModelCard, EngineError> {
        let request = self
            .requests
            .get(format!("{}/v1/models", self.url))
            .timeout(PROBE_TIMEOUT);
        let models: Models = parse("models", &bytes_of("models", request).await?)?;
        let names: Vec<String> = models.data.iter().map(|card| card.id.clone()).collect();
        models
            .data
            .into_iter()
            .find(|card| card.id == name)
            .ok_or_else(|| EngineError::Malformed {
                call: "models",
                problem: format!("serves {names:?}, not the run's model `{name}`"),
            })
    }

    /// Freeze running requests and keep their KV cache.
    pub async fn pause(&self) -> Result<(), EngineError> {
        self.administer("pause", "/pause?mode=keep&clear_cache=false", None)
            .await
            .map(drop)
    }

    pub async fn resume(&self) -> Result<(), EngineError> {
        self.administer("resume", "/resume", None).await.map(drop)
    }

    /// Load the weights in `folder` and label them `version`. The caller pauses before and proves after.
    pub async fn load(&self, folder: &str, version: PolicyVersion) -> Result<(), EngineError> {
        if let Err(error) = self.start_update().await {
            // An orchestrator that died in the middle of an update left it open, and no other can begin. The label does
            // not matter: nothing is asked of the engine before it has proved what is loaded now.
            tracing::info!(engine = self.url, %error, "closing an update that was left open");
            if self.finish_update("left open").await.is_err() {
                return Err(error);
            }
            self.start_update().await?;
        }
        let update = serde_json::json!({"update_info": {"path": folder}});
        self.administer("update_weights", "/update_weights", Some(&update))
            .await?;
        self.finish_update(&version.to_string()).await
    }

    async fn start_update(&self) -> Result<(), EngineError> {
        let started = self.administer("start_weight_update", "/start_weight_update", None);
        started.await.map(drop)
    }

    async fn finish_update(&self, label: &str) -> Result<(), EngineError> {
        let label = serde_json::json!({"weight_version": label});
        let (call, path) = ("finish_weight_update", "/finish_weight_update");
        self.administer(call, path, Some(&label)).await.map(drop)
    }

    /// Check that every worker of the engine holds tensors of this digest, and the engine this label.
    pub async fn prove(&self, version: PolicyVersion, expected: &str) -> Result<(), EngineError> {
        let call = serde_json::json!({"method": "primerl_weight_digest", "args": []});
        let bytes = self
            .administer("collective_rpc", "/collective_rpc", Some(&call))
            .await?;
        let digests: RpcAnswer = parse("collective_rpc", &bytes)?;
        let wrong = digests
            .results
            .iter()
            .find(|result| result.digest != expected);
        if digests.results.is_empty() || wrong.is_some() {
            let served = wrong.map_or_else(|| "nothing".into(), |result| result.digest.clone());
            return Err(EngineError::Digest {
                served,
                expected: expected.into(),
            });
        }
        self.check_label(version).await
    }

    /// Check that the engine says of its weights what it was told of them: a process that was started since does not.
    pub async fn check_label(&self, version: PolicyVersion) -> Result<(), EngineError> {
        let request = self
            .administration
            .get(format!("{}/weight_info", self.url))
            .timeout(PROBE_TIMEOUT);
        let info: WeightInfo = parse("weight_info", &bytes_of("weight_info", request).await?)?;
        if info.weight_version != version.to_string() {
            return Err(EngineError::Label {
                served: info.weight_version,
                expected: version,
            });
        }
        Ok(())
    }

    /// The caller bounds the time: an update may legitimately take long.
    async fn administer(
        &self,
        call: &'static str,
        path: &str,
        body: Option<&serde_json::Value>,
    ) -> Result<bytes::Bytes, EngineError> {
        let mut request = self.administration.post(format!("{}{path}", self.url));
        if let Some(body) = body {
            request = request.json(body);
        }
        bytes_of(call, request).await
    }
}

async fn bytes_of(
    call: &'static str,
    request: reqwest::RequestBuilder,
) -> Result<bytes::Bytes, EngineError> {
    let failed = |source| EngineError::Transport { call, source };
    let answer = request.send().await.map_err(failed)?;
    let status = answer.status();
    let bytes = answer.bytes().await.map_err(failed)?;
    if status.is_success() {
        return Ok(bytes);
    }
    Err(EngineError::Status {
        call,
        status: status.as_u16(),
        message: error_message(&bytes),
    })
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
mod tests {
    use super::*;

    #[test]
    fn urls_are_checked() {
        assert_eq!(
            parse_url("http://127.0.0.1:8000/").expect("is fine"),
            "http://127.0.0.1:8000"
        );
        assert!(
            parse_url("https://host:1")
                .expect_err("TLS")
                .contains("without TLS")
        );
        assert!(parse_url("host").is_err());
    }
}
