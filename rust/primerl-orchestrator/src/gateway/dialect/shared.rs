//! What the OpenAI dialects read alike.

use crate::gateway::fields::{Fields, unsupported};
use crate::gateway::sampling::{Rules, structured_outputs};
use crate::http::ApiError;
use serde_json::{Map, Value, json};

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
    "request_id",
    "priority",
    "cache_salt",
    "spaces_between_special_tokens",
];

/// Whether the field leaves the answer as it is.
pub fn is_neutral(name: &str, value: &Value) -> bool {
    let number = |neutral: f64| value.as_f64() == Some(neutral);
    match name {
        _ if IGNORED.contains(&name) => true,
        "best_of" | "repetition_penalty" | "length_penalty" => number(1.0),
        "presence_penalty" | "frequency_penalty" | "min_tokens" => number(0.0),
        "use_beam_search" | "ignore_eos" | "echo" | "continue_final_message" => value == false,
        "add_generation_prompt" | "skip_special_tokens" | "include_reasoning" => value == true,
        "modalities" => value == &json!(["text"]),
        "reasoning_effort" | "verbosity" => false,
        "stop_token_ids" | "bad_words" | "functions" => value.as_array().is_some_and(Vec::is_empty),
        "logit_bias" => value.as_object().is_some_and(Map::is_empty),
        _ => false,
    }
}

/// Whether the model is told of the tools. That it must call one cannot be promised without changing what it samples.
pub fn tools_wanted(fields: &mut Fields) -> Result<bool, ApiError> {
    match fields.take("tool_choice") {
        None => Ok(true),
        Some(Value::String(choice)) if choice == "auto" => Ok(true),
        Some(Value::String(choice)) if choice == "none" => Ok(false),
        Some(other) => Err(unsupported("tool_choice", &other)),
    }
}

/// OpenAI's `response_format` and vLLM's `structured_outputs`.
pub fn structured_fields(
    fields: &mut Fields,
    rules: &Rules<'_>,
) -> Result<Option<Value>, ApiError> {
    let format = fields.map("response_format")?;
    let own = fields.take("structured_outputs");
    let format = match &format {
        Some(format) => structured_outputs("response_format", format)?,
        None => None,
    };
    let format = rules.structured("response_format", format)?;
    Ok(rules.structured("structured_outputs", own)?.or(format))
}
