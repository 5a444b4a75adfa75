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
        self.rollout.state.lock().delivered(&self.answer);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sampling;
    use crate::gateway::rollouts::Rollouts;
    use primerl_core::effect::LeasedRollout;
    use primerl_core::turn::FinishReason;
    use primerl_core::{Duration, EnvironmentId, ExampleIndex, GroupId, RolloutId, WorkerId};
    use primerl_render::Message;

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
        rollouts.open(
            &lease,
            WorkerId(0),
            Sampling {
                temperature: 1.0,
                max_tokens: 8,
            },
        );
        rollouts.get(RolloutId(3)).expect("is open")
    }

    fn answer() -> Arc<Answer> {
        Arc::new(Answer {
            id: "a".into(),
            created: 0,
            model: "m".into(),
            session: "".into(),
            context_digest: 5,
            message: Message::assistant("hi"),
            finish: FinishReason::Stop,
            prompt: vec![1],
            sampled: vec![2].into(),
            logprobs: vec![-1.0].into(),
        })
    }

    #[tokio::test]
    async fn only_an_answer_that_nobody_took_is_kept_for_a_retry() {
        let (rollout, answer) = (rollout(), answer());
        let body = DeliveredBody::new(
            Bytes::from_static(b"taken"),
            Delivery::begin(&rollout, &answer),
        );
        let taken = axum::body::to_bytes(axum::body::Body::new(body), 100)
            .await
            .expect("is whole");
        assert_eq!(taken, "taken");
        assert!(rollout.state.lock().undelivered.is_empty());

        drop(DeliveredBody::new(
            Bytes::from_static(b"lost"),
            Delivery::begin(&rollout, &answer),
        ));
        let kept = super::super::endpoints::take_undelivered(&rollout, "", 5).expect("is kept");
        assert!(Arc::ptr_eq(&kept, &answer));
        assert!(
            super::super::endpoints::take_undelivered(&rollout, "", 5).is_none(),
            "once"
        );
    }
}
