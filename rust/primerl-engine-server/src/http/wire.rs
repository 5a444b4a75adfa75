//! Bodies of `/inference/v1/generate`. Unknown keys are ignored at both levels, `null` is the default, as in vLLM.

use super::error::ApiError;
use super::structured::Applied;
use crate::request::RequestedSampling;
use axum::http::{HeaderMap, header};
use primerl_grammar::Reasoning;
use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug, Deserialize)]
pub struct GenerateRequest {
    pub token_ids: Vec<i64>,
    pub sampling_params: SamplingBody,
    pub model: Option<String>,
    pub request_id: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub return_token_ids: Option<bool>,
    pub output_mode: Option<String>,
    pub cache_salt: Option<String>,
    pub priority: Option<i32>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct StreamOptions {
    pub include_usage: Option<bool>,
    pub continuous_usage_stats: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub struct SamplingBody {
    pub n: Option<u32>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<i64>,
    min_p: Option<f64>,
    pub seed: Option<i64>,
    pub max_tokens: Option<i64>,
    min_tokens: Option<i64>,
    pub stop_token_ids: Option<Vec<i64>>,
    pub ignore_eos: Option<bool>,
    pub logprobs: Option<i64>,
    prompt_logprobs: Option<i64>,
    routed_experts_prompt_start: Option<i64>,
    pub structured_outputs: Option<Value>,
    /// A reasoning block that comes before what is structured; vLLM's reasoning parsers see to it there.
    pub structured_reasoning: Option<Reasoning>,
    // What this engine cannot do: refused where given, because ignoring it would sample from another distribution.
    stop: Option<Value>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    repetition_penalty: Option<f64>,
    logit_bias: Option<Value>,
    allowed_token_ids: Option<Value>,
    bad_words: Option<Value>,
    logprob_token_ids: Option<Value>,
}

impl SamplingBody {
    pub fn requested(&self) -> RequestedSampling {
        let default = RequestedSampling::default();
        RequestedSampling {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_p: self.top_p.unwrap_or(default.top_p),
            top_k: self.top_k.unwrap_or(default.top_k),
            min_p: self.min_p.unwrap_or(default.min_p),
            seed: self.seed,
            max_tokens: self.max_tokens,
            min_tokens: self.min_tokens.unwrap_or(default.min_tokens),
            stop_token_ids: self.stop_token_ids.clone().unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(default.ignore_eos),
            logprobs: self.logprobs,
            prompt_logprobs: self.prompt_logprobs,
            routed_experts_prompt_start: self.routed_experts_prompt_start.unwrap_or(0),
        }
    }

    pub fn check_supported(&self) -> Result<(), ApiError> {
        match self.unsupported() {
            None => Ok(()),
            Some(name) => Err(unsupported(name)),
        }
    }

    fn unsupported(&self) -> Option<&'static str> {
        let given = |value: &Option<Value>| {
            value.as_ref().is_some_and(|value| match value {
                Value::Null => false,
                Value::Array(items) => !items.is_empty(),
                Value::Object(entries) => !entries.is_empty(),
                Value::String(text) => !text.is_empty(),
                _ => true,
            })
        };
        let not = |value: Option<f64>, neutral: f64| value.is_some_and(|value| value != neutral);
        [
            ("stop", given(&self.stop)),
            ("presence_penalty", not(self.presence_penalty, 0.0)),
            ("frequency_penalty", not(self.frequency_penalty, 0.0)),
            ("repetition_penalty", not(self.repetition_penalty, 1.0)),
            ("logit_bias", given(&self.logit_bias)),
            ("allowed_token_ids", given(&self.allowed_token_ids)),
            ("bad_words", given(&self.bad_words)),
            ("logprob_token_ids", given(&self.logprob_token_ids)),
        ]
        .into_iter()
        .find_map(|(name, is_given)| is_given.then_some(name))
    }
}

impl GenerateRequest {
    /// A plain request that was not made from a body of this route.
    pub fn of_ids(
        token_ids: Vec<i64>,
        sampling_params: SamplingBody,
        model: Option<String>,
        request_id: Option<String>,
    ) -> Self {
        GenerateRequest {
            token_ids,
            sampling_params,
            model,
            request_id,
            stream: None,
            stream_options: None,
            return_token_ids: None,
            output_mode: None,
            cache_salt: None,
            priority: None,
        }
    }

    pub fn parse(headers: &HeaderMap, body: &[u8]) -> Result<Self, ApiError> {
        check_content_type(headers)?;
        let request: GenerateRequest =
            serde_json::from_slice(body).map_err(|error| diagnose(body, &error))?;
        check_token_ids(&request.token_ids)?;
        if request
            .cache_salt
            .as_deref()
            .is_some_and(|salt| salt.is_empty() || salt.len() > 1024)
        {
            return Err(ApiError::body(
                "value_error",
                "body.cache_salt",
                "String should have 1 to 1024 characters",
            ));
        }
        check_output_mode(request.output_mode.as_deref())?;
        request.sampling_params.check_supported()?;
        Ok(request)
    }
}

fn check_token_ids(token_ids: &[i64]) -> Result<(), ApiError> {
    let (kind, message) = match token_ids {
        [] => ("too_short", "List should have at least 1 item"),
        _ if token_ids.iter().any(|&id| id < 0) => {
            ("greater_than_equal", "Token ids should be 0 or more")
        }
        _ => return Ok(()),
    };
    Err(ApiError::body(kind, "body.token_ids", message))
}

fn check_output_mode(mode: Option<&str>) -> Result<(), ApiError> {
    match mode {
        None | Some("tokens") => Ok(()),
        Some("text") => {
            let message = "output_mode=text is not supported by this engine: it has no tokenizer.";
            Err(ApiError::bad_request(message, Some("output_mode")))
        }
        Some(_) => Err(ApiError::body(
            "literal_error",
            "body.output_mode",
            "Input should be tokens or text",
        )),
    }
}

pub fn unsupported(name: &str) -> ApiError {
    let message = format!("{name} is not supported by this engine. Leave it out, or use vLLM.");
    ApiError::bad_request(message, Some(name))
}

/// A body is JSON unless the header says something else.
pub fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(given) = headers.get(header::CONTENT_TYPE) else {
        return Ok(());
    };
    let is_json = given
        .to_str()
        .is_ok_and(|text| text.to_ascii_lowercase().starts_with("application/json"));
    if is_json {
        Ok(())
    } else {
        Err(ApiError::body(
            "content_type",
            "header",
            "Content-Type should be application/json",
        ))
    }
}

