//! Endpoints that count tokens without an answer: Anthropic's count for a request, and vLLM's conversion of text or
//! messages to tokens and back.
//!
//! For a rollout, the count is that of the prompt that the engine would get for the request as the next turn. Without a
//! rollout, it is that of the request rendered alone.

use super::Gateway;
use super::dialect::Dialect;
use super::dialect::messages::{self, Messages};
use super::endpoints::compute;
use super::fields::{Fields, missing, shown};
use super::headers::session_of;
use super::prompt;
use super::request::Incoming;
use super::rollouts::Rollout;
use crate::Sampling;
use crate::Service;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::Response;
use bytes::Bytes;
use primerl_render::{Message, RenderError, RenderOptions, Renderer};
use primerl_service::http::{ApiError, JSON, RawBody, encoded};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// `POST messages/count_tokens`.
pub(crate) async fn count_tokens(
    State(service): State<Arc<Service>>,
    rollout: Option<Path<String>>,
    headers: HeaderMap,
    body: Result<RawBody, ApiError>,
) -> Response {
    let counted = async {
        let RawBody(body) = body?;
        let rollout = find(&service, rollout)?;
        let session = session_of(&headers)?;
        let (service, size) = (Arc::clone(&service), body.len());
        let count = move || prompt_tokens(&service.gateway, rollout.as_deref(), &session, &body);
        compute(size, count).await
    };
    match counted.await {
        Ok(count) => encoded(JSON, json!({"input_tokens": count}).to_string()),
        Err(error) => Messages.refusal(&error),
    }
}

fn prompt_tokens(
    gateway: &Gateway,
    rollout: Option<&Rollout>,
    session: &Arc<str>,
    body: &Bytes,
) -> Result<usize, ApiError> {
    let input = messages::read_input(body, rollout.map(|rollout| &rollout.sampling))?;
    match rollout {
        Some(rollout) => {
            let prompt = prompt::prepare(&gateway.renderer, rollout, session, &input)?;
            Ok(prompt.ids().len())
        }
        None => Ok(prompt::whole(&gateway.renderer, &input)?.len()),
    }
}

/// `POST tokenize`.
pub(crate) async fn tokenize(
    State(service): State<Arc<Service>>,
    rollout: Option<Path<String>>,
    RawBody(body): RawBody,
) -> Result<Response, ApiError> {
    let rollout = find(&service, rollout)?;
    let evaluation = rollout.as_deref().is_some_and(|rollout| rollout.evaluation);
    let max_model_len = service.context_limit(evaluation);
    let size = body.len();
    let tokens = move || {
        let sampling = rollout.as_deref().map(|rollout| &rollout.sampling);
        let fields = Fields::read(&body, "JSON object")?;
        let (ids, texts) = tokens_of(&service.gateway, fields, sampling)?;
        let answer = json!({
            "count": ids.len(), "max_model_len": max_model_len, "tokens": ids, "token_strs": texts,
        });
        Ok(answer.to_string())
    };
    Ok(encoded(JSON, compute(size, tokens).await?))
}

/// `POST detokenize`.
pub(crate) async fn detokenize(
    State(service): State<Arc<Service>>,
    rollout: Option<Path<String>>,
    RawBody(body): RawBody,
) -> Result<Response, ApiError> {
    find(&service, rollout)?;
    let size = body.len();
    let text = move || text_of(&service.gateway, Fields::read(&body, "JSON object")?);
    let text = compute(size, text).await?;
    Ok(encoded(JSON, json!({"prompt": text}).to_string()))
}

fn find(
    service: &Service,
    rollout: Option<Path<String>>,
) -> Result<Option<Arc<Rollout>>, ApiError> {
    let find = |Path(rollout): Path<String>| service.gateway.rollouts.find(&rollout);
    rollout.map(find).transpose()
}

