//! `POST /v1/chat/completions` and `POST /tokenize`: messages in, rendered by the model's own template. Plain answers only.

use super::App;
use super::answer::NO_PROBABILITY;
use super::error::ApiError;
use super::generate::{json_response, submit};
use super::rendering::render;
use super::structured;
use super::wire::*;
use crate::backend::ScoredToken;
use crate::sequence::Completion;
use axum::Json;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use primerl_grammar::Reasoning;
use primerl_render::{AnswerContext, Message, RenderOptions, Renderer};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Fields of a body that were not taken yet. What is left at the end is how to sample; unknown keys are ignored, as in
/// vLLM.
struct Fields(Map<String, Value>);

impl Fields {
    fn parse(headers: &HeaderMap, body: &[u8]) -> Result<Self, ApiError> {
        check_content_type(headers)?;
        match serde_json::from_slice(body) {
            Ok(Value::Object(fields)) => Ok(Fields(fields)),
            Ok(_) => Err(ApiError::body(
                "model_attributes_type",
                "body",
                "Input should be a JSON object",
            )),
            Err(error) => {
                let message = format!("JSON decode error: {error}");
                Err(ApiError::body("json_invalid", "body", &message))
            }
        }
    }

    fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, ApiError> {
        let Some(value) = self.0.remove(name).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        serde_json::from_value(value).map(Some).map_err(|error| {
            ApiError::body("type_error", &format!("body.{name}"), &error.to_string())
        })
    }

    fn flag(&mut self, name: &str, default: bool) -> Result<bool, ApiError> {
        Ok(self.take(name)?.unwrap_or(default))
    }

    /// Refuses what would change the prompt or the answer, unless it is what this engine does anyway.
    fn refuse_unless(&mut self, name: &str, usual: &Value) -> Result<(), ApiError> {
        match self.take::<Value>(name)? {
            Some(value) if value != *usual => Err(unsupported(name)),
            _ => Ok(()),
        }
    }

    fn messages(&mut self) -> Result<Vec<Message>, ApiError> {
        match self.take::<Vec<Message>>("messages")? {
            Some(messages) if !messages.is_empty() => Ok(messages),
            Some(_) => Err(ApiError::body(
                "too_short",
                "body.messages",
                "List should have at least 1 item",
            )),
            None => Err(ApiError::body("missing", "body.messages", "Field required")),
        }
    }

    /// What the template is given besides the messages.
    fn options(&mut self) -> Result<RenderOptions, ApiError> {
        for name in ["chat_template", "documents", "mm_processor_kwargs"] {
            self.refuse_unless(name, &Value::Null)?;
        }
        self.refuse_unless("continue_final_message", &false.into())?;
        self.refuse_unless("add_special_tokens", &false.into())?;
        let tools: Option<Vec<Value>> = self.take("tools")?;
        Ok(RenderOptions {
            tools: tools.filter(|tools| !tools.is_empty()),
            add_generation_prompt: self.flag("add_generation_prompt", true)?,
            template_kwargs: self.take("chat_template_kwargs")?.unwrap_or_default(),
            ..RenderOptions::default()
        })
    }
}

/// How the answer is to look.
struct Form {
    /// `None`: no log-probabilities; else the number of alternatives, among which the sampled token counts as one.
    logprobs: Option<usize>,
    token_ids: bool,
    tokens_as_ids: bool,
    /// Whether tool calls are looked for.
    calls: bool,
    tools: Option<Vec<Value>>,
}

pub async fn completions(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let (mut fields, renderer) = begin(&app, &headers, &body).await?;
    let messages = fields.messages()?;
    let options = fields.options()?;
    let (form, mut sampling) = read_fields(&mut fields, &options)?;
    let request_id = fields.take("request_id")?;
    let ids = render(&renderer, messages, options).await?;
    check_fit(&app, ids.len(), &sampling)?;
    add_stops(&mut sampling, &renderer);
    sampling.structured_reasoning = renderer
        .reasoning_ahead(&ids)
        .map(|(open, close)| Reasoning {
            open,
            close: close.to_owned(),
        });
    let wire_ids = ids.iter().map(|id| i64::from(*id)).collect();
    let request = GenerateRequest::of_ids(wire_ids, sampling, None, request_id);
    let mut in_flight = submit(Arc::clone(&app), request).await?;
    let done = in_flight.completions().await?;
    // The engine's name of a request, under another prefix.
    let id = in_flight
        .request_id
        .replacen("generate-tokens-", "chatcmpl-", 1);
    let mut answer = answer(&app, &renderer, &form, &id, &ids, &done)?;
    if let Some(applied) = &in_flight.applied {
        answer["choices"][0]["grammar"] = json!(applied);
    }
    Ok(json_response(&answer))
}

