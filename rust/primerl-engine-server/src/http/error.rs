//! `{"error":{"message","type","param","code"}}`, with vLLM's statuses and types.

use crate::handle::{CommandError, EngineGone};
use crate::request::InvalidRequest;
use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

#[derive(Debug)]
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    param: Option<String>,
}

impl ApiError {
    /// The body is not what the route takes (`Bad Request`, with a space).
    pub fn body(kind: &str, location: &str, message: &str) -> Self {
        ApiError {
            status: StatusCode::BAD_REQUEST,
            kind: "Bad Request",
            message: format!(
                "1 validation error:\n  {{'type': '{kind}', 'loc': '{location}', 'msg': '{message}'}}"
            ),
            param: Some(location.to_owned()),
        }
    }

    pub fn bad_request(message: impl Into<String>, param: Option<&str>) -> Self {
        ApiError {
            status: StatusCode::BAD_REQUEST,
            kind: "BadRequestError",
            message: message.into(),
            param: param.map(str::to_owned),
        }
    }

    pub fn unknown_model(name: &str, served: &str) -> Self {
        ApiError {
            status: StatusCode::NOT_FOUND,
            kind: "NotFoundError",
            message: format!("The model `{name}` does not exist. Valid aliases: {served}."),
            param: Some("model".into()),
        }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        ApiError {
            status: StatusCode::INTERNAL_SERVER_ERROR,
            kind: "InternalServerError",
            message: message.into(),
            param: None,
        }
    }

    pub fn rpc_failed(error: &CommandError) -> Self {
        ApiError::internal(format!("Call to collective_rpc method failed: {error}"))
    }

    pub fn to_json(&self) -> Value {
        json!({"error": {
            "message": self.message, "type": self.kind, "param": self.param, "code": self.status.as_u16(),
        }})
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        (self.status, Json(self.to_json())).into_response()
    }
}

impl From<InvalidRequest> for ApiError {
    fn from(error: InvalidRequest) -> Self {
        ApiError::bad_request(error.message, error.parameter)
    }
}

impl From<EngineGone> for ApiError {
    fn from(error: EngineGone) -> Self {
        ApiError::internal(format!("EngineCore encountered an issue: {error}"))
    }
}
