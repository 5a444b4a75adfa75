//! Requests whose messages are rendered by somebody else: by the engine, which says what ids it made of them, or by a
//! server that gives text only.

mod engine_rendered;
mod messages;
pub(super) mod text_only;

use super::Gateway;
use super::prompt::{Prompt, resolve};
use super::request::{Input, TurnRequest};
use super::rollouts::Rollout;
use crate::app::App;
use crate::config::ClientType;
use crate::http::ApiError;
use std::sync::Arc;

/// Whether the prompt of a request of this rollout is rendered here.
pub(super) fn renders_here(gateway: &Gateway, rollout: &Rollout) -> bool {
    gateway.client_type == ClientType::Renderer && rollout.endpoint.is_none()
}

/// The prompt of a request that is not rendered here.
pub(super) async fn prompt(
    app: &Arc<App>,
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
        text_only::check(request)?;
    }
    let resolved = resolve(rollout, session, messages, options, *recurring)?;
    match &rollout.endpoint {
        Some(_) => text_only::prompt(session, messages, resolved),
        None => engine_rendered::prompt(app, rollout, session, messages, resolved).await,
    }
}

fn no_messages(rollout: &Rollout) -> ApiError {
    let who = match &rollout.endpoint {
        Some(_) => "this evaluation asks a server of chat completions (eval.env.client)",
        None => {
            "this run's engines render chat messages (client_type = \"openai_chat_completions_token\")"
        }
    };
    let message =
        format!("{who}, which takes messages and no prompt of text or token ids; send messages");
    ApiError::invalid(message)
        .param("prompt")
        .code("unsupported_parameter")
}