/// The fields of a request to this model, and the model's renderer.
async fn begin(
    app: &App,
    headers: &HeaderMap,
    body: &Bytes,
) -> Result<(Fields, Arc<Renderer>), ApiError> {
    let mut fields = Fields::parse(headers, body)?;
    let served = &app.config.served_model_name;
    match fields.take::<String>("model")? {
        Some(name) if name != *served => Err(ApiError::unknown_model(&name, served)),
        _ => Ok((fields, app.rendering.renderer().await?)),
    }
}

fn read_fields(
    fields: &mut Fields,
    options: &RenderOptions,
) -> Result<(Form, SamplingBody), ApiError> {
    fields.refuse_unless("stream", &false.into())?;
    fields.refuse_unless("echo", &false.into())?;
    fields.refuse_unless("n", &1.into())?;
    let format = response_format(fields.take("response_format")?)?;
    let calls = may_call(fields.take("tool_choice")?)?;
    let logprobs = fields.flag("logprobs", false)?;
    let top = fields.take::<u32>("top_logprobs")?.unwrap_or(0);
    if top > 0 && !logprobs {
        let message = "when using `top_logprobs`, `logprobs` must be set to true.";
        return Err(ApiError::bad_request(message, Some("top_logprobs")));
    }
    let form = Form {
        logprobs: logprobs.then_some(top as usize),
        token_ids: fields.flag("return_token_ids", false)?,
        tokens_as_ids: fields.flag("return_tokens_as_token_ids", false)?,
        calls,
        tools: options.tools.clone(),
    };
    let longest: Option<i64> = fields.take("max_completion_tokens")?;
    if let Some(longest) = longest {
        fields.0.insert("max_tokens".into(), longest.into());
    }
    if logprobs {
        fields.0.insert("logprobs".into(), top.into());
    }
    if let Some(format) = format {
        fields.0.insert(structured::PARAMETER.into(), format);
    }
    Ok((form, sampling_of(fields)?))
}

/// What is left of the fields.
fn sampling_of(fields: &Fields) -> Result<SamplingBody, ApiError> {
    let sampling: SamplingBody = serde_json::from_value(Value::Object(fields.0.clone()))
        .map_err(|error| ApiError::body("type_error", "body", &error.to_string()))?;
    sampling.check_supported()?;
    Ok(sampling)
}

/// Whether tool calls of the answer are returned as such.
fn may_call(choice: Option<Value>) -> Result<bool, ApiError> {
    match choice {
        None => Ok(true),
        Some(choice) if choice == "auto" => Ok(true),
        Some(choice) if choice == "none" => Ok(false),
        Some(_) => Err(unsupported("tool_choice")),
    }
}

/// OpenAI's field as vLLM's parameter.
fn response_format(format: Option<Value>) -> Result<Option<Value>, ApiError> {
    let Some(format) = format else {
        return Ok(None);
    };
    let schema = &format["json_schema"]["schema"];
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(json!({"json_object": true}))),
        Some("json_schema") if schema.is_object() => Ok(Some(json!({"json": schema}))),
        _ => Err(unsupported("response_format")),
    }
}

/// Unlike `/inference/v1/generate`, the chat route refuses an answer that may not fit.
fn check_fit(app: &App, prompt: usize, sampling: &SamplingBody) -> Result<(), ApiError> {
    let limit = app.config.max_model_len as usize;
    if prompt >= limit {
        let message = format!(
            "This model's maximum context length is {limit} tokens. However, your prompt contains {prompt} tokens. Please \
             reduce the length of the input messages."
        );
        return Err(ApiError::bad_request(message, Some("input_tokens")));
    }
    if let Some(asked) = sampling.max_tokens
        && asked > (limit - prompt) as i64
    {
        let message = format!(
            "'max_tokens' or 'max_completion_tokens' is too large: {asked}. This model's maximum context length is \
             {limit} tokens and your request has {prompt} input tokens."
        );
        return Err(ApiError::bad_request(message, Some("max_tokens")));
    }
    Ok(())
}

/// What ends an answer in the template need not be the model's end of sequence.
fn add_stops(sampling: &mut SamplingBody, renderer: &Renderer) {
    if sampling.ignore_eos != Some(true) {
        let stops = renderer.stop_token_ids().iter().map(|id| i64::from(*id));
        let own = sampling.stop_token_ids.get_or_insert_default();
        own.extend(stops);
    }
}

