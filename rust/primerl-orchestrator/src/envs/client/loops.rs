//! The tasks of the client's thread: registration, leases, heartbeats, reports.

use super::super::wire::*;
use super::request::RequestError;
use super::{End, Notice, Registration, Shared};
use primerl_core::event::Outcome;
use primerl_core::{RolloutId, WorkerId};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Longest wait for the answer of a call that the orchestrator answers at once.
const PROMPT: Duration = Duration::from_secs(10);
/// An empty answer that comes faster than this was not a long poll.
const HARDLY_A_POLL: Duration = Duration::from_millis(100);

impl Shared {
    pub(super) async fn run(self: Arc<Self>) {
        let work = async {
            tokio::join!(
                self.register_loop(),
                self.lease_loop(),
                self.heartbeat_loop()
            )
        };
        tokio::select! {
            // The client has ended, but reports and model calls may still be running.
            _ = work => self.stop.cancelled().await,
            () = self.stop.cancelled() => {}
        }
    }

    async fn register_loop(&self) {
        while let Some(answer) = self.register().await {
            let registration = Registration {
                worker: answer.worker,
                heartbeat: Duration::from_secs_f64(answer.heartbeat_s.clamp(0.05, 60.0)),
                together: answer.leased_together.max(1),
                long_poll: Duration::from_secs_f64(answer.long_poll_s.clamp(0.0, 3600.0)),
            };
            self.mailbox.put(Notice::Registered(answer));
            self.registration.send_replace(Some(registration));
            let mut current = self.registration.subscribe();
            if current.wait_for(Option::is_none).await.is_err() {
                return;
            }
            self.mailbox.put(Notice::LeasesVoid);
        }
    }

    /// Asks until there is an answer; `None` if the orchestrator refuses, or is given up.
    async fn register(&self) -> Option<RegisterAnswer> {
        let mut backoff = Backoff::default();
        let request = &self.options.registration;
        loop {
            match self.post(REGISTER, request, PROMPT).await {
                Ok(answer) => return Some(answer),
                Err(RequestError::Refused(reason)) => {
                    self.refused(reason);
                    return None;
                }
                Err(_) if self.gave_up() => return None,
                Err(_) => backoff.pause().await,
            }
        }
    }

    async fn registered(&self) -> Registration {
        let mut current = self.registration.subscribe();
        loop {
            if let Some(registration) = *current.borrow_and_update() {
                return registration;
            }
            // It fails only when the sender is gone, which lives in `self`.
            let _ = current.changed().await;
        }
    }

    /// Waits until `worker` is no longer this process's number.
    async fn unregistered(&self, worker: WorkerId) {
        let other =
            |current: &Option<Registration>| current.is_none_or(|current| current.worker != worker);
        // It fails only when the sender is gone, which lives in `self`.
        let _ = self.registration.subscribe().wait_for(other).await;
    }

    /// The orchestrator answered 410 to `worker`.
    fn forgotten(&self, worker: WorkerId) {
        let mut rollouts = self.rollouts.lock();
        self.registration.send_if_modified(|current| {
            // A late 410 for an earlier registration says nothing about this one.
            let ours = current.is_some_and(|current| current.worker == worker);
            if ours {
                rollouts.held.clear();
                *current = None;
            }
            ours
        });
        drop(rollouts);
        self.shrank.notify_waiters();
    }

    /// The orchestrator has given `worker` up, because the owner did not move.
    fn given_up(&self, worker: WorkerId, reason: &str) {
        if self.pulse.is_held_up() {
            (self.options.end_process)(reason);
        }
        // The owner moves again by now, and can receive the notice.
        self.forgotten(worker);
    }

    async fn lease_loop(&self) {
        let mut backoff = Backoff::default();
        loop {
            let Registration {
                worker,
                together,
                long_poll,
                ..
            } = self.registered().await;
            let max = tokio::select! {
                max = self.free_capacity(together) => max,
                () = self.unregistered(worker) => continue,
            };
            let asked = Instant::now();
            let request = LeaseRequest { worker, max };
            // After a network failure this connection may be dead while heartbeats on another one get through.
            let within = long_poll + PROMPT;
            let answer = tokio::select! {
                answer = self.post::<_, LeaseAnswer>(LEASE, &request, within) => answer,
                // Another call learnt that the number is void: the result of this poll would be void too.
                () = self.unregistered(worker) => continue,
            };
            match answer {
                Ok(answer) => {
                    let idle = answer.rollouts.is_empty();
                    self.leased(worker, answer.rollouts);
                    if answer.finished {
                        return self.end(End::Finished(answer.reason));
                    }
                    if idle && asked.elapsed() < HARDLY_A_POLL {
                        backoff.pause().await;
                    } else {
                        backoff = Backoff::default();
                    }
                }
                Err(RequestError::WorkerUnknown) => self.forgotten(worker),
                Err(RequestError::WorkerBlocked(reason)) => self.given_up(worker, &reason),
                Err(RequestError::Refused(reason)) => return self.refused(reason),
                Err(RequestError::Failed(_)) => backoff.pause().await,
            }
        }
    }

