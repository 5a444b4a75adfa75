//! Bodies that know whether their client took them.

use super::answer::Answer;
use super::rollouts::Rollout;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Remembers an answer for a retry until its bytes were handed to the connection. Dropped before that (the client hung
/// up between the engine's answer and ours), it stays remembered.
pub(super) struct Delivery {
    rollout: Arc<Rollout>,
    answer: Arc<Answer>,
}

impl Delivery {
    pub fn begin(rollout: &Arc<Rollout>, answer: &Arc<Answer>) -> Delivery {
        rollout.state.lock().undelivered.push(Arc::clone(answer));
        Delivery {
            rollout: Arc::clone(rollout),
            answer: Arc::clone(answer),
        }
    }

    pub fn done(self) {
        let mut state = self.rollout.state.lock();
        state
            .undelivered
            .retain(|answer| !Arc::ptr_eq(answer, &self.answer));
    }
}

/// One piece of known length.
pub(super) struct DeliveredBody {
    bytes: Option<Bytes>,
    delivery: Option<Delivery>,
}

impl DeliveredBody {
    pub fn new(bytes: Bytes, delivery: Delivery) -> DeliveredBody {
        DeliveredBody {
            bytes: Some(bytes),
            delivery: Some(delivery),
        }
    }
}

impl Body for DeliveredBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(delivery) = self.delivery.take() {
            delivery.done();
        }
        Poll::Ready(self.bytes.take().map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}
