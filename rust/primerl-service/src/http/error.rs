//! Errors of all endpoints, in OpenAI's format.

use super::{JSON, RUN_OVER};
use crate::inbox::RunOver;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use primerl_core::failure::Overflow;
use serde::Serialize;

/// `{"error": {"message", "type", "param", "code"}}`. SDKs retry 408, 409, 429 and 5xx and nothing else.
#[derive(Clone, Debug)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub code: Option<&'static str>,
    pub param: Option<String>,
    pub message: String,
    /// The lengths, if a prompt is longer than the context.
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

    /// Names the request's field that is wrong.
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
        // Strings can always be serialised.
        serde_json::to_string(&Envelope { error: details }).unwrap_or_default()
    }
}

impl From<RunOver> for ApiError {
    fn from(_: RunOver) -> Self {
        ApiError::gone(RUN_OVER, "the run is over")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let kind = [(header::CONTENT_TYPE, JSON)];
        let mut response = (self.status, kind, self.to_json()).into_response();
        // A route with another dialect writes the error again.
        response.extensions_mut().insert(self);
        response
    }
}
