//! Request bodies: limits on their size, their duration, and the number read at the same time.

use super::ApiError;
use axum::body::Body;
use axum::http::StatusCode;
use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// Smaller bodies are not counted: the number of connections is limited, and each may have a buffer anyway.
const SMALL: usize = 64 << 10;
/// How long the rest of a refused request is read and discarded: if the connection were closed at once, the client
/// might not get the refusal.
const LISTENING: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct BodyLimits {
    /// Limit for a rollout's request: the largest conversation of the run's `seq_len` ([`BodyLimits::of_run`]).
    pub rollout_bytes: usize,
    /// Limit for a request of one of the run's own processes.
    pub process_bytes: usize,
    /// Limit for the total of all large bodies that are being read or parsed.
    pub total_bytes: usize,
    /// A body has to arrive completely within this time.
    pub deadline: Duration,
}

impl Default for BodyLimits {
    fn default() -> Self {
        BodyLimits {
            rollout_bytes: 64 << 20,
            process_bytes: 256 << 20,
            total_bytes: 1 << 30,
            deadline: Duration::from_secs(60),
        }
    }
}

/// Bytes of a rollout's request in addition to its conversation, such as tools.
const ENVELOPE: usize = 4 << 20;
/// Bytes of the text of a token, many times the usual number: longer tokens are not sampled.
const BYTES_A_TOKEN: usize = 256;

impl BodyLimits {
    /// Limits for a run whose conversations have this many tokens.
    pub fn of_run(self, seq_len: u32) -> BodyLimits {
        let conversation = BYTES_A_TOKEN.saturating_mul(seq_len as usize);
        BodyLimits {
            rollout_bytes: self
                .rollout_bytes
                .min(ENVELOPE.saturating_add(conversation)),
            ..self
        }
    }
}

/// Reads bodies within limits that all connections share.
#[derive(Debug)]
pub struct Bodies {
    limits: BodyLimits,
    /// Available bytes.
    room: Arc<Semaphore>,
}

impl Bodies {
    pub fn new(limits: BodyLimits) -> Bodies {
        let room = Arc::new(Semaphore::new(limits.total_bytes));
        Bodies { limits, room }
    }

    /// The complete body of a request to `path`.
    ///
    /// # Errors
    /// The body is too large (413), does not arrive in time (408), or its client disconnected (400); or other large
    /// bodies leave no room for it (503).
    pub async fn read(&self, path: &str, mut body: Body) -> Result<Bytes, ApiError> {
        let limit = match path.starts_with("/rollouts/") {
            true => self.limits.rollout_bytes,
            false => self.limits.process_bytes,
        };
        let outcome = self.read_up_to(limit, &mut body).await;
        if let Err(refusal) = &outcome
            && refusal.status == StatusCode::PAYLOAD_TOO_LARGE
        {
            discard(body).await;
        }
        outcome
    }

    async fn read_up_to(&self, limit: usize, body: &mut Body) -> Result<Bytes, ApiError> {
        let deadline = Instant::now() + self.limits.deadline;
        let announced = body.size_hint().lower() as usize;
        let mut counted = Counted::default();
        self.count(&mut counted, announced, limit, deadline).await?;
        let mut whole = Bytes::new();
        let mut growing = BytesMut::new();
        while let Some(piece) = next(body, deadline).await? {
            let length = whole.len() + growing.len() + piece.len();
            self.count(&mut counted, length, limit, deadline).await?;
            // Most bodies arrive in one piece, and need no copy.
            if whole.is_empty() && growing.is_empty() {
                whole = piece;
                continue;
            }
            if growing.is_empty() {
                growing.reserve(announced.max(length));
                growing.extend_from_slice(&std::mem::take(&mut whole));
            }
            growing.extend_from_slice(&piece);
        }
        let bytes = match growing.is_empty() {
            true => whole,
            false => growing.freeze(),
        };
        Ok(counted.held_with(bytes))
    }

    /// Reserves room for `length` bytes in total.
    async fn count(
        &self,
        counted: &mut Counted,
        length: usize,
        limit: usize,
        deadline: Instant,
    ) -> Result<(), ApiError> {
        if length > limit {
            return Err(ApiError {
                status: StatusCode::PAYLOAD_TOO_LARGE,
                ..ApiError::invalid(format!("the body is larger than {limit} bytes"))
                    .code("request_too_large")
            });
        }
        if length <= SMALL || length <= counted.bytes {
            return Ok(());
        }
        // Room grows in steps, so that a body in many pieces does not ask for room for each piece.
        let wanted = length.max(2 * counted.bytes).min(limit) - counted.bytes;
        // The limit for a body is below 4 GiB.
        let room = Arc::clone(&self.room).acquire_many_owned(wanted as u32);
        match timeout_at(deadline, room).await {
            Ok(Ok(permit)) => {
                counted.bytes += wanted;
                match &mut counted.permit {
                    Some(held) => held.merge(permit),
                    None => counted.permit = Some(permit),
                }
                Ok(())
            }
            _ => Err(ApiError::unavailable(
                "server_busy",
                "other large requests leave no room for this one; try again",
            )),
        }
    }
}

/// Room that a body occupies.
#[derive(Debug, Default)]
struct Counted {
    bytes: usize,
    permit: Option<OwnedSemaphorePermit>,
}

impl Counted {
    /// The room is occupied as long as any part of the bytes exists.
    fn held_with(self, bytes: Bytes) -> Bytes {
        struct Held {
            bytes: Bytes,
            _permit: OwnedSemaphorePermit,
        }
        impl AsRef<[u8]> for Held {
            fn as_ref(&self) -> &[u8] {
                &self.bytes
            }
        }
        match self.permit {
            None => bytes,
            Some(_permit) => Bytes::from_owner(Held { bytes, _permit }),
        }
    }
}

async fn next(body: &mut Body, deadline: Instant) -> Result<Option<Bytes>, ApiError> {
    loop {
        let frame = std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context));
        let Ok(frame) = timeout_at(deadline, frame).await else {
            return Err(ApiError {
                status: StatusCode::REQUEST_TIMEOUT,
                ..ApiError::invalid("the body did not arrive in time").code("request_timeout")
            });
        };
        match frame {
            None => return Ok(None),
            Some(Err(error)) => {
                return Err(ApiError::invalid(format!(
                    "the body did not arrive: {error}"
                )));
            }
            // Trailers hold nothing that is needed.
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

/// Reads for a while, and discards what it reads.
pub async fn discard(mut body: Body) {
    let deadline = Instant::now() + LISTENING;
    while let Ok(Some(_)) = next(&mut body, deadline).await {}
}
