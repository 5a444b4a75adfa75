//! OpenAI's chat request: what is taken over, what is harmless, and what is refused because it would sample from
//! another distribution than the one the trainer assumes.

use crate::config::Sampling;
use crate::http::ApiError;
use primerl_render::{Message, RenderOptions};
use serde::Deserialize;
use serde_json::{Map, Value};

/// Fields without influence on what is sampled. `model`: the URL says which policy answers. `seed`: OpenAI promises
/// best effort only, and equal seeds would make the rollouts of a group equal.
const IGNORED: &[&str] = &[
    "model",
    "seed",
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
    "modalities",
    "return_tokens_as_token_ids",
    "request_id",
    "priority",
    "cache_salt",
    "include_reasoning",
    "skip_special_tokens",
    "spaces_between_special_tokens",
];

/// The request's fields. Unknown ones are looked at by name, so that each refusal names its field.
#[derive(Debug, Deserialize)]
struct Fields {
    messages: Vec<Message>,
    tools: Option<Vec<Value>>,
    chat_template_kwargs: Option<Map<String, Value>>,
    temperature: Option<f64>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<bool>,
    return_token_ids: Option<bool>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// A request that may be answered.
#[derive(Debug)]
pub(super) struct ChatRequest {
    pub messages: Vec<Message>,
    pub options: RenderOptions,
    pub temperature: f64,
    /// Longest answer, tokens, before the context is considered.
    pub max_tokens: u32,
    pub form: AnswerForm,
}

/// How the answer is to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AnswerForm {
    pub stream: bool,
    pub include_usage: bool,
    pub logprobs: bool,
    pub token_ids: bool,
}

impl ChatRequest {
    /// `sampling` is the rollout's own; a request may repeat it and shorten the answer, nothing else.
    pub fn parse(body: &[u8], sampling: &Sampling) -> Result<ChatRequest, ApiError> {
        let fields: Fields = serde_json::from_slice(body)
            .map_err(|error| ApiError::invalid(format!("the body is no chat request: {error}")))?;
        check_others(&fields.others)?;
        if fields.messages.is_empty() {
            return Err(ApiError::invalid("messages is empty").param("messages"));
        }
        if let Some(temperature) = fields.temperature
            && (temperature - sampling.temperature).abs() > 1e-6
        {
            let message = format!(
                "temperature is {temperature}, this rollout samples at {}; leave it out or ask for the same",
                sampling.temperature
            );
            return Err(ApiError::invalid(message).param("temperature"));
        }
        let asked = fields.max_completion_tokens.or(fields.max_tokens);
        if asked == Some(0) {
            return Err(ApiError::invalid("max_tokens must be at least 1").param("max_tokens"));
        }
        let tools = fields.tools.filter(|tools| !tools.is_empty());
        Ok(ChatRequest {
            messages: fields.messages,
            options: RenderOptions {
                tools,
                add_generation_prompt: true,
                template_kwargs: fields.chat_template_kwargs.unwrap_or_default(),
                ..RenderOptions::default()
            },
            temperature: sampling.temperature,
            max_tokens: asked.map_or(sampling.max_tokens, |asked| asked.min(sampling.max_tokens)),
            form: AnswerForm {
                stream: fields.stream.unwrap_or(false),
                include_usage: fields
                    .stream_options
                    .and_then(|options| options.include_usage)
                    .unwrap_or(false),
                logprobs: fields.logprobs.unwrap_or(false),
                token_ids: fields.return_token_ids.unwrap_or(false),
            },
        })
    }
}

fn check_others(others: &Map<String, Value>) -> Result<(), ApiError> {
    let refused = others.iter().find(|(name, value)| !is_neutral(name, value));
    match refused {
        None => Ok(()),
        Some((name, value)) => {
            let message = format!(
                "{name} = {value} is not supported: answers are sampled from the policy's own distribution, one at a time; leave it out"
            );
            Err(ApiError::invalid(message)
                .param(name.clone())
                .code("unsupported_parameter"))
        }
    }
}

/// Whether the field leaves sampling as it is.
fn is_neutral(name: &str, value: &Value) -> bool {
    let number = |neutral: f64| value.as_f64() == Some(neutral);
    match name {
        _ if value.is_null() || IGNORED.contains(&name) => true,
        "n" | "best_of" | "top_p" | "repetition_penalty" | "length_penalty" => number(1.0),
        "top_k" => value.as_f64().is_some_and(|top_k| top_k <= 0.0),
        "min_p" | "presence_penalty" | "frequency_penalty" | "min_tokens" | "top_logprobs" => {
            number(0.0)
        }
        "use_beam_search" | "ignore_eos" | "echo" | "continue_final_message" => value == false,
        "add_generation_prompt" => value == true,
        "stop" | "stop_token_ids" | "bad_words" | "functions" => {
            value.as_array().is_some_and(Vec::is_empty)
        }
        "logit_bias" => value.as_object().is_some_and(Map::is_empty),
        "tool_choice" => value == "auto" || value == "none",
        "response_format" => value["type"] == "text",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const SAMPLING: Sampling = Sampling {
        temperature: 1.0,
        max_tokens: 28,
    };

    fn parse(changes: Value) -> Result<ChatRequest, ApiError> {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in changes.as_object().expect("an object") {
            body[name] = value.clone();
        }
        ChatRequest::parse(body.to_string().as_bytes(), &SAMPLING)
    }

    #[test]
    fn the_answer_is_capped_by_the_rollout_and_by_the_request() {
        assert_eq!(parse(json!({})).expect("is fine").max_tokens, 28);
        assert_eq!(
            parse(json!({"max_tokens": 100}))
                .expect("is fine")
                .max_tokens,
            28
        );
        assert_eq!(
            parse(json!({"max_completion_tokens": 5}))
                .expect("is fine")
                .max_tokens,
            5
        );
        assert!(parse(json!({"max_tokens": 0})).is_err());
    }

    #[test]
    fn fields_that_change_the_distribution_are_named() {
        for (name, value) in [
            ("n", json!(2)),
            ("top_p", json!(0.9)),
            ("top_k", json!(5)),
            ("min_p", json!(0.1)),
            ("temperature", json!(0.7)),
            ("stop", json!(["\n"])),
            ("logit_bias", json!({"5": 1})),
            ("frequency_penalty", json!(0.5)),
            ("tool_choice", json!("required")),
            ("response_format", json!({"type": "json_object"})),
            ("guided_regex", json!("a+")),
            ("top_logprobs", json!(3)),
        ] {
            let error = parse(json!({name: value})).expect_err("is refused");
            assert_eq!(error.param.as_deref(), Some(name));
            assert_eq!(error.status, 400);
        }
    }

    #[test]
    fn neutral_and_harmless_fields_pass() {
        parse(json!({
            "n": 1, "top_p": 1, "top_k": -1, "min_p": 0.0, "temperature": 1.0, "stop": [], "logit_bias": {},
            "tool_choice": "auto", "response_format": {"type": "text"}, "user": "u", "seed": 3, "logprobs": true,
            "presence_penalty": null, "parallel_tool_calls": true, "stream_options": null
        }))
        .expect("is fine");
    }

    #[test]
    fn a_body_of_another_shape_is_explained() {
        assert!(
            parse(json!({"messages": []}))
                .expect_err("is refused")
                .message
                .contains("messages")
        );
        assert!(
            parse(json!({"messages": [{"content": "x"}]}))
                .expect_err("is refused")
                .message
                .contains("role")
        );
        assert!(ChatRequest::parse(b"{", &SAMPLING).is_err());
    }
}
