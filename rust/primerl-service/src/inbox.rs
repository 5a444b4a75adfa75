//! The way to the driver, the thread that owns the core: events in, answers out.

use bytes::Bytes;
use primerl_core::effect::LeasedRollout;
use primerl_core::event::Outcome;
use primerl_core::{Event, RequestId, RolloutId, Status, Step, Time, WorkerId};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::{mpsc, oneshot};

/// The driver is gone: the run is over.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the run is over")]
pub struct RunOver;

/// Answer to a lease request.
#[derive(Debug)]
pub enum LeaseReply {
    Rollouts(Vec<LeasedRollout>),
    Nothing { reason: String, finished: bool },
}

/// Answer to a batch request.
#[derive(Debug)]
pub enum BatchReply {
    /// The encoded batch of the rank, as in the spool.
    Batch(Bytes),
    NotReady {
        waiting_for: String,
    },
    NoMore,
}

/// Who waits for an event's consequences.
#[derive(Debug)]
pub enum Reply {
    Lease(oneshot::Sender<LeaseReply>),
    Batch(oneshot::Sender<BatchReply>),
    /// Told once the operating system has the event: it outlives this process.
    Written(oneshot::Sender<()>),
    /// Told once the event is durable; the value says whether the rollout was still open before it.
    Accepted(oneshot::Sender<bool>),
    /// Told once the event is durable; the error says why the trainer is not followed.
    Verdict(oneshot::Sender<Result<(), String>>),
    /// The same, of a trainer whose checkpoint of this step has come to the disk: the run's state is kept beside it.
    Saved(oneshot::Sender<Result<(), String>>, Step),
}

#[expect(
    clippy::large_enum_variant,
    reason = "nearly all messages are events, and a box would be one more allocation for each"
)]
pub enum Message {
    Event {
        event: Event,
        reply: Option<Reply>,
        sent: Instant,
    },
    Status(oneshot::Sender<(Status, Time)>),
    /// Whether the driver still takes messages.
    Ping(oneshot::Sender<()>),
}

/// The way to the driver. Cheap to clone, never blocks.
#[derive(Clone, Debug)]
pub struct DriverHandle {
    inbox: mpsc::UnboundedSender<Message>,
    next_request: Arc<AtomicU64>,
}

/// The other end of a [`DriverHandle`].
pub struct Inbox(mpsc::UnboundedReceiver<Message>);

impl Inbox {
    /// As `recv_many` of tokio's channels: 0 once every handle is gone.
    pub async fn recv_many(&mut self, messages: &mut Vec<Message>, at_most: usize) -> usize {
        self.0.recv_many(messages, at_most).await
    }
}

pub fn channel() -> (DriverHandle, Inbox) {
    let (inbox, receiver) = mpsc::unbounded_channel();
    (
        DriverHandle {
            inbox,
            next_request: Arc::new(AtomicU64::new(0)),
        },
        Inbox(receiver),
    )
}

impl DriverHandle {
    /// Tell what happened. After the run is over nobody needs to know.
    pub fn send(&self, event: Event) {
        let _ = self.send_with(event, None);
    }

    fn send_with(&self, event: Event, reply: Option<Reply>) -> Result<(), RunOver> {
        self.inbox
            .send(Message::Event {
                event,
                reply,
                sent: Instant::now(),
            })
            .map_err(|_| RunOver)
    }

    /// Tell, and wait for the answer.
    async fn ask<T>(
        &self,
        event: Event,
        reply: impl FnOnce(oneshot::Sender<T>) -> Reply,
    ) -> Result<T, RunOver> {
        let (sender, answer) = oneshot::channel();
        self.send_with(event, Some(reply(sender)))?;
        answer.await.map_err(|_| RunOver)
    }

    /// Ask what may wait long. Dropping the future withdraws the request.
    async fn long_poll<T>(
        &self,
        event: impl FnOnce(RequestId) -> Event,
        reply: fn(oneshot::Sender<T>) -> Reply,
    ) -> Result<T, RunOver> {
        let mut request = PendingRequest {
            handle: self,
            id: RequestId(self.next_request.fetch_add(1, Ordering::Relaxed)),
            answered: false,
        };
        let answer = self.ask(event(request.id), reply).await;
        request.answered = true;
        answer
    }

