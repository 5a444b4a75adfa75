//! What the headers of a request say.

use super::dialect::Dialect;
use axum::http::HeaderMap;
use primerl_core::conversation::{digest_next, message_hash};
use primerl_service::http::ApiError;
use std::sync::Arc;

const LONGEST_SESSION: usize = 256;
const LONGEST_IDEMPOTENCY_KEY: usize = 512;

/// What the headers say.
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

/// Whether a request may be one that came before.
pub(crate) enum Repeat {
    /// The client says nothing: only an answer that it never got is given again.
    Unmarked,
    /// SDKs count their attempts.
    Retry,
    /// The same key is the same request, whatever its body.
    Key(u128),
}

impl Repeat {
    fn of(headers: &HeaderMap) -> Result<Repeat, ApiError> {
        if let Some(key) = headers.get("idempotency-key") {
            // Of two requests without a name, one would be given the other's answer.
            if key.is_empty() {
                let message = "Idempotency-Key is empty; leave it out, or name the request";
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

    /// Hash by which the request is known when it comes again; `body` is the body's.
    pub(crate) fn digest(&self, dialect: Dialect, session: &str, body: u128) -> u128 {
        let route = message_hash(format!("{dialect:?} {session}").as_bytes());
        match self {
            Repeat::Key(key) => digest_next(digest_next(route, *key), 1),
            Repeat::Unmarked | Repeat::Retry => digest_next(route, body),
        }
    }

    /// Whether it may be one that came before.
    pub(crate) fn is_marked(&self) -> bool {
        !matches!(self, Repeat::Unmarked)
    }
}

pub(crate) fn session_of(headers: &HeaderMap) -> Result<Arc<str>, ApiError> {
    let Some(session) = headers.get("x-session-id") else {
        return Ok("".into());
    };
    // Taken for no name at all, it would mix the turns of two conversations.
    let session = session.to_str().map_err(|_| {
        ApiError::invalid("X-Session-ID is not visible ASCII; encode it").param("X-Session-ID")
    })?;
    if session.len() > LONGEST_SESSION {
        let message = format!("X-Session-ID is longer than {LONGEST_SESSION} bytes");
        return Err(ApiError::invalid(message).param("X-Session-ID"));
    }
    Ok(session.into())
}
