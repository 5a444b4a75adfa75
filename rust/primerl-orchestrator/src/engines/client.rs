//! One engine over HTTP: vLLM's surface, as much of it as a run needs. No state, no retries, no policy.

use primerl_core::turn::FinishReason;
use primerl_core::{PolicyVersion, VersionRun};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
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
    #[error("serves weights with digest {served}, the manifest says {expected}")]
    Digest { served: String, expected: String },
    #[error("labels its weights `{served}` after the update to version {expected}")]
    Label {
        served: String,
        expected: PolicyVersion,
    },
}

/// reqwest's own text leaves out the cause ("connection refused").
fn chain(error: &reqwest::Error) -> String {
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
    Ok(parsed.as_str().trim_end_matches('/').to_owned())
}

/// Body of `/inference/v1/generate`.
#[derive(Debug, Serialize)]
pub struct GenerateBody<'a> {
    pub request_id: &'a str,
    pub model: &'a str,
    pub token_ids: &'a [u32],
    pub sampling_params: SamplingParams<'a>,
    /// The policy version: a prefix computed by other weights must not be reused.
    pub cache_salt: String,
}

#[derive(Debug, Serialize)]
pub struct SamplingParams<'a> {
    pub temperature: f64,
    pub max_tokens: u32,
    /// 0: only the sampled token's.
    pub logprobs: u32,
    pub stop_token_ids: &'a [u32],
    pub detokenize: bool,
}

/// One sampled answer; `logprobs` and `versions` cover `token_ids` exactly.
#[derive(Clone, Debug, PartialEq)]
pub struct Generated {
    pub token_ids: Vec<u32>,
    /// Nats.
    pub logprobs: Vec<f32>,
    pub versions: Vec<VersionRun>,
    pub finish: FinishReason,
}

#[derive(Deserialize)]
struct GenerateAnswer {
    choices: Vec<Choice>,
}

#[derive(Deserialize)]
struct Choice {
    token_ids: Vec<u32>,
    finish_reason: Option<String>,
    logprobs: Option<Logprobs>,
    weight_versions: Option<Vec<VersionSpan>>,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Vec<TokenLogprob>,
}

#[derive(Deserialize)]
struct TokenLogprob {
    token_id: u32,
    logprob: f32,
}

#[derive(Deserialize)]
struct VersionSpan {
    version: String,
    start: usize,
    end: usize,
}

/// What vLLM reports where a log-probability is not finite.
const NOT_FINITE: f32 = -9999.0;

impl GenerateAnswer {
    fn check(self) -> Result<Generated, EngineError> {
        let malformed = |problem: String| EngineError::Malformed {
            call: "generate",
            problem,
        };
        let [choice] = <[Choice; 1]>::try_from(self.choices)
            .map_err(|choices| malformed(format!("{} choices instead of one", choices.len())))?;
        let content = choice
            .logprobs
            .map(|logprobs| logprobs.content)
            .unwrap_or_default();
        if content.len() != choice.token_ids.len()
            || content
                .iter()
                .zip(&choice.token_ids)
                .any(|(logprob, token)| logprob.token_id != *token)
        {
            return Err(malformed(
                "the log-probabilities are not those of the sampled tokens".into(),
            ));
        }
        let logprobs: Vec<f32> = content.iter().map(|token| token.logprob).collect();
        if logprobs
            .iter()
            .any(|logprob| !logprob.is_finite() || *logprob == NOT_FINITE)
        {
            return Err(malformed(
                "a sampled token has no finite log-probability".into(),
            ));
        }
        let versions = version_runs(
            choice.weight_versions.unwrap_or_default(),
            choice.token_ids.len(),
        )?;
        let tokens = choice.token_ids.len();
        let finish = match choice.finish_reason.as_deref() {
            // Nobody but the engine ended it: a part of an answer is no sample of the policy.
            Some("abort") | Some("error") => return Err(EngineError::Aborted { tokens }),
            _ if tokens == 0 => return Err(malformed("no token was sampled".into())),
            Some("stop") => FinishReason::Stop,
            Some("length") | Some("repetition") => FinishReason::Length,
            other => return Err(malformed(format!("finish_reason is {other:?}"))),
        };
        Ok(Generated {
            token_ids: choice.token_ids,
            logprobs,
            versions,
            finish,
        })
    }
}

