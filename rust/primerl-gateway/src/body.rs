//! Response bodies that record whether their client received them.

use super::rollouts::Rollout;
use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

/// An answer that is being sent. If it is dropped before its last byte was handed to the connection, it counts as not
/// delivered, and an equal request gets it again.
#[derive(Debug)]
pub(super) struct Delivery {
    rollout: Arc<Rollout>,
    request: u128,
    attempt: u32,
    done: bool,
}

impl Delivery {
    /// A body with the answer to this attempt at the request with this digest; the attempt counts it as a client
    /// already.
    pub(crate) fn of(rollout: &Arc<Rollout>, request: u128, attempt: u32) -> Delivery {
        Delivery {
            rollout: Arc::clone(rollout),
            request,
            attempt,
            done: false,
        }
    }

    pub(crate) fn done(mut self) {
        self.done = true;
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        let attempts = &mut self.rollout.state.lock().attempts;
        attempts.left(self.request, self.attempt, self.done, Instant::now());
    }
}

/// One chunk of known length.
pub(super) struct DeliveredBody {
    bytes: Option<Bytes>,
    delivery: Option<Delivery>,
}

impl DeliveredBody {
    pub(crate) fn new(bytes: Vec<u8>, delivery: Delivery) -> DeliveredBody {
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
    use crate::Sampling;
    use crate::attempts::Claim;
    use crate::rollouts::Rollouts;
    use primerl_core::effect::LeasedRollout;
    use primerl_core::{
        Duration, EnvironmentId, ExampleIndex, GroupId, RolloutId, TurnIndex, WorkerId,
    };

    const REQUEST: u128 = 5;

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
            template_kwargs: None,
            observes: Vec::new(),
        };
        rollouts.open(&lease, WorkerId(0), sampling);
        rollouts.get(RolloutId(3)).expect("is open")
    }

    #[tokio::test]
    async fn only_an_answer_that_was_taken_is_delivered() {
        let rollout = rollout();
        let is_lost = || {
            let claim = rollout
                .state
                .lock()
                .attempts
                .ask(REQUEST, 1, false, Instant::now());
            matches!(claim, Claim::Again { number: 1, .. })
        };
        {
            let attempts = &mut rollout.state.lock().attempts;
            let live = crate::live::testing::live();
            attempts.begin(REQUEST, 1, live, false);
            attempts.recorded(REQUEST, 1, 0, TurnIndex(0));
            attempts.ended(REQUEST, 1, 1);
        }
        let body = |bytes: &[u8]| {
            let delivery = Delivery::of(&rollout, REQUEST, 1);
            DeliveredBody::new(bytes.to_vec(), delivery)
        };
        assert!(!is_lost(), "it is on its way");
        drop(body(b"lost"));
        assert!(is_lost());
        rollout.state.lock().attempts.joined(REQUEST, 1);
        let body = axum::body::Body::new(body(b"taken"));
        let taken = axum::body::to_bytes(body, 100).await.expect("is whole");
        assert_eq!(taken, "taken");
        assert!(!is_lost());
    }
}