/// Finds the field a typed parse stumbled over. Slow, and only for errors.
fn diagnose(body: &[u8], error: &serde_json::Error) -> ApiError {
    let fields = match serde_json::from_slice::<Value>(body) {
        Ok(Value::Object(fields)) => fields,
        Ok(_) => {
            let message = "Input should be a JSON object";
            return ApiError::body("model_attributes_type", "body", message);
        }
        Err(_) => {
            let message = format!("JSON decode error: {error}");
            return ApiError::body("json_invalid", "body", &message);
        }
    };
    for name in ["token_ids", "sampling_params"] {
        if !fields.contains_key(name) {
            return ApiError::body("missing", &format!("body.{name}"), "Field required");
        }
    }
    let ids = fields["token_ids"].as_array();
    if !ids.is_some_and(|ids| ids.iter().all(Value::is_i64)) {
        let message = "Input should be a list of integers";
        return ApiError::body("list_type", "body.token_ids", message);
    }
    diagnose_sampling(&fields["sampling_params"], error)
}

fn diagnose_sampling(sampling: &Value, error: &serde_json::Error) -> ApiError {
    let Value::Object(sampling) = sampling else {
        let message = "Input should be an object";
        return ApiError::body("dict_type", "body.sampling_params", message);
    };
    let culprit = sampling.iter().find(|(name, value)| {
        let alone = serde_json::json!({ name.as_str(): value });
        serde_json::from_value::<SamplingBody>(alone).is_err()
    });
    let place = match culprit {
        Some((name, _)) => format!("body.sampling_params.{name}"),
        None => "body".to_owned(),
    };
    ApiError::body("type_error", &place, &error.to_string())
}

#[derive(Debug, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub total_tokens: usize,
    pub completion_tokens: usize,
    pub prompt_tokens_details: CachedTokens,
    pub completion_tokens_details: Option<()>,
}

#[derive(Debug, Serialize)]
pub struct CachedTokens {
    pub cached_tokens: u32,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Usage {
            prompt_tokens,
            total_tokens: prompt_tokens + completion_tokens,
            completion_tokens,
            prompt_tokens_details: CachedTokens { cached_tokens: 0 },
            completion_tokens_details: None,
        }
    }
}

/// The answer of an unstreamed call. Fields that belong to features we do not have are `null`, as vLLM sends them.
#[derive(Debug, Serialize)]
pub struct GenerateResponse<'a> {
    pub request_id: &'a str,
    pub model: &'a str,
    pub created: u64,
    pub usage: Usage,
    pub prompt_logprobs: Option<Value>,
    pub prompt_token_id_logprobs: Option<()>,
    pub prompt_token_ids: Option<&'a [i64]>,
    pub mm_placeholders: Option<()>,
    pub metrics: Option<()>,
    pub kv_transfer_params: Option<()>,
    pub ec_transfer_params: Option<()>,
    pub output_mode: &'static str,
    pub choices: Vec<Choice<'a>>,
}

/// One `data:` line of a stream.
#[derive(Debug, Serialize)]
pub struct StreamChunk<'a> {
    pub request_id: &'a str,
    pub usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<&'a [i64]>,
    pub output_mode: &'static str,
    pub choices: Vec<Choice<'a>>,
}

#[derive(Debug, Serialize)]
pub struct Choice<'a> {
    pub index: u32,
    pub finish_reason: Option<&'static str>,
    pub stop_reason: Option<u32>,
    pub token_ids: Vec<u32>,
    /// Base64 of a NumPy file, with the last tokens.
    pub routed_experts: Option<String>,
    pub sampling_mask: Option<()>,
    pub weight_versions: Option<Vec<WireSpan<'a>>>,
    pub logprobs: Option<Logprobs>,
    /// What the log-probabilities of a structured answer are of; with its last tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grammar: Option<Applied>,
}

#[derive(Debug, Serialize)]
pub struct WireSpan<'a> {
    pub version: &'a str,
    pub start: u32,
    pub end: u32,
}

#[derive(Debug, Serialize)]
pub struct Logprobs {
    pub content: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize)]
pub struct TokenLogprob {
    #[serde(flatten)]
    pub own: Logprob,
    pub top_logprobs: Vec<Logprob>,
}

#[derive(Clone, Copy, Debug, Serialize)]
pub struct Logprob {
    pub token_id: u32,
    pub logprob: f32,
    pub rank: u32,
}
