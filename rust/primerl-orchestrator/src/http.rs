//! Errors and bodies of all endpoints: OpenAI's error envelope; msgpack or JSON by the request's content type.

use crate::app::App;
use axum::body::Body;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use primerl_core::event::Overflow;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::sync::Arc;

pub const MSGPACK: &str = "application/msgpack";
pub const JSON: &str = "application/json";
/// The code of what is said once there is nobody to ask.
pub const RUN_OVER: &str = "run_over";

/// `{"error": {"message", "type", "param", "code"}}`. SDKs retry 408, 409, 429 and 5xx and nothing else.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub code: Option<&'static str>,
    pub param: Option<String>,
    pub message: String,
    /// Of a prompt that is longer than the context.
    pub overflow: Option<Overflow>,
}

#[derive(Serialize)]
struct Envelope<'a> {
    error: Details<'a>,
}

#[derive(Serialize)]
struct Details<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

impl ApiError {
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::BAD_REQUEST,
            kind: "invalid_request_error",
            code: None,
            param: None,
            message: message.into(),
            overflow: None,
        }
    }

    pub fn not_found(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::NOT_FOUND,
            kind: "not_found_error",
            code: Some(code),
            ..ApiError::invalid(message)
        }
    }

    pub fn conflict(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::CONFLICT,
            code: Some(code),
            ..ApiError::invalid(message)
        }
    }

    pub fn gone(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::GONE,
            code: Some(code),
            ..ApiError::invalid(message)
        }
    }

    pub fn unavailable(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::SERVICE_UNAVAILABLE,
            kind: "server_error",
            code: Some(code),
            ..ApiError::invalid(message)
        }
    }

    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "server_error",
            ..ApiError::invalid(message)
        }
    }

    pub fn code(self, code: &'static str) -> ApiError {
        ApiError {
            code: Some(code),
            ..self
        }
    }

    /// Name the request's field that is wrong.
    pub fn param(self, param: impl Into<String>) -> ApiError {
        ApiError {
            param: Some(param.into()),
            ..self
        }
    }

    pub fn to_json(&self) -> String {
        let details = Details {
            message: &self.message,
            kind: self.kind,
            param: self.param.as_deref(),
            code: self.code,
        };
        // Strings always serialise.
        serde_json::to_string(&Envelope { error: details }).unwrap_or_default()
    }
}

impl From<crate::driver::RunOver> for ApiError {
    fn from(_: crate::driver::RunOver) -> Self {
        ApiError::gone(RUN_OVER, "the run is over")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let kind = [(header::CONTENT_TYPE, JSON)];
        let mut response = (self.status, kind, self.to_json()).into_response();
        // Where the route speaks another dialect, it is written again.
        response.extensions_mut().insert(self);
        response
    }
}

/// A whole body, within the limits of all.
pub struct RawBody(pub Bytes);

impl FromRequest<Arc<App>> for RawBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let (head, body) = request.into_parts();
        let encoding = head.headers.get(header::CONTENT_ENCODING);
        if encoding.is_some_and(|encoding| encoding != "identity") {
            return Err(ApiError {
                status: StatusCode::UNSUPPORTED_MEDIA_TYPE,
                ..ApiError::invalid("bodies are taken as they are, without a Content-Encoding")
            }
            .param("Content-Encoding"));
        }
        app.bodies.read(head.uri.path(), body).await.map(RawBody)
    }
}

/// How a peer speaks: its answer comes in the encoding of its request.
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

/// A decoded body of the processes' own endpoints.
pub struct Wire<T> {
    pub body: T,
    pub encoding: Encoding,
}

impl<T: DeserializeOwned> FromRequest<Arc<App>> for Wire<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let encoding = Encoding::of(request.headers());
        let RawBody(bytes) = RawBody::from_request(request, app).await?;
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

/// Bytes that are encoded already.
pub fn encoded(kind: &'static str, body: impl Into<Body>) -> Response {
    ([(header::CONTENT_TYPE, kind)], body.into()).into_response()
}
