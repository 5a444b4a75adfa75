//! The APIs that clients use. A dialect parses a request into a [`TurnRequest`], which is independent of dialects, and
//! writes the answer ([`Reply`]); everything between the two is the same for all dialects.

pub(super) mod chat;
mod chunks;
mod completions;
mod logprobs;
pub(super) mod messages;
mod responses;
mod shared;
mod sse;
#[cfg(test)]
mod testing;

pub(crate) use responses::{
    KeptResponse, Restoring as RestoringResponses, Store as ResponseStore,
    delete as delete_response, input_items as response_input_items, retrieve as retrieve_response,
};

use self::chat::seen::{Hashed, Seen};
use super::answer::Reply;
use super::request::TurnRequest;
use super::rollouts::Rollout;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use primerl_service::http::{ApiError, JSON};
use std::sync::Arc;

/// A request, and how its answer is written.
pub(super) type ReadRequest = (TurnRequest, Box<dyn Reply>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// OpenAI's chat completions.
    Chat,
    /// Anthropic's messages.
    Messages,
    /// OpenAI's responses.
    Responses,
    /// OpenAI's text completions.
    Completions,
}

impl Dialect {
    /// The body's hash, and the part of it that was read before.
    pub(crate) fn hash(
        self,
        body: &Bytes,
        rollout: &Rollout,
        session: &Arc<str>,
    ) -> Result<Hashed, ApiError> {
        let seen = match self {
            Dialect::Chat => rollout.state.lock().session(session)?.seen.clone(),
            Dialect::Messages | Dialect::Responses | Dialect::Completions => None,
        };
        Ok(Hashed::of(body, seen))
    }

    /// `digest` identifies the request when it is repeated.
    pub(crate) fn read(
        self,
        body: &Bytes,
        rollout: &Rollout,
        session: &Arc<str>,
        known: Option<Arc<Seen>>,
        digest: u128,
    ) -> Result<ReadRequest, ApiError> {
        match self {
            Dialect::Chat => {
                let (request, seen) = chat::read(body, &rollout.rules(), digest, known)?;
                rollout.state.lock().session(session)?.seen = seen;
                Ok(request)
            }
            Dialect::Messages => messages::read(body, &rollout.rules(), digest),
            Dialect::Completions => completions::read(body, &rollout.rules(), digest),
            Dialect::Responses => {
                responses::read(body, &rollout.rules(), &rollout.responses, digest)
            }
        }
    }

    /// An error in the format that the dialect's SDKs expect.
    pub(crate) fn refusal(self, error: &ApiError) -> Response {
        match self {
            Dialect::Chat => error.clone().into_response(),
            Dialect::Messages => messages::refusal(error),
            Dialect::Responses => with_messages_named(error, "input").into_response(),
            Dialect::Completions => with_messages_named(error, "prompt").into_response(),
        }
    }
}

/// An error about the messages, with the dialect's name for them if it has another one.
fn with_messages_named(error: &ApiError, name: &str) -> ApiError {
    match error.param.as_deref() {
        Some(param) if param.starts_with("messages") => error.clone().param(name),
        _ => error.clone(),
    }
}

/// Writes an error from before any handler, or from a handler that knows no dialect, in the format of its route.
pub(crate) fn in_shape_of(path: &str, response: Response) -> Response {
    let status = response.status();
    if !status.is_client_error() && !status.is_server_error() {
        return response;
    }
    let error = match response.extensions().get::<ApiError>() {
        Some(error) => error.clone(),
        // axum refuses a path or query string that it cannot parse with plain text.
        None if !is_json(&response) => ApiError {
            status,
            ..ApiError::invalid("the request's URL cannot be read")
        },
        None => return response,
    };
    match path.split('/').any(|part| part == "messages") {
        true => Dialect::Messages.refusal(&error),
        false => error.into_response(),
    }
}

fn is_json(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(JSON.as_bytes()))
}