/// The ids, and the text of each id if the client asked for it.
fn tokens_of(
    gateway: &Gateway,
    mut fields: Fields,
    sampling: Option<&Sampling>,
) -> Result<(Vec<u32>, Option<Vec<String>>), ApiError> {
    let with_texts = fields.flag("return_token_strs")?.unwrap_or(false);
    let (param, ids) = read_ids(gateway, &mut fields, sampling)?;
    fields.end(|name, value| match name {
        "model" => true,
        // Prompts are sent to engines as written: nothing is prepended.
        "add_special_tokens" | "continue_final_message" => value == false,
        "mm_processor_kwargs" => value.as_object().is_some_and(Map::is_empty),
        _ => false,
    })?;
    let ids = ids.map_err(|error| match prompt::refuse(error) {
        refusal if refusal.param.as_deref() == Some("messages") => refusal.param(param),
        refusal => refusal,
    })?;
    let tokenizer = gateway.renderer.tokenizer();
    let text = |id: &u32| String::from_utf8_lossy(&tokenizer.token_bytes(*id)).into_owned();
    let texts = with_texts.then(|| ids.iter().map(text).collect());
    Ok((ids, texts))
}

/// The ids of the text or the messages, and the field that holds them.
fn read_ids(
    gateway: &Gateway,
    fields: &mut Fields,
    sampling: Option<&Sampling>,
) -> Result<(&'static str, Result<Vec<u32>, RenderError>), ApiError> {
    let renderer = &gateway.renderer;
    match (fields.text("prompt")?, fields.list("messages")?) {
        (Some(text), None) => Ok(("prompt", renderer.tokenizer().encode(&text))),
        (None, Some(messages)) => {
            let messages = read_messages(renderer, messages)?;
            let options = render_options(fields, sampling)?;
            let checked = renderer.check_tools(&options);
            let ids = checked.and_then(|()| renderer.render(&messages, &options));
            Ok(("messages", ids))
        }
        (None, None) => Err(missing("prompt")),
        (Some(_), Some(_)) => {
            let problem = "prompt and messages are both given; omit one of the two";
            Err(ApiError::invalid(problem).param("prompt"))
        }
    }
}

fn read_messages(renderer: &Renderer, messages: Vec<Value>) -> Result<Vec<Message>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid("messages is empty").param("messages"));
    }
    let read = |(index, message): (usize, Value)| {
        let message = Incoming::raw(message.to_string().into());
        let message = message.read(index)?.into_owned();
        let renderable = renderer.renderable(message, index);
        renderable.map_err(prompt::refuse)
    };
    messages.into_iter().enumerate().map(read).collect()
}

fn render_options(
    fields: &mut Fields,
    sampling: Option<&Sampling>,
) -> Result<RenderOptions, ApiError> {
    let mut template_kwargs = fields.map("chat_template_kwargs")?.unwrap_or_default();
    if let Some(sampling) = sampling {
        sampling.add_template_kwargs(&mut template_kwargs);
    }
    Ok(RenderOptions {
        tools: fields.list("tools")?.filter(|tools| !tools.is_empty()),
        add_generation_prompt: fields.flag("add_generation_prompt")?.unwrap_or(true),
        template_kwargs,
        documents: fields.list("documents")?,
        ..RenderOptions::default()
    })
}

fn text_of(gateway: &Gateway, mut fields: Fields) -> Result<String, ApiError> {
    let tokens = fields.list("tokens")?.ok_or_else(|| missing("tokens"))?;
    fields.end(|name, _| name == "model")?;
    let tokenizer = gateway.renderer.tokenizer();
    // Models may compute more ids than they have tokens, and a model folder may not say how many.
    let size = gateway.renderer.vocabulary_size().unwrap_or(0);
    let is_known = |id: &u32| *id < size || !tokenizer.token_bytes(*id).is_empty();
    let id = |token: &Value| {
        let id = token.as_u64().and_then(|id| u32::try_from(id).ok());
        id.filter(is_known).ok_or_else(|| {
            let problem = format!("tokens: {} is not a token of the model", shown(token));
            ApiError::invalid(problem).param("tokens")
        })
    };
    let ids: Vec<u32> = tokens.iter().map(id).collect::<Result<_, _>>()?;
    let text = tokenizer.decode(&ids, false);
    text.map_err(|error| ApiError::invalid(error.to_string()).param("tokens"))
}
