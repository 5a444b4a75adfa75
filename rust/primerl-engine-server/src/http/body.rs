//! Bodies of requests: how large, how slow, and how many at a time.

use super::error::ApiError;
use axum::body::{Body, Bytes, HttpBody};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// Bytes of a request besides its prompt.
const ENVELOPE: usize = 1 << 20;
/// Bytes of a prompt's token: an id with its comma, or the text that is rendered to it.
const BYTES_A_TOKEN: usize = 256;
/// A prompt of a million token ids is 8 MB of JSON.
const LARGEST: usize = 64 << 20;
/// Bytes of all bodies that have arrived and are not answered yet.
const TOTAL: usize = 1 << 30;
/// Smaller ones are not counted: a connection may have a buffer.
const SMALL: usize = 64 << 10;
const DEADLINE: Duration = Duration::from_secs(60);

/// Reads bodies within limits that all connections share.
pub struct Bodies {
    largest: usize,
    /// Bytes.
    room: Arc<Semaphore>,
    /// A body is here in whole after this long.
    within: Duration,
}

/// A body, and the room that it takes for as long as this is kept.
pub struct Whole {
    pub bytes: Bytes,
    _room: Option<OwnedSemaphorePermit>,
}

impl Bodies {
    /// The limit of an engine whose prompt and answer have at most so many tokens: a longer prompt cannot be used.
    pub fn new(max_model_len: u32) -> Bodies {
        let prompt = BYTES_A_TOKEN.saturating_mul(max_model_len as usize);
        Bodies {
            largest: ENVELOPE.saturating_add(prompt).min(LARGEST),
            room: Arc::new(Semaphore::new(TOTAL)),
            within: DEADLINE,
        }
    }

    /// A small body needs none.
    async fn take_room(
        &self,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Option<OwnedSemaphorePermit>, String> {
        if bytes <= SMALL {
            return Ok(None);
        }
        let room = Arc::clone(&self.room).acquire_many_owned(bytes as u32);
        match timeout_at(deadline, room).await {
            Ok(Ok(room)) => Ok(Some(room)),
            _ => Err("other large requests leave no room".into()),
        }
    }

    /// # Errors
    /// The body is too large or does not come in time, or others leave no room for it.
    pub async fn read(&self, body: Body) -> Result<Whole, ApiError> {
        let refused =
            |problem: String| ApiError::body("body", "body", &format!("cannot be read: {problem}"));
        let deadline = Instant::now() + self.within;
        let announced = body.size_hint().exact().map(|bytes| bytes as usize);
        let most = announced.unwrap_or(self.largest);
        if most > self.largest {
            return Err(refused(self.too_large()));
        }
        let room = self.take_room(most, deadline).await.map_err(refused)?;
        match timeout_at(deadline, axum::body::to_bytes(body, most)).await {
            Ok(Ok(bytes)) => Ok(Whole { bytes, _room: room }),
            Ok(Err(_)) if announced.is_none() => Err(refused(self.too_large())),
            Ok(Err(error)) => Err(refused(error.to_string())),
            Err(_) => Err(refused(format!("it did not come within {:?}", self.within))),
        }
    }

    fn too_large(&self) -> String {
        format!("it is larger than {} bytes", self.largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Sends without end, and counts what was taken.
    fn endless(taken: &Arc<AtomicUsize>) -> Body {
        let taken = Arc::clone(taken);
        Body::from_stream(stream::repeat_with(move || {
            let piece = Bytes::from_static(&[b'x'; 4096]);
            taken.fetch_add(piece.len(), Ordering::Relaxed);
            Ok::<_, Infallible>(piece)
        }))
    }

    fn said(error: ApiError) -> String {
        error.to_json()["error"]["message"].to_string()
    }

    #[tokio::test]
    async fn a_body_without_end_is_read_up_to_what_a_prompt_can_be() {
        let taken = Arc::new(AtomicUsize::new(0));
        let bodies = Bodies::new(1000);
        let read = bodies.read(endless(&taken));
        let problem = said(read.await.err().expect("is refused"));
        assert!(problem.contains("larger than 1304576 bytes"), "{problem}");
        assert!(taken.load(Ordering::Relaxed) <= 1_304_576 + 4096);
        assert_eq!(bodies.room.available_permits(), TOTAL, "it is given back");
        // Whatever the model's length, there is an end.
        assert_eq!(Bodies::new(u32::MAX).largest, LARGEST);
    }

    #[tokio::test]
    async fn large_bodies_take_turns() {
        let bodies = Bodies {
            largest: 1 << 20,
            room: Arc::new(Semaphore::new(1 << 20)),
            // What is there at once is taken.
            within: Duration::ZERO,
        };
        let body = || Body::from(vec![b'x'; 600 << 10]);
        let Ok(first) = bodies.read(body()).await else {
            panic!("there is room");
        };
        assert_eq!(first.bytes.len(), 600 << 10);
        let problem = said(bodies.read(body()).await.err().expect("there is none"));
        assert!(problem.contains("leave no room"), "{problem}");
        let small = bodies.read(Body::from("{}")).await;
        assert!(small.is_ok(), "which is not counted");
        drop(first);
        assert!(bodies.read(body()).await.is_ok());
    }
}
