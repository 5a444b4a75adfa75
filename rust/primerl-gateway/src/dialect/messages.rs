//! Anthropic's Messages API.

mod blocks;
mod options;
mod reply;

use super::{Asked, Dialect, ReadRequest};
use crate::Sampling;
use crate::answer::Reply;
use crate::fields::{Fields, missing, unsupported, within};
use crate::request::{Incoming, IncomingOptions, Input, Options, Parse, TurnRequest};
use crate::sampling::{Rules, TurnSampling};
use axum::response::Response;
use bytes::Bytes;
use options::{Thinking, ToolChoice};
use primerl_render::Message;
use primerl_service::http::ApiError;
use reply::Form;
use reply::refusal;
use serde_json::{Value, json};
use std::sync::Arc;

/// Fields that do not affect what is sampled. `model`: the URL decides which policy answers. `diagnostics`: asks why a
/// prompt was not cached, and no divergence is reported.
const IGNORED: &[&str] = &[
    "model",
    "metadata",
    "service_tier",
    "cache_control",
    "diagnostics",
    "inference_geo",
    "speed",
    "user_profile_id",
    "workspace_id",
];

/// Sampling fields, which do not affect a token count.
const SAMPLING: &[&str] = &[
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "stop_sequences",
    "stream",
    "output_config",
    "output_format",
];

pub(crate) struct Messages;

impl Dialect for Messages {
    fn name(&self) -> &'static str {
        "Messages"
    }

    fn path(&self) -> &'static str {
        "messages"
    }

    fn read(&self, asked: &Asked<'_>) -> Result<ReadRequest, ApiError> {
        read(asked.body, &asked.rollout.rules(), asked.digest)
    }

    fn refusal(&self, error: &ApiError) -> Response {
        refusal(error)
    }
}

pub(super) fn read(
    bytes: &Bytes,
    rules: &Rules<'_>,
    digest: u128,
) -> Result<(TurnRequest, Box<dyn Reply>), ApiError> {
    let mut fields = Fields::read(bytes, "messages request")?;
    let prompt = Prompt::read(&mut fields, Some(rules.sampling))?;
    if prompt.ends_with_an_answer {
        return Err(no_prefill());
    }
    if fields.take("thread").is_some() {
        return Err(no_threads());
    }
    let mut sampling = sampling(&mut fields, rules)?;
    sampling.demanded = prompt.choice.demanded.clone();
    prompt.thinking.check_budget(sampling.max_tokens)?;
    let form = Form {
        stream: fields.flag("stream")?.unwrap_or(false),
        omit_thinking: prompt.thinking.omitted,
    };
    fields.end(is_neutral)?;
    let request = TurnRequest {
        input: prompt.input,
        sampling,
        choices: 1,
        parse: Parse::Message {
            one_call: prompt.choice.one_call,
        },
        digest,
    };
    Ok((request, Box::new(form)))
}

fn no_prefill() -> ApiError {
    let problem = "messages end with an assistant message; prefill is not supported here, end with a user message";
    ApiError::invalid(problem)
        .param("messages")
        .code("unsupported_parameter")
}

/// The SDK's tool runner asks for a thread by default, and continues without one when it gets this code.
fn no_threads() -> ApiError {
    let problem = "thread is not supported here; omit it and send the whole conversation, which is recognised";
    ApiError::invalid(problem)
        .param("thread")
        .code(reply::NO_THREADS)
}

/// The prompt of a request whose tokens are counted without an answer. Fields that only affect the answer are accepted:
/// clients count the tokens of the request that they are about to send. `sampling` is that of its rollout, if it has
/// one.
pub(crate) fn read_input(bytes: &Bytes, sampling: Option<&Sampling>) -> Result<Input, ApiError> {
    let mut fields = Fields::read(bytes, "messages request")?;
    let prompt = Prompt::read(&mut fields, sampling)?;
    fields.end(|name, value| SAMPLING.contains(&name) || is_neutral(name, value))?;
    Ok(prompt.input)
}

/// The fields that the prompt is made of.
struct Prompt {
    input: Input,
    thinking: Thinking,
    choice: ToolChoice,
    ends_with_an_answer: bool,
}

