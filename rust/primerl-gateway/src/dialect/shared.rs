//! Readers that the OpenAI dialects have in common.

use crate::fields::{Fields, unsupported};
use crate::sampling::{Demanded, structured_outputs};
use primerl_service::http::ApiError;
use serde_json::{Map, Value, json};

/// Fields that do not affect what is sampled. `model`: the URL decides which policy answers. `seed`: OpenAI promises
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

/// Whether the field leaves the answer unchanged.
pub(super) fn is_neutral(name: &str, value: &Value) -> bool {
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

/// `tool_choice`: whether the template gets the tools, and which call the model must make.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ToolChoice {
    pub told: bool,
    pub demanded: Option<Demanded>,
}

impl ToolChoice {
    /// Reads a tool's name from a `function` object, as in chat, or from next to the type, as in responses.
    pub(super) fn read(fields: &mut Fields) -> Result<ToolChoice, ApiError> {
        let Some(choice) = fields.take("tool_choice") else {
            return Ok(ToolChoice::of(true, None));
        };
        match &choice {
            Value::String(word) if word == "auto" => Ok(ToolChoice::of(true, None)),
            Value::String(word) if word == "none" => Ok(ToolChoice::of(false, None)),
            Value::String(word) if word == "required" => {
                Ok(ToolChoice::of(true, Some(Demanded::Any)))
            }
            Value::Object(named) if named.get("type") == Some(&json!("function")) => {
                let name = choice["function"]["name"]
                    .as_str()
                    .or(choice["name"].as_str());
                let name = name.ok_or_else(|| unsupported("tool_choice", &choice))?;
                let demanded = Demanded::Tool(name.to_owned());
                Ok(ToolChoice::of(true, Some(demanded)))
            }
            _ => Err(unsupported("tool_choice", &choice)),
        }
    }

    fn of(told: bool, demanded: Option<Demanded>) -> ToolChoice {
        ToolChoice { told, demanded }
    }
}

/// OpenAI's `response_format` and vLLM's `structured_outputs`.
pub(super) fn structured_fields(fields: &mut Fields) -> Result<Option<Value>, ApiError> {
    let format = fields.map("response_format")?;
    let own = fields.take("structured_outputs");
    let format = match &format {
        Some(format) => structured_outputs("response_format", format)?,
        None => None,
    };
    Ok(own.or(format))
}
