//! Prompts for rollouts that another server answers, with text, and what may be asked of it. `turn::text_only` gets the
//! answer.

use super::messages::chat_messages;
use crate::prompt::{Prompt, Resolved};
use crate::request::{Incoming, TurnRequest};
use crate::rollouts::Rollout;
use primerl_core::conversation::Plan;
use primerl_engines::clients::Endpoint;
use primerl_service::http::ApiError;
use serde_json::{Value, json};
use std::sync::Arc;

/// A prompt without ids: the gateway does not know them.
pub(crate) fn prompt(
    session: &Arc<str>,
    messages: &[Incoming],
    resolved: &Resolved,
) -> Result<Prompt, ApiError> {
    let (parent, fork) = match resolved.planned.plan {
        Plan::Extend { parent, .. } => (Some(parent), None),
        Plan::Fork { reason } => (None, Some(reason)),
    };
    Ok(Prompt {
        parent,
        fork,
        resident: None,
        chat: Some(Arc::new(chat_messages(messages, &resolved.options)?)),
        ..resolved.prompt(session)
    })
}

/// Refuses what such a server does not support, or what OpenAI's API has no field for.
pub(crate) fn check(rollout: &Rollout, request: &TurnRequest) -> Result<(), ApiError> {
    let endpoint = rollout.endpoint.as_deref();
    check_for(endpoint.map_or("", Endpoint::name), request)
}

fn check_for(name: &str, request: &TurnRequest) -> Result<(), ApiError> {
    let sampling = &request.sampling;
    let truncation = json!(sampling.truncation);
    let given = |name: &str| !truncation[name].is_null();
    let impossible = [
        ("logprobs", sampling.logprobs.is_some()),
        ("top_k", given("top_k")),
        ("min_p", given("min_p")),
    ];
    match impossible.iter().find(|(_, given)| *given) {
        None => response_format(name, sampling.structured_outputs.as_ref()).map(drop),
        Some((field, _)) => {
            let message = format!(
                "{field} is not supported by the chat completions server that answers here ({name}); omit it"
            );
            Err(ApiError::invalid(message)
                .param(*field)
                .code("unsupported_parameter"))
        }
    }
}

/// OpenAI's field for the value that vLLM has a parameter for.
pub(crate) fn response_format(
    name: &str,
    outputs: Option<&Value>,
) -> Result<Option<Value>, ApiError> {
    let Some(outputs) = outputs else {
        return Ok(None);
    };
    if outputs["json_object"] == true {
        return Ok(Some(json!({"type": "json_object"})));
    }
    if outputs["json"].is_object() {
        let schema = json!({"name": "answer", "schema": outputs["json"]});
        return Ok(Some(json!({"type": "json_schema", "json_schema": schema})));
    }
    let message = format!(
        "structured_outputs of this kind are not known to the server of OpenAI's chat completions that answers here \
         ({name}); use response_format"
    );
    Err(ApiError::invalid(message)
        .param("structured_outputs")
        .code("unsupported_parameter"))
}

#[cfg(test)]
mod tests;