fn answer(
    app: &App,
    renderer: &Renderer,
    form: &Form,
    id: &str,
    prompt: &[u32],
    done: &[Completion],
) -> Result<Value, ApiError> {
    let sampled: usize = done.iter().map(|completion| completion.tokens.len()).sum();
    let choices: Result<Vec<Value>, ApiError> = done
        .iter()
        .enumerate()
        .map(|(index, completion)| choice(renderer, form, prompt, index, completion))
        .collect();
    Ok(json!({
        "id": id, "object": "chat.completion", "created": app.created(),
        "model": app.config.served_model_name, "choices": choices?, "service_tier": null,
        "system_fingerprint": null, "usage": Usage::new(prompt.len(), sampled), "prompt_logprobs": null,
        "prompt_token_ids": form.token_ids.then_some(prompt), "kv_transfer_params": null,
    }))
}

/// The message of choice `index`, whose calls are named.
fn message(
    renderer: &Renderer,
    form: &Form,
    prompt: &[u32],
    index: usize,
    ids: &[u32],
) -> Result<Message, ApiError> {
    let context = AnswerContext {
        tools: form.tools.as_deref().filter(|_| form.calls),
        starts_in_reasoning: renderer.starts_in_reasoning(prompt),
    };
    let parsed = renderer.parse_answer(ids, &context);
    let mut message = parsed
        .map_err(|error| ApiError::internal(format!("cannot decode the answer: {error}")))?
        .message;
    for (number, call) in message.tool_calls.iter_mut().flatten().enumerate() {
        call.id
            .get_or_insert_with(|| format!("chatcmpl-tool-{index}-{number}"));
        call.kind.get_or_insert_with(|| "function".into());
    }
    Ok(message)
}

fn choice(
    renderer: &Renderer,
    form: &Form,
    prompt: &[u32],
    index: usize,
    completion: &Completion,
) -> Result<Value, ApiError> {
    let ids = completion.tokens.iter().map(|token| token.token_id);
    let ids: Vec<u32> = ids.collect();
    let message = message(renderer, form, prompt, index, &ids)?;
    let finish = match completion.finish.as_str() {
        "stop" if message.has_tool_calls() => "tool_calls",
        finish => finish,
    };
    let logprobs = form.logprobs.map(|top| {
        let tokens = completion.tokens.iter();
        let content = tokens.map(|token| token_logprob(renderer, form, top, token));
        json!({"content": content.collect::<Vec<Value>>()})
    });
    Ok(json!({
        "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish,
        "stop_reason": completion.stop_token, "token_ids": form.token_ids.then_some(ids),
    }))
}

fn token_logprob(renderer: &Renderer, form: &Form, top: usize, token: &ScoredToken) -> Value {
    let entry = |id: u32, logprob: f32| {
        let logprob = match logprob.is_finite() {
            true => logprob,
            false => NO_PROBABILITY,
        };
        let bytes = renderer.tokenizer().token_bytes(id);
        let text = match form.tokens_as_ids {
            true => format!("token_id:{id}"),
            false => String::from_utf8_lossy(&bytes).into_owned(),
        };
        json!({"token": text, "logprob": logprob, "bytes": bytes})
    };
    let others = token
        .top
        .iter()
        .filter(|other| other.token_id != token.token_id);
    let others = others.map(|other| entry(other.token_id, other.logprob));
    // The sampled token comes first, and counts as one of them.
    let own = std::iter::once(entry(token.token_id, token.logprob));
    let shown: Vec<Value> = own.chain(others).take(top).collect();
    let mut value = entry(token.token_id, token.logprob);
    value["top_logprobs"] = shown.into();
    value
}

fn encode(renderer: &Renderer, text: &str) -> Result<Vec<u32>, ApiError> {
    let ids = renderer.tokenizer().encode(text);
    ids.map_err(|error| ApiError::bad_request(error.to_string(), Some("prompt")))
}

/// The ids that the chat route would give the model.
pub async fn tokenize(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, ApiError> {
    let (mut fields, renderer) = begin(&app, &headers, &body).await?;
    let with_texts = fields.flag("return_token_strs", false)?;
    let ids = match fields.take::<String>("prompt")? {
        Some(text) => encode(&renderer, &text)?,
        None => {
            let messages = fields.messages()?;
            let options = fields.options()?;
            render(&renderer, messages, options).await?
        }
    };
    let text =
        |id: &u32| String::from_utf8_lossy(&renderer.tokenizer().token_bytes(*id)).into_owned();
    let texts: Option<Vec<String>> = with_texts.then(|| ids.iter().map(text).collect());
    let answer = json!({
        "count": ids.len(), "max_model_len": app.config.max_model_len, "tokens": ids, "token_strs": texts,
    });
    Ok(Json(answer).into_response())
}
