//! The APIs that clients use. A [`Dialect`] parses a request into a [`TurnRequest`], which is independent of dialects, and
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

pub(crate) use responses::{KeptResponse, Restoring as RestoringResponses, Store as ResponseStore};

use super::answer::Reply;
use super::request::TurnRequest;
use super::rollouts::Rollout;
use super::seen::{Hashed, Seen};
use crate::Service;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use primerl_service::http::{ApiError, JSON, Routes};
use std::sync::Arc;

/// A request, and how its answer is written.
pub(super) type ReadRequest = (TurnRequest, Box<dyn Reply>);

/// Every dialect that is served: a new one is a module of this folder, and its line here.
pub(crate) static DIALECTS: [&dyn Dialect; 4] = [
    &chat::Chat,
    &messages::Messages,
    &responses::Responses,
    &completions::Completions,
];

/// One API.
pub(crate) trait Dialect: Sync {
    /// Is part of the hash by which a request that is repeated after a restart is recognised: it never changes.
    fn name(&self) -> &'static str;

    /// Where requests are posted, under `/rollouts/{rollout}/v1/`.
    fn path(&self) -> &'static str;

    /// Further routes of the API, under whole paths.
    fn routes(&self) -> Routes<Arc<Service>> {
        Routes::new()
    }

    /// The body's hash, and the part of it that was read before.
    fn hash(
        &self,
        body: &Bytes,
        _rollout: &Rollout,
        _session: &Arc<str>,
    ) -> Result<Hashed, ApiError> {
        Ok(Hashed::of(body, None))
    }

    fn read(&self, asked: &Asked<'_>) -> Result<ReadRequest, ApiError>;

    /// An error in the format that the dialect's SDKs expect.
    fn refusal(&self, error: &ApiError) -> Response {
        error.clone().into_response()
    }
}

/// A request as it came.
pub(crate) struct Asked<'a> {
    pub rollout: &'a Rollout,
    pub session: &'a Arc<str>,
    pub body: &'a Bytes,
    /// The part of the body that was read before.
    pub known: Option<Arc<Seen>>,
    /// Identifies the request when it is repeated.
    pub digest: u128,
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
    let path = format!("{path}/");
    let is_under = |dialect: &&&dyn Dialect| path.contains(&format!("/{}/", dialect.path()));
    match DIALECTS.iter().find(is_under) {
        Some(dialect) => dialect.refusal(&error),
        None => error.into_response(),
    }
}

fn is_json(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE);
    kind.is_some_and(|kind| kind.as_bytes().starts_with(JSON.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;

    #[test]
    fn names_are_those_in_the_hashes_of_recorded_requests() {
        let names = DIALECTS.map(Dialect::name);
        assert_eq!(names, ["Chat", "Messages", "Responses", "Completions"]);
    }

    #[test]
    fn an_error_before_any_handler_has_the_format_of_the_path() {
        let param = |path: &str| {
            let error = ApiError::invalid("x").param("messages[0]");
            let response = in_shape_of(path, error.into_response());
            assert_eq!(response.status(), StatusCode::BAD_REQUEST);
            let error = response.extensions().get::<ApiError>();
            error.and_then(|error| error.param.as_deref().map(str::to_owned))
        };
        let at = |path: &str| param(&format!("/rollouts/1/v1/{path}"));
        assert_eq!(at("chat/completions").as_deref(), Some("messages[0]"));
        assert_eq!(at("models").as_deref(), Some("messages[0]"));
        assert_eq!(at("completions").as_deref(), Some("prompt"));
        assert_eq!(at("responses/r/input_items").as_deref(), Some("input"));
        // Anthropic's format is written as bytes alone.
        let anthropic = |path: &str| {
            let response = in_shape_of(path, ApiError::invalid("x").into_response());
            response.extensions().get::<ApiError>().is_none()
        };
        assert!(anthropic("/rollouts/1/v1/messages/count_tokens"));
        assert!(anthropic("/messages"));
        assert!(!anthropic("/rollouts/1/v1/chat/completions"));
    }
}