fn version_runs(spans: Vec<VersionSpan>, tokens: usize) -> Result<Vec<VersionRun>, EngineError> {
    let mut covered = 0;
    let mut runs = Vec::with_capacity(spans.len());
    for span in spans {
        let Ok(version) = span.version.parse() else {
            return Err(EngineError::Unproved {
                label: span.version,
            });
        };
        if span.start != covered || span.end < span.start {
            break;
        }
        covered = span.end;
        if span.end > span.start {
            let n_tokens = (span.end - span.start) as u32;
            runs.push(VersionRun {
                version: PolicyVersion(version),
                n_tokens,
            });
        }
    }
    if covered != tokens {
        let problem = format!("weight_versions cover {covered} of {tokens} tokens");
        return Err(EngineError::Malformed {
            call: "generate",
            problem,
        });
    }
    Ok(runs)
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
        body: bytes::Bytes,
        timeout: Duration,
    ) -> Result<Generated, EngineError> {
        let request = self
            .requests
            .post(self.generate.clone())
            .header(reqwest::header::CONTENT_TYPE, "application/json")
            .timeout(timeout)
            .body(body);
        let bytes = bytes_of("generate", request).await?;
        let answer: GenerateAnswer = parse("generate", &bytes)?;
        answer.check()
    }

    pub async fn health(&self) -> Result<(), EngineError> {
        let request = self
            .requests
            .get(format!("{}/health", self.url))
            .timeout(PROBE_TIMEOUT);
        bytes_of("health", request).await.map(drop)
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
        self.administer("start_weight_update", "/start_weight_update", None)
            .await?;
        let update = serde_json::json!({"update_info": {"path": folder}});
        self.administer("update_weights", "/update_weights", Some(&update))
            .await?;
        let label = serde_json::json!({"weight_version": version.to_string()});
        self.administer(
            "finish_weight_update",
            "/finish_weight_update",
            Some(&label),
        )
        .await
        .map(drop)
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

fn parse<T: DeserializeOwned>(call: &'static str, bytes: &[u8]) -> Result<T, EngineError> {
    serde_json::from_slice(bytes).map_err(|error| EngineError::Malformed {
        call,
        problem: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(answer: serde_json::Value) -> Result<Generated, EngineError> {
        serde_json::from_value::<GenerateAnswer>(answer)
            .expect("is shaped like an answer")
            .check()
    }

    fn answer(versions: serde_json::Value) -> serde_json::Value {
        serde_json::json!({"choices": [{"index": 0, "finish_reason": "length", "token_ids": [5, 6, 7],
            "weight_versions": versions, "logprobs": {"content": [
                {"token_id": 5, "logprob": -1.0, "rank": 1}, {"token_id": 6, "logprob": -2.0, "rank": 1},
                {"token_id": 7, "logprob": -3.0, "rank": 1}]}}]})
    }

    #[test]
    fn versions_become_runs() {
        let spans = serde_json::json!([{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}]);
        let generated = check(answer(spans)).expect("is whole");
        let runs: Vec<_> = generated
            .versions
            .iter()
            .map(|run| (run.version.0, run.n_tokens))
            .collect();
        assert_eq!(runs, [(3, 1), (4, 2)]);
        assert_eq!(generated.logprobs, [-1.0, -2.0, -3.0]);
    }

    #[test]
    fn an_unproved_label_is_refused() {
        let spans = serde_json::json!([{"version": "default", "start": 0, "end": 3}]);
        assert!(
            matches!(check(answer(spans)), Err(EngineError::Unproved { label }) if label == "default")
        );
    }

    #[test]
    fn answers_that_do_not_account_for_every_token_are_refused() {
        let gap = serde_json::json!([{"version": "3", "start": 1, "end": 3}]);
        assert!(matches!(
            check(answer(gap)),
            Err(EngineError::Malformed { .. })
        ));
        assert!(matches!(
            check(answer(serde_json::json!(null))),
            Err(EngineError::Malformed { .. })
        ));
        let whole = serde_json::json!([{"version": "3", "start": 0, "end": 3}]);
        let mut other = answer(whole.clone());
        other["choices"][0]["logprobs"]["content"][1]["token_id"] = 9.into();
        assert!(matches!(check(other), Err(EngineError::Malformed { .. })));
        let mut infinite = answer(whole);
        infinite["choices"][0]["logprobs"]["content"][1]["logprob"] = (-9999.0).into();
        assert!(matches!(
            check(infinite),
            Err(EngineError::Malformed { .. })
        ));
    }

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
