//! Bodies that know whether their client took them.

use super::rollouts::{DeliveryState, Rollout};
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// An answer on its way. Dropped before its last byte was handed to the connection, it counts as not delivered, and the
/// same request gets it again.
#[derive(Debug)]
pub(super) struct Delivery {
    rollout: Arc<Rollout>,
    request: u128,
    answer: Arc<str>,
    done: bool,
}

impl Delivery {
    /// Of the answer with this id to the request with this digest.
    pub fn begin(rollout: &Arc<Rollout>, request: u128, answer: &Arc<str>) -> Delivery {
        Delivery {
            rollout: Arc::clone(rollout),
            request,
            answer: Arc::clone(answer),
            done: false,
        }
    }

    pub fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let delivery = match self.done {
            true => DeliveryState::Done,
            false => DeliveryState::Failed,
        };
        let mut state = self.rollout.state.lock();
        state.delivered(self.request, &self.answer, delivery);
    }
}

/// One piece of known length.
pub(super) struct DeliveredBody {
    bytes: Option<Bytes>,
    delivery: Option<Delivery>,
}

impl DeliveredBody {
    pub fn new(bytes: Vec<u8>, delivery: Delivery) -> DeliveredBody {
        DeliveredBody {
            bytes: Some(bytes.into()),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sampling;
    use crate::gateway::rollouts::{Answered, Rollouts};
    use primerl_core::effect::LeasedRollout;
    use primerl_core::{Duration, EnvironmentId, ExampleIndex, GroupId, RolloutId, WorkerId};

    const REQUEST: u128 = 5;
    const ANSWER: &str = "7";

    fn rollout() -> Arc<Rollout> {
        let rollouts = Rollouts::default();
        let lease = LeasedRollout {
            rollout: RolloutId(3),
            group: GroupId(0),
            environment: EnvironmentId(0),
            example: ExampleIndex(0),
            evaluation: false,
            deadline: Duration::from_secs(60),
        };
        let sampling = Sampling {
            temperature: 1.0,
            max_tokens: 8,
            rollout_max_tokens: None,
            replayed: None,
        };
        rollouts.open(&lease, WorkerId(0), sampling);
        let rollout = rollouts.get(RolloutId(3)).expect("is open");
        let answered = Answered {
            id: ANSWER.into(),
            ..Answered::default()
        };
        rollout.state.lock().answered.insert(REQUEST, answered);
        rollout
    }

    #[tokio::test]
    async fn only_an_answer_that_was_taken_is_delivered() {
        let rollout = rollout();
        let state = || rollout.state.lock().answered[&REQUEST].delivery;
        let body = |answer: &str, bytes: &[u8]| {
            let delivery = Delivery::begin(&rollout, REQUEST, &answer.into());
            DeliveredBody::new(bytes.to_vec(), delivery)
        };
        drop(body("another", b"lost"));
        assert_eq!(state(), DeliveryState::Pending);
        drop(body(ANSWER, b"lost"));
        assert_eq!(state(), DeliveryState::Failed);
        let body = axum::body::Body::new(body(ANSWER, b"taken"));
        let taken = axum::body::to_bytes(body, 100).await.expect("is whole");
        assert_eq!(taken, "taken");
        assert_eq!(state(), DeliveryState::Done);
    }
}
