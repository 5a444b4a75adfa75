//! Bodies of requests and answers: msgpack or JSON, according to the request's content type.

use super::{ApiError, Bodies, JSON, MSGPACK};
use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;

/// The state of routes that take bodies.
pub trait ReadsBodies: Send + Sync {
    fn bodies(&self) -> &Bodies;
}

/// A complete body, within the limits for all bodies.
pub struct RawBody(pub Bytes);

impl<S: ReadsBodies> FromRequest<Arc<S>> for RawBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<S>) -> Result<Self, ApiError> {
        let (head, body) = request.into_parts();
        let encoding = head.headers.get(header::CONTENT_ENCODING);
        if encoding.is_some_and(|encoding| encoding != "identity") {
            return Err(ApiError {
                status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
                ..ApiError::invalid("Content-Encoding is not supported; send the body without it")
            }
            .param("Content-Encoding"));
        }
        let bodies = state.bodies();
        bodies.read(head.uri.path(), body).await.map(RawBody)
    }
}

/// The encoding of a request, which its answer uses, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    MessagePack,
    Json,
}

impl Encoding {
    fn of(headers: &HeaderMap) -> Encoding {
        match headers
            .get(header::CONTENT_TYPE)
            .and_then(|value| value.to_str().ok())
        {
            Some(kind) if kind.starts_with(JSON) => Encoding::Json,
            _ => Encoding::MessagePack,
        }
    }

    pub fn respond<T: Serialize>(self, status: StatusCode, body: &T) -> Response {
        let (kind, bytes) = match self {
            Encoding::MessagePack => (
                MSGPACK,
                rmp_serde::to_vec_named(body).map_err(|error| error.to_string()),
            ),
            Encoding::Json => (
                JSON,
                serde_json::to_vec(body).map_err(|error| error.to_string()),
            ),
        };
        match bytes {
            Ok(bytes) => (status, [(header::CONTENT_TYPE, kind)], bytes).into_response(),
            Err(error) => ApiError::internal(error).into_response(),
        }
    }

    pub fn ok<T: Serialize>(self, body: &T) -> Response {
        self.respond(StatusCode::OK, body)
    }
}

/// A decoded body of an endpoint for the run's own processes.
pub struct Wire<T> {
    pub body: T,
    pub encoding: Encoding,
}

impl<T: DeserializeOwned, S: ReadsBodies> FromRequest<Arc<S>> for Wire<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, state: &Arc<S>) -> Result<Self, ApiError> {
        let encoding = Encoding::of(request.headers());
        let RawBody(bytes) = RawBody::from_request(request, state).await?;
        let body = match encoding {
            Encoding::Json => serde_json::from_slice(&bytes).map_err(|error| error.to_string()),
            Encoding::MessagePack => {
                rmp_serde::from_slice(&bytes).map_err(|error| error.to_string())
            }
        };
        let body =
            body.map_err(|problem| ApiError::invalid(format!("malformed body: {problem}")))?;
        Ok(Wire { body, encoding })
    }
}

/// Bytes that are already encoded.
pub fn encoded(kind: &'static str, body: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, kind)], body.into()).into_response()
}
