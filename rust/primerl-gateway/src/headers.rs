//! Reads the headers of a request.

use super::dialect::Dialect;
use axum::http::HeaderMap;
use primerl_core::conversation::{digest_next, message_hash};
use primerl_service::http::ApiError;
use std::sync::Arc;

const LONGEST_SESSION: usize = 256;
const LONGEST_IDEMPOTENCY_KEY: usize = 512;

/// What the headers specify.
pub(crate) struct Call {
    pub session: Arc<str>,
    pub repeat: Repeat,
}

impl Call {
    pub(crate) fn of(headers: &HeaderMap) -> Result<Call, ApiError> {
        Ok(Call {
            session: session_of(headers)?,
            repeat: Repeat::of(headers)?,
        })
    }
}

/// Whether a request may repeat an earlier one.
pub(crate) enum Repeat {
    /// The client does not mark retries: it only gets an answer again that it never received.
    Unmarked,
    /// SDKs count their attempts.
    Retry,
    /// Requests with the same key are the same request, whatever their bodies.
    Key(u128),
}

impl Repeat {
    fn of(headers: &HeaderMap) -> Result<Repeat, ApiError> {
        if let Some(key) = headers.get("idempotency-key") {
            // If two requests had an empty key, one would get the other's answer.
            if key.is_empty() {
                let message = "Idempotency-Key is empty; omit it, or send a key that is unique to the request";
                return Err(ApiError::invalid(message).param("Idempotency-Key"));
            }
            if key.len() > LONGEST_IDEMPOTENCY_KEY {
                let message =
                    format!("Idempotency-Key is longer than {LONGEST_IDEMPOTENCY_KEY} bytes");
                return Err(ApiError::invalid(message).param("Idempotency-Key"));
            }
            return Ok(Repeat::Key(message_hash(key.as_bytes())));
        }
        let count = headers.get("x-stainless-retry-count");
        Ok(match count {
            Some(count) if count.as_bytes() != b"0" => Repeat::Retry,
            _ => Repeat::Unmarked,
        })
    }

    /// Hash that identifies the request when it is repeated; `body` is the body's hash.
    pub(crate) fn digest(&self, dialect: &dyn Dialect, session: &str, body: u128) -> u128 {
        let route = message_hash(format!("{} {session}", dialect.name()).as_bytes());
        match self {
            Repeat::Key(key) => digest_next(digest_next(route, *key), 1),
            Repeat::Unmarked | Repeat::Retry => digest_next(route, body),
        }
    }

    /// Whether the request may repeat an earlier one.
    pub(crate) fn is_marked(&self) -> bool {
        !matches!(self, Repeat::Unmarked)
    }
}

pub(crate) fn session_of(headers: &HeaderMap) -> Result<Arc<str>, ApiError> {
    let Some(session) = headers.get("x-session-id") else {
        return Ok("".into());
    };
    // Treated as no name, it would mix the turns of two conversations.
    let session = session.to_str().map_err(|_| {
        ApiError::invalid("X-Session-ID is not visible ASCII; encode it").param("X-Session-ID")
    })?;
    if session.len() > LONGEST_SESSION {
        let message = format!("X-Session-ID is longer than {LONGEST_SESSION} bytes");
        return Err(ApiError::invalid(message).param("X-Session-ID"));
    }
    Ok(session.into())
}