    fn leased(&self, worker: WorkerId, leases: Vec<Lease>) {
        if leases.is_empty() {
            return;
        }
        let mut rollouts = self.rollouts.lock();
        // The worker registered again while the answer was on its way: these leases were void before they came.
        if self
            .registration
            .borrow()
            .is_some_and(|current| current.worker == worker)
        {
            rollouts
                .held
                .extend(leases.iter().map(|lease| lease.rollout));
            self.mailbox.put(Notice::Leased(leases));
        }
    }

    /// The number of rollouts for which there is room, of which `together` are leased at a time.
    async fn free_capacity(&self, together: u32) -> u32 {
        loop {
            let shrank = self.shrank.notified();
            let held = u32::try_from(self.rollouts.lock().held.len()).unwrap_or(u32::MAX);
            let free = self.options.max_concurrent.saturating_sub(held);
            if free >= together {
                return free - free % together;
            }
            shrank.await;
        }
    }

    async fn heartbeat_loop(&self) {
        loop {
            let registration = self.registered().await;
            self.heartbeat(registration.worker).await;
            if self.gave_up() {
                return;
            }
            self.pulse.pause(registration.heartbeat).await;
        }
    }

    /// Rollouts that are leased, or whose reports have no answer yet.
    fn running(&self) -> Vec<RolloutId> {
        let rollouts = self.rollouts.lock();
        let held = rollouts.held.iter();
        held.chain(&rollouts.reporting).copied().collect()
    }

    async fn heartbeat(&self, worker: WorkerId) {
        let running = self.running();
        let (still, held) = self.pulse.feel();
        let request = HeartbeatRequest {
            worker,
            running,
            still_s: Some(still.as_secs_f64()),
            held_at: held.at,
            held_by: held.by,
        };
        let answer: Result<HeartbeatAnswer, _> = self.post(HEARTBEAT, &request, PROMPT).await;
        match answer {
            Ok(answer) if !answer.cancel.is_empty() => {
                self.mailbox.put(Notice::Cancelled(answer.cancel))
            }
            Ok(_) | Err(RequestError::Failed(_)) => {}
            Err(RequestError::WorkerUnknown) => self.forgotten(worker),
            Err(RequestError::WorkerBlocked(reason)) => self.given_up(worker, &reason),
            Err(RequestError::Refused(reason)) => self
                .mailbox
                .put(Notice::Problem(format!("heartbeat refused: {reason}"))),
        }
    }

    pub(super) async fn send_report(&self, rollout: RolloutId, outcome: Outcome) {
        let mut backoff = Backoff::default();
        let mut request = ResultRequest {
            worker: WorkerId(0),
            rollout,
            outcome,
        };
        while !self.gave_up() {
            request.worker = self.registered().await.worker;
            match self.post::<_, ResultAnswer>(RESULT, &request, PROMPT).await {
                Ok(_) => break,
                Err(RequestError::WorkerUnknown) => self.forgotten(request.worker),
                Err(RequestError::WorkerBlocked(reason)) => self.given_up(request.worker, &reason),
                Err(RequestError::Failed(_)) => backoff.pause().await,
                Err(RequestError::Refused(reason)) => {
                    self.mailbox.put(Notice::Problem(format!(
                        "result of rollout {rollout} refused: {reason}"
                    )));
                    break;
                }
            }
        }
        self.rollouts.lock().reporting.remove(&rollout);
        self.shrank.notify_waiters();
    }

    pub(super) async fn goodbye(&self) {
        loop {
            let shrank = self.shrank.notified();
            if self.rollouts.lock().reporting.is_empty() {
                break;
            }
            shrank.await;
        }
        let registration = *self.registration.borrow();
        if let Some(Registration { worker, .. }) = registration {
            let request = LeaveRequest {
                worker,
                reason: None,
            };
            // Best effort: without it the leases are returned when heartbeats are missing.
            let _ = self.post::<_, LeaveAnswer>(LEAVE, &request, PROMPT).await;
        }
    }

    fn refused(&self, reason: String) {
        self.end(End::Refused {
            url: self.options.orchestrator_url.clone(),
            reason,
        });
    }

    /// Whether the orchestrator has been silent for too long; if so, the owner gets a notice.
    fn gave_up(&self) -> bool {
        let (silent, problem) = self.contact.lock().silence();
        let over = silent > self.options.give_up;
        if over {
            let url = self.options.orchestrator_url.clone();
            self.end(End::Unreachable {
                url,
                seconds: silent.as_secs(),
                reason: problem,
            });
        }
        over
    }

    fn end(&self, end: End) {
        if !std::mem::replace(&mut self.rollouts.lock().ended, true) {
            self.mailbox.put(Notice::Ended(end));
        }
    }
}

/// Doubling waits between attempts of one thing.
struct Backoff(Duration);

impl Default for Backoff {
    fn default() -> Self {
        Self(Duration::from_millis(100))
    }
}

impl Backoff {
    async fn pause(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(Duration::from_secs(2));
    }
}
