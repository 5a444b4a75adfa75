//! Who waits for the result of an event, and gets it.

use super::*;

impl Driver {
    /// Keeps who waits for the event's result, until there is one. Answers with the step of a checkpoint next to which
    /// the state after the event is kept.
    pub(super) fn keep_waiter(
        &mut self,
        number: u64,
        reply: Option<Reply>,
        event: &Event,
    ) -> Option<Step> {
        if let Event::RequestDropped { request } = event {
            self.replies.remove(request);
        }
        match reply? {
            Reply::Written(waiter) => self.wait_until_written(number, waiter),
            Reply::Accepted(waiter) => self.accept(number, waiter, event),
            Reply::Verdict(waiter) => {
                self.judge(number, waiter, event);
            }
            Reply::Saved(waiter, step) => {
                return self.judge(number, waiter, event).then_some(step);
            }
            reply @ (Reply::Lease(_) | Reply::Batch(_)) => self.keep_reply(reply, event),
        }
        None
    }

    fn wait_until_written(&mut self, number: u64, waiter: oneshot::Sender<()>) {
        self.written.push_back((number, waiter));
        self.flush_now = true;
        self.note_wait();
    }

    /// Keeps it until the core answers the request.
    fn keep_reply(&mut self, reply: Reply, event: &Event) {
        if let Event::LeaseRequested { request, .. }
        | Event::BatchRequested { request, .. }
        | Event::NextBatchRequested { request, .. } = event
        {
            self.replies.insert(*request, reply);
        }
    }

    /// The worker learns whether the rollout that it reports was still open.
    fn accept(&mut self, number: u64, waiter: oneshot::Sender<bool>, event: &Event) {
        let Event::RolloutFinished {
            rollout, worker, ..
        } = event
        else {
            return;
        };
        let open = self.effects.is_open(*rollout, *worker);
        self.wait_for_journal(number, Durable::Accepted(waiter, open));
    }

    /// The trainer learns whether its request is refused; `true` if it is not.
    fn judge(
        &mut self,
        number: u64,
        waiter: oneshot::Sender<Result<(), String>>,
        event: &Event,
    ) -> bool {
        let verdict = self.refusal(event).map_or(Ok(()), Err);
        let is_accepted = verdict.is_ok();
        self.wait_for_journal(number, Durable::Verdict(waiter, verdict));
        is_accepted
    }

    /// Why the core refuses the trainer's request.
    fn refusal(&self, event: &Event) -> Option<String> {
        match event {
            Event::WeightsPublished {
                version, digest, ..
            } => self.core.refuses_weights(*version, digest),
            Event::TrainerResumed { step } => self.core.refuses_resume(*step),
            Event::CheckpointSaved { step } => self.core.refuses_checkpoint(*step),
            _ => None,
        }
    }

    pub(super) fn batch_waiter(&mut self, effect: &Effect) -> Option<oneshot::Sender<BatchReply>> {
        let Effect::Batch { request, .. } = effect else {
            return None;
        };
        self.take_batch_reply(*request)
    }

    fn take_batch_reply(&mut self, request: RequestId) -> Option<oneshot::Sender<BatchReply>> {
        match self.replies.remove(&request) {
            Some(Reply::Batch(waiter)) => Some(waiter),
            _ => None,
        }
    }

    pub(super) fn lease(
        &mut self,
        request: RequestId,
        worker: WorkerId,
        rollouts: Vec<LeasedRollout>,
    ) {
        self.effects.open(worker, &rollouts);
        let leased: Vec<RolloutId> = rollouts.iter().map(|rollout| rollout.rollout).collect();
        let delivered = match self.replies.remove(&request) {
            Some(Reply::Lease(waiter)) => waiter.send(LeaseReply::Rollouts(rollouts)).is_ok(),
            _ => false,
        };
        if !delivered {
            self.effects.lease_lost(worker, &leased);
        }
    }

    /// A client that hung up will not ask for the answer.
    pub(super) fn answer_lease(&mut self, request: RequestId, answer: LeaseReply) {
        if let Some(Reply::Lease(waiter)) = self.replies.remove(&request) {
            let _ = waiter.send(answer);
        }
    }

    pub(super) fn answer_batch(&mut self, request: RequestId, answer: BatchReply) {
        if let Some(waiter) = self.take_batch_reply(request) {
            let _ = waiter.send(answer);
        }
    }
}