impl Prompt {
    fn read(fields: &mut Fields, sampling: Option<&Sampling>) -> Result<Prompt, ApiError> {
        let messages = fields.list("messages")?.unwrap_or_default();
        if messages.is_empty() {
            return Err(ApiError::invalid("messages is missing or empty").param("messages"));
        }
        let messages = blocks::read(fields.take("system"), messages)?;
        let choice = ToolChoice::read(fields.take("tool_choice"))?;
        let tools = options::tools(fields.list("tools")?.unwrap_or_default())?;
        let thinking = Thinking::read(fields.take("thinking"))?;
        let mut template_kwargs = fields.map("chat_template_kwargs")?.unwrap_or_default();
        thinking.switch(&mut template_kwargs)?;
        if let Some(sampling) = sampling {
            sampling.add_template_kwargs(&mut template_kwargs);
        }
        let options = Options::new(Some(tools).filter(|_| choice.told), template_kwargs);
        Ok(Prompt {
            ends_with_an_answer: messages.last().is_some_and(|last| last.is_assistant()),
            input: input_of(messages, options),
            thinking,
            choice,
        })
    }
}

fn input_of(messages: Vec<Message>, options: Options) -> Input {
    let incoming = |message| Incoming::Read(Box::new(message));
    Input::Messages {
        recurring: None,
        messages: messages.into_iter().map(incoming).collect(),
        options: IncomingOptions::Read(Arc::new(options)),
    }
}

fn sampling(fields: &mut Fields, rules: &Rules<'_>) -> Result<TurnSampling, ApiError> {
    let max_tokens = fields.count("max_tokens")?;
    let max_tokens = max_tokens.ok_or_else(|| missing("max_tokens"))?;
    let stop = fields.texts("stop_sequences")?;
    let sampling = rules.read(fields, Some(max_tokens), stop);
    let mut sampling = sampling.map_err(|error| match error.param.as_deref() {
        Some("stop") => ApiError {
            message: format!("stop_sequences: {}", error.message),
            ..error.param("stop_sequences")
        },
        _ => error,
    })?;
    if let Some(config) = fields.take("output_config") {
        let format = output_config(config).map_err(|error| within("output_config", error))?;
        sampling.structured_outputs = structured("output_config.format", format)?;
    }
    // The field's name while it was in beta.
    if let Some(format) = fields.take("output_format") {
        sampling.structured_outputs = structured("output_format", Some(format))?;
    }
    Ok(sampling)
}

/// The format that the answer must have, if any.
fn output_config(config: Value) -> Result<Option<Value>, ApiError> {
    let mut config = Fields::of(config)?;
    let format = config.take("format");
    // High is the default.
    config.end(|name, value| name == "effort" && value == "high")?;
    Ok(format)
}

fn structured(name: &str, format: Option<Value>) -> Result<Option<Value>, ApiError> {
    let Some(format) = format else {
        return Ok(None);
    };
    let schema = match (&format["type"], &format["schema"]) {
        (Value::String(kind), schema @ Value::Object(_)) if kind == "json_schema" => schema,
        _ => return Err(unsupported(name, &format)),
    };
    Ok(Some(json!({"json": schema})))
}

/// Whether the field leaves the answer unchanged.
fn is_neutral(name: &str, value: &Value) -> bool {
    match name {
        _ if IGNORED.contains(&name) => true,
        "mcp_servers" => value.as_array().is_some_and(Vec::is_empty),
        "context_management" => keeps_all(value),
        _ => false,
    }
}

/// Whether edits of the history leave it unchanged: the model sees what is sent.
fn keeps_all(management: &Value) -> bool {
    let Some(management) = management.as_object() else {
        return false;
    };
    let is_idle = |edit: &Value| {
        let kind = edit["type"].as_str().unwrap_or_default();
        kind.starts_with("clear_thinking") && edit["keep"] == "all"
    };
    let edits = |value: &Value| value.as_array().is_some_and(|all| all.iter().all(is_idle));
    management
        .iter()
        .all(|(name, value)| name == "edits" && edits(value))
}

#[cfg(test)]
mod tests;
