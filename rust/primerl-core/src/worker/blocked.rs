//! Workers that their environment blocks.
//!
//! A worker lives by its client's heartbeats, which continue while its environment keeps its event loop from running: code
//! that sleeps, computes or asks a server without `await`. No rollout that it holds makes progress then, and not even
//! its own time limits work. So a worker that is blocked gets no leases, and when the first lease that it holds runs
//! out it is given up with all of them: the rollout that blocks it has failed, the others had no part in it.

use super::Worker;
use crate::Core;
use crate::counters::CancelReason;
use crate::effect::Effect;
use crate::event::{BLOCKED_AFTER, Block};
use crate::failure::RolloutError;
use crate::ids::*;
use crate::status::BlockStatus;
use crate::time::{Duration, Time};
use serde::{Deserialize, Serialize};

/// A worker whose event loop does not run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Blocked {
    pub since: Time,
    at: Option<String>,
    rollout: Option<RolloutId>,
    /// How long it had lasted when it was last warned of.
    #[serde(rename = "told")]
    warned_after: Duration,
}

impl Blocked {
    fn begin(since: Time) -> Blocked {
        Blocked {
            since,
            at: None,
            rollout: None,
            warned_after: Duration::default(),
        }
    }

    /// Takes what the worker says now; `true` if it has lasted long enough for another warning.
    fn update(&mut self, block: Block) -> bool {
        self.at = block.at.or(self.at.take());
        self.rollout = block.rollout.or(self.rollout);
        let is_due = block.lasted.0 >= self.warned_after.0 * 2;
        if is_due {
            self.warned_after = block.lasted;
        }
        is_due
    }

    /// ` (file.py:3)`, where the line of code is known.
    pub fn code(&self) -> String {
        self.at
            .as_ref()
            .map_or_else(String::new, |at| format!(" ({at})"))
    }

    /// Another block than one that began then: the loop has turned in between.
    fn began_after(&self, since: Time) -> bool {
        // What the worker says was on its way for a moment.
        self.since + BLOCKED_AFTER < since
    }
}

impl Core {
    pub(crate) fn worker_blocked(&mut self, id: WorkerId, block: Option<Block>) {
        let Some(worker) = self.workers.registered.get_mut(&id) else {
            return self.ignore("block of an unknown worker");
        };
        let Some(block) = block.filter(|block| block.lasted >= BLOCKED_AFTER) else {
            return self.worker_runs_again(id);
        };
        let lasted = block.lasted;
        let since = self.now - lasted;
        let before = worker.blocked.take();
        let before = before.filter(|blocked| !blocked.began_after(since));
        let is_new = before.is_none();
        let mut blocked = before.unwrap_or_else(|| Blocked::begin(since));
        let is_due = blocked.update(block);
        let code = blocked.code();
        worker.blocked = Some(blocked);
        if is_new {
            self.park_requests(id);
        }
        if is_due {
            let (who, seconds) = (self.worker_of(id), lasted.as_secs_f64());
            self.warn(format!(
                "{who} is blocked by its environment for {seconds:.0} s{code}; it gets no rollouts until its \
                 event loop runs again"
            ));
        }
    }

    fn worker_runs_again(&mut self, id: WorkerId) {
        let Some(blocked) = self
            .workers
            .registered
            .get_mut(&id)
            .and_then(|one| one.blocked.take())
        else {
            return;
        };
        let (who, seconds) = (
            self.worker_of(id),
            self.now.since(blocked.since).as_secs_f64(),
        );
        self.warn(format!(
            "{who} runs again, after its environment had blocked it for {seconds:.0} s{}",
            blocked.code()
        ));
        for request in self.leases.of(id) {
            let lease = self.leases.requests[&request];
            self.environments[lease.environment].add_request(lease.place, request);
        }
    }

    /// Its requests wait on, and are not served.
    fn park_requests(&mut self, id: WorkerId) {
        for request in self.leases.of(id) {
            let lease = self.leases.requests[&request];
            let state = &mut self.environments[lease.environment];
            if state.requests.remove(&lease.place).is_some() {
                state.unasked_since = self.now;
            }
        }
    }

    pub(crate) fn is_blocked(&self, id: WorkerId) -> bool {
        let worker = self.workers.registered.get(&id);
        worker.is_some_and(|worker| worker.blocked.is_some())
    }

    pub(crate) fn block_status(&self, worker: &Worker) -> Option<BlockStatus> {
        let blocked = worker.blocked.as_ref()?;
        Some(BlockStatus {
            since: blocked.since,
            at: blocked.at.clone(),
            rollout: blocked.rollout,
        })
    }

    /// A lease of a blocked worker has run out: nothing that it holds would end in time.
    pub(crate) fn give_up_blocked(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.registered.get(&id) else {
            return;
        };
        let Some(blocked) = worker.blocked.clone() else {
            return;
        };
        let running = |rollout: &RolloutId| worker.running.contains(rollout);
        let blocks = blocked.rollout.filter(running);
        let seconds = self.now.since(blocked.since).as_secs_f64();
        let how = format!(
            "was blocked by its environment for {seconds:.0} s{}, until the time of a rollout was up",
            blocked.code()
        );
        self.effects.push(Effect::WorkerLost {
            worker: id,
            reason: format!("{} {how}", self.worker_of(id)),
            is_blocked: true,
        });
        if let Some(rollout) = blocks {
            let rollout = self.cancel(rollout, CancelReason::Timeout);
            let message = format!(
                "its environment's code blocked the worker for {seconds:.0} s{}: what takes long has to be awaited, or \
                 run in a thread",
                blocked.code()
            );
            self.fail(rollout, &RolloutError::new("environment", message));
        }
        self.remove_worker(id, &how, "the worker was blocked by its environment");
    }
}
