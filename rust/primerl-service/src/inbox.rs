//! The channel to the driver, the thread that owns the core: events in, answers out.

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

/// Who waits for the result of an event.
#[derive(Debug)]
pub enum Reply {
    Lease(oneshot::Sender<LeaseReply>),
    Batch(oneshot::Sender<BatchReply>),
    /// Notified once the operating system has the event, which then survives this process.
    Written(oneshot::Sender<()>),
    /// Notified once the event is durable; the value says whether the rollout was still open before it.
    Accepted(oneshot::Sender<bool>),
    /// Notified once the event is durable; the error says why the trainer is not followed.
    Verdict(oneshot::Sender<Result<(), String>>),
    /// The same, for a trainer whose checkpoint of this step is now on disk: the run's state is saved next to it.
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
    /// Whether the driver still accepts messages.
    Ping(oneshot::Sender<()>),
}

/// Sends messages to the driver. Cheap to clone, never blocks.
#[derive(Clone, Debug)]
pub struct DriverHandle {
    inbox: mpsc::UnboundedSender<Message>,
    next_request: Arc<AtomicU64>,
}

/// The receiving end of a [`DriverHandle`].
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
    /// Sends an event. After the run is over, no one needs it.
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

    /// Sends an event, and waits for the answer.
    async fn ask<T>(
        &self,
        event: Event,
        reply: impl FnOnce(oneshot::Sender<T>) -> Reply,
    ) -> Result<T, RunOver> {
        let (sender, answer) = oneshot::channel();
        self.send_with(event, Some(reply(sender)))?;
        answer.await.map_err(|_| RunOver)
    }

    /// Sends a request that may wait long. Dropping the future withdraws the request.
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

    /// Sends an event at once, in order with other calls; then waits until it would survive a crash of this process.
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

    /// Writes a note at once; then waits until it would survive a crash of this process.
    pub async fn noted(&self, rollout: RolloutId, note: Arc<str>) -> Result<(), RunOver> {
        self.ask(Event::Noted { rollout, note }, Reply::Written)
            .await
    }

    /// Sends an event, and waits until it is on disk. Returns whether the rollout was open.
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

    /// Sends an event, and waits until it is on disk. The inner result says whether the weights are used, or why not.
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

    /// Sends an event, and waits until it is on disk. The inner result says why the trainer cannot continue from there.
    pub async fn trainer_resumed(&self, step: Step) -> Result<Result<(), String>, RunOver> {
        self.ask(Event::TrainerResumed { step }, Reply::Verdict)
            .await
    }

    /// Sends an event, and waits until it is on disk. The inner result says why the trainer cannot have saved that
    /// step. `saved`: the checkpoint that was just written, which may belong to a later step than those that need no
    /// batches.
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

    /// The batch, if it exists; answers at once.
    pub async fn next_batch(&self, step: Step, rank: u32) -> Result<BatchReply, RunOver> {
        let event = |request| Event::NextBatchRequested {
            request,
            step,
            rank,
        };
        self.long_poll(event, Reply::Batch).await
    }

    /// Resolves once the driver has reached this message.
    pub fn ping(&self) -> oneshot::Receiver<()> {
        let (reply, answer) = oneshot::channel();
        // If the driver is gone, the sender is dropped, which ends the wait, too.
        let _ = self.inbox.send(Message::Ping(reply));
        answer
    }

    /// The core's status, and the time of that status.
    pub async fn status(&self) -> Result<(Status, Time), RunOver> {
        let (reply, answer) = oneshot::channel();
        self.inbox
            .send(Message::Status(reply))
            .map_err(|_| RunOver)?;
        answer.await.map_err(|_| RunOver)
    }
}

/// Withdraws the request if its waiter is dropped before the answer.
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