    /// Tell now, in order with other calls; then wait until a crash of this process cannot undo it.
    pub fn turn_finished(
        &self,
        rollout: RolloutId,
        turn: primerl_core::Turn,
    ) -> impl Future<Output = Result<(), RunOver>> + use<> {
        let (sender, written) = oneshot::channel();
        let event = Event::TurnFinished { rollout, turn };
        let sent = self.send_with(event, Some(Reply::Written(sender)));
        async move {
            sent?;
            written.await.map_err(|_| RunOver)
        }
    }

    /// Note it now; then wait until a crash of this process cannot undo it.
    pub async fn noted(&self, rollout: RolloutId, note: Arc<str>) -> Result<(), RunOver> {
        self.ask(Event::Noted { rollout, note }, Reply::Written)
            .await
    }

    /// Tell, and wait until it is on disk. The result says whether the rollout was open.
    pub async fn rollout_finished(
        &self,
        worker: WorkerId,
        rollout: RolloutId,
        outcome: Outcome,
    ) -> Result<bool, RunOver> {
        let event = Event::RolloutFinished {
            rollout,
            worker,
            outcome,
        };
        self.ask(event, Reply::Accepted).await
    }

    /// Tell, and wait until it is on disk. The inner result says whether the weights are used, or why not.
    pub async fn weights_published(
        &self,
        version: primerl_core::PolicyVersion,
        manifest: String,
        digest: String,
    ) -> Result<Result<(), String>, RunOver> {
        let event = Event::WeightsPublished {
            version,
            manifest,
            digest,
        };
        self.ask(event, Reply::Verdict).await
    }

    /// Tell, and wait until it is on disk. The inner result says why the trainer cannot go on from there.
    pub async fn trainer_resumed(&self, step: Step) -> Result<Result<(), String>, RunOver> {
        self.ask(Event::TrainerResumed { step }, Reply::Verdict)
            .await
    }

    /// Tell, and wait until it is on disk. The inner result says why the trainer cannot have saved that step. `saved`:
    /// the checkpoint that has just come to the disk, which may be of a later step than those that need no batches.
    pub async fn checkpoint_saved(
        &self,
        step: Step,
        saved: Option<Step>,
    ) -> Result<Result<(), String>, RunOver> {
        let event = Event::CheckpointSaved { step };
        match saved {
            None => self.ask(event, Reply::Verdict).await,
            Some(saved) => self.ask(event, |waiter| Reply::Saved(waiter, saved)).await,
        }
    }

    /// Long poll for rollouts.
    pub async fn lease(&self, worker: WorkerId, max: u32) -> Result<LeaseReply, RunOver> {
        let event = |request| Event::LeaseRequested {
            request,
            worker,
            max,
        };
        self.long_poll(event, Reply::Lease).await
    }

    /// Long poll for a batch.
    pub async fn batch(&self, step: Step, rank: u32) -> Result<BatchReply, RunOver> {
        let event = |request| Event::BatchRequested {
            request,
            step,
            rank,
        };
        self.long_poll(event, Reply::Batch).await
    }

    /// The batch, should it be there; answered at once.
    pub async fn next_batch(&self, step: Step, rank: u32) -> Result<BatchReply, RunOver> {
        let event = |request| Event::NextBatchRequested {
            request,
            step,
            rank,
        };
        self.long_poll(event, Reply::Batch).await
    }

    /// Resolves once the driver has come to this message.
    pub fn ping(&self) -> oneshot::Receiver<()> {
        let (reply, answer) = oneshot::channel();
        // Where it is gone, so is the sender: that is an answer too.
        let _ = self.inbox.send(Message::Ping(reply));
        answer
    }

    /// What the core knows, and the time it knows it at.
    pub async fn status(&self) -> Result<(Status, Time), RunOver> {
        let (reply, answer) = oneshot::channel();
        self.inbox
            .send(Message::Status(reply))
            .map_err(|_| RunOver)?;
        answer.await.map_err(|_| RunOver)
    }
}

/// Withdraws the request when its waiter goes away unanswered.
struct PendingRequest<'a> {
    handle: &'a DriverHandle,
    id: RequestId,
    answered: bool,
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.handle.send(Event::RequestDropped { request: self.id });
        }
    }
}
