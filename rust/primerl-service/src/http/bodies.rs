//! Bodies of requests: how large, how slow, and how many at a time.

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

/// Smaller ones are not counted: connections are, and a buffer each is what they may have anyway.
const SMALL: usize = 64 << 10;
/// What a client still sends after it was refused is thrown away for this long: a connection that is closed on it would
/// lose the refusal.
const LISTENING: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub struct BodyLimits {
    /// Of a rollout's request: what a conversation of the run's `seq_len` can be ([`BodyLimits::of_run`]).
    pub rollout_bytes: usize,
    /// Of a request of one of the run's own processes.
    pub process_bytes: usize,
    /// Of all large bodies that are being read and not yet understood.
    pub total_bytes: usize,
    /// A body is here in whole after this long.
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

/// Bytes of a rollout's request besides its conversation, such as tools.
const ENVELOPE: usize = 4 << 20;
/// Bytes of the text of a token, many times the usual: what is longer is not sampled from.
const BYTES_A_TOKEN: usize = 256;

impl BodyLimits {
    /// Of a run whose conversations have so many tokens.
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
    /// Bytes.
    room: Arc<Semaphore>,
}

impl Bodies {
    pub fn new(limits: BodyLimits) -> Bodies {
        let room = Arc::new(Semaphore::new(limits.total_bytes));
        Bodies { limits, room }
    }

    /// The whole body of a request to `path`.
    ///
    /// # Errors
    /// It is too large (413), does not come in time (408), or its client hung up (400); or other large ones leave no room
    /// for it (503).
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
            // Most bodies come in one piece, and need not be copied.
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

    /// Make room for `length` bytes in all.
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
        // In steps that grow with it, so that a body in many pieces does not ask for each.
        let wanted = length.max(2 * counted.bytes).min(limit) - counted.bytes;
        // The limit of a body is below 4 GiB.
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

/// Room that a body takes.
#[derive(Debug, Default)]
struct Counted {
    bytes: usize,
    permit: Option<OwnedSemaphorePermit>,
}

impl Counted {
    /// The room is taken for as long as any part of the bytes is held.
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
                ..ApiError::invalid("the body did not come in time").code("request_timeout")
            });
        };
        match frame {
            None => return Ok(None),
            Some(Err(error)) => {
                return Err(ApiError::invalid(format!("the body did not come: {error}")));
            }
            // Trailers say nothing that is wanted.
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    return Ok(Some(data));
                }
            }
        }
    }
}

/// Read on for a while, and keep nothing.
pub async fn discard(mut body: Body) {
    let deadline = Instant::now() + LISTENING;
    while let Ok(Some(_)) = next(&mut body, deadline).await {}
}
