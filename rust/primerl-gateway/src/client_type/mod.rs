//! Requests whose messages another process renders: the engine, which reports the ids it made of them, or a server that
//! returns text only.

mod engine_rendered;
mod messages;
mod taught;
#[cfg(test)]
pub(crate) mod testing;
mod text_only;

pub(crate) use taught::write as write_taught;
pub(crate) use text_only::response_format;

use super::Gateway;
use super::prompt::{Prompt, resolve};
use super::request::{Input, TurnRequest};
use super::rollouts::Rollout;
use crate::Service;
use primerl_engines::clients::ClientType;
use primerl_service::http::ApiError;
use std::sync::Arc;

/// Whether the gateway renders the prompt of this rollout's requests.
pub(super) fn renders_here(gateway: &Gateway, rollout: &Rollout) -> bool {
    match &rollout.endpoint {
        Some(_) => rollout.is_taught(),
        None => gateway.client_type == ClientType::Renderer,
    }
}

/// For a rollout that a teacher answers, adds the messages that the teacher is sent to the prompt.
pub(super) fn ask_teacher(
    rollout: &Rollout,
    request: &TurnRequest,
    prompt: &mut Prompt,
) -> Result<(), ApiError> {
    let (Input::Messages { messages, .. }, Some(options)) = (&request.input, &prompt.options)
    else {
        return Err(no_messages(rollout));
    };
    text_only::check(rollout, request)?;
    prompt.chat = Some(Arc::new(messages::chat_messages(messages, options)?));
    Ok(())
}

/// The prompt of a request that the gateway does not render.
pub(super) async fn prompt(
    service: &Arc<Service>,
    rollout: &Arc<Rollout>,
    session: &Arc<str>,
    request: &TurnRequest,
) -> Result<Prompt, ApiError> {
    let Input::Messages {
        messages,
        options,
        recurring,
    } = &request.input
    else {
        return Err(no_messages(rollout));
    };
    if rollout.endpoint.is_some() {
        text_only::check(rollout, request)?;
    }
    let renderer = &service.gateway.renderer;
    let resolved = resolve(renderer, rollout, session, messages, options, *recurring)?;
    match &rollout.endpoint {
        Some(_) => text_only::prompt(session, messages, &resolved),
        None => engine_rendered::prompt(service, rollout, session, messages, resolved).await,
    }
}

fn no_messages(rollout: &Rollout) -> ApiError {
    let who = match &rollout.endpoint {
        Some(endpoint) => format!("{} is a chat completions server", endpoint.name()),
        None => {
            "this run's engine renders chat messages (client_type = \"openai_chat_completions_token\")"
                .to_owned()
        }
    };
    let message = format!(
        "{who} and accepts messages only, not a prompt of text or token ids; send messages"
    );
    ApiError::invalid(message)
        .param("prompt")
        .code("unsupported_parameter")
}
