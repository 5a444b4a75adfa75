//! The environment workers that registered, what each was leased, and what it gets with its next heartbeat's answer.

use parking_lot::Mutex;
use primerl_core::{EnvironmentId, RolloutId, WorkerId};
use serde::Serialize;
use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};
use tokio::sync::Notify;

/// A lease that the worker does not list as running this long after it was sent was lost on the way.
const LEASE_SETTLES: Duration = Duration::from_secs(10);

#[derive(Debug)]
struct Worker {
    name: String,
    environment: EnvironmentId,
    last_seen: Instant,
    /// When its last sign of life was reported to the core.
    told: Instant,
    /// Leased and not closed.
    leased: HashMap<RolloutId, Instant>,
    /// Cancelled, and not yet known to have stopped.
    cancelled: HashSet<RolloutId>,
    running: usize,
    /// Its environment's code blocks the worker's event loop, according to its last heartbeat.
    is_blocked: bool,
}

impl Worker {
    /// Leases that it does not list, in order.
    fn lost(&self, running: &HashSet<RolloutId>, now: Instant) -> Vec<RolloutId> {
        let not_listed = self.leased.iter().filter(|(rollout, since)| {
            !running.contains(rollout) && now.duration_since(**since) >= LEASE_SETTLES
        });
        let mut lost: Vec<RolloutId> = not_listed.map(|(rollout, _)| *rollout).collect();
        lost.sort_unstable();
        lost
    }

    /// A lease that is on its way may be cancelled before the worker lists it: the request is repeated until it has
    /// settled.
    fn forget_stopped(&mut self, running: &HashSet<RolloutId>, now: Instant) {
        let leased = &self.leased;
        let has_settled = |rollout: &RolloutId| match leased.get(rollout) {
            Some(since) => now.duration_since(*since) >= LEASE_SETTLES,
            None => true,
        };
        self.cancelled
            .retain(|rollout| running.contains(rollout) || !has_settled(rollout));
    }
}

/// One line of `/status`.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerStatus {
    pub worker: WorkerId,
    pub name: String,
    pub environment: String,
    pub last_seen_s: f64,
    pub running: usize,
    /// Its environment's code blocks the worker's event loop.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blocked: Option<Blocked>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Blocked {
    pub since_s: f64,
    /// The line of code, if it is known.
    pub at: Option<String>,
    /// The rollout whose code it is, if it is known.
    pub rollout: Option<RolloutId>,
}

/// What a heartbeat shows.
#[derive(Debug, PartialEq, Eq)]
pub struct Heartbeat {
    pub cancel: Vec<RolloutId>,
    /// Leased, but unknown to the worker.
    pub lost: Vec<RolloutId>,
}

/// Written by the endpoints (for requests of a worker) and by the driver (for the core's decisions); held for a few map
/// operations.
#[derive(Debug, Default)]
pub struct Workers {
    workers: Mutex<Table>,
    /// A worker is gone.
    removed: Notify,
}

#[derive(Debug, Default)]
struct Table {
    next: u64,
    by_id: HashMap<WorkerId, Worker>,
    /// Workers that were given up because their environments blocked them, and why: their processes have to end.
    blocked: HashMap<WorkerId, String>,
}

impl Worker {
    fn new(name: &str, environment: EnvironmentId) -> Worker {
        Worker {
            name: name.into(),
            environment,
            last_seen: Instant::now(),
            told: Instant::now(),
            leased: HashMap::new(),
            cancelled: HashSet::new(),
            running: 0,
            is_blocked: false,
        }
    }
}

impl Workers {
    /// A new number for a process; also returns the number of its predecessor of the same name, which is gone.
    pub fn register(&self, name: &str, environment: EnvironmentId) -> (WorkerId, Option<WorkerId>) {
        let mut table = self.workers.lock();
        let id = WorkerId(table.next);
        table.next += 1;
        let same = |worker: &Worker| worker.name == name && worker.environment == environment;
        let predecessor = table
            .by_id
            .iter()
            .find(|(_, worker)| same(worker))
            .map(|(id, _)| *id);
        if let Some(predecessor) = predecessor {
            table.by_id.remove(&predecessor);
        }
        table.by_id.insert(id, Worker::new(name, environment));
        (id, predecessor)
    }

    /// Restores the workers that were registered before a restart, and their leases. `next` is the number of the next
    /// one.
    pub fn restore<'a>(
        &self,
        workers: impl Iterator<Item = (WorkerId, EnvironmentId, &'a str)>,
        leases: impl Iterator<Item = (WorkerId, RolloutId)>,
        next: WorkerId,
    ) {
        let mut table = self.workers.lock();
        table.next = next.0;
        for (id, environment, name) in workers {
            table.by_id.insert(id, Worker::new(name, environment));
        }
        for (id, rollout) in leases {
            if let Some(worker) = table.by_id.get_mut(&id) {
                worker.leased.insert(rollout, Instant::now());
            }
        }
    }

    /// Notes a sign of life. `None`: unknown, it has to register. `Some(true)`: none was reported to the core for
    /// `interval`.
    pub fn seen(&self, id: WorkerId, interval: Duration) -> Option<bool> {
        let mut table = self.workers.lock();
        let worker = table.by_id.get_mut(&id)?;
        let now = Instant::now();
        worker.last_seen = now;
        let due = now.duration_since(worker.told) >= interval;
        if due {
            worker.told = now;
        }
        Some(due)
    }

    pub fn leased(&self, id: WorkerId, rollouts: impl Iterator<Item = RolloutId>) {
        if let Some(worker) = self.workers.lock().by_id.get_mut(&id) {
            let now = Instant::now();
            worker.leased.extend(rollouts.map(|rollout| (rollout, now)));
        }
    }

    pub fn cancel(&self, id: WorkerId, rollout: RolloutId) {
        if let Some(worker) = self.workers.lock().by_id.get_mut(&id) {
            worker.cancelled.insert(rollout);
        }
    }

    pub fn closed(&self, id: WorkerId, rollout: RolloutId) {
        if let Some(worker) = self.workers.lock().by_id.get_mut(&id) {
            worker.leased.remove(&rollout);
        }
    }

    /// Compares what the worker runs with its leases. `None`: unknown worker.
    pub fn heartbeat(&self, id: WorkerId, running: &[RolloutId]) -> Option<Heartbeat> {
        let mut table = self.workers.lock();
        let worker = table.by_id.get_mut(&id)?;
        let now = Instant::now();
        worker.last_seen = now;
        worker.told = now;
        worker.running = running.len();
        // A crash took the lease from the journal, or the request to stop it from this process. A rollout whose report
        // is on its way is listed too; its worker ignores that.
        let unknown = running
            .iter()
            .filter(|rollout| !worker.leased.contains_key(rollout));
        worker.cancelled.extend(unknown);
        let running: HashSet<RolloutId> = running.iter().copied().collect();
        let lost = worker.lost(&running, now);
        let mut cancel: Vec<RolloutId> = worker.cancelled.iter().copied().collect();
        cancel.sort_unstable();
        worker.forget_stopped(&running, now);
        Some(Heartbeat { cancel, lost })
    }

    /// Removes a worker; returns its leases that it has not reported, or `None` if it was not known.
    pub fn remove(&self, id: WorkerId) -> Option<Vec<RolloutId>> {
        let worker = self.workers.lock().by_id.remove(&id);
        self.removed.notify_waiters();
        let mut leased: Vec<RolloutId> = worker?.leased.into_keys().collect();
        leased.sort_unstable();
        Some(leased)
    }

    /// The core gave a worker up. `blocked`: why its process has to end.
    pub fn lose(&self, id: WorkerId, blocked: Option<String>) {
        self.remove(id);
        if let Some(reason) = blocked {
            self.workers.lock().blocked.insert(id, reason);
        }
    }

    /// Why the process of an unknown worker has to end, if it has to.
    pub fn why_it_ends(&self, id: WorkerId) -> Option<String> {
        self.workers.lock().blocked.get(&id).cloned()
    }

    /// Notes whether the worker's environment blocks it. Returns whether to report it to the core: while it is blocked,
    /// and once when it is no longer.
    pub fn note_block(&self, id: WorkerId, is_blocked: bool) -> bool {
        let mut table = self.workers.lock();
        let Some(worker) = table.by_id.get_mut(&id) else {
            return false;
        };
        let was_blocked = std::mem::replace(&mut worker.is_blocked, is_blocked);
        is_blocked || was_blocked
    }

    /// Waits until every worker has left or was lost.
    pub async fn wait_until_empty(&self) {
        loop {
            let removed = self.removed.notified();
            if self.workers.lock().by_id.is_empty() {
                return;
            }
            removed.await;
        }
    }

    /// `environments` are names by id.
    pub fn status(&self, environments: &[String]) -> Vec<WorkerStatus> {
        let now = Instant::now();
        let mut workers: Vec<WorkerStatus> = self
            .workers
            .lock()
            .by_id
            .iter()
            .map(|(id, worker)| WorkerStatus {
                worker: *id,
                name: worker.name.clone(),
                environment: environments
                    .get(worker.environment.0 as usize)
                    .cloned()
                    .unwrap_or_default(),
                last_seen_s: now.duration_since(worker.last_seen).as_secs_f64(),
                running: worker.running,
                blocked: None,
            })
            .collect();
        workers.sort_by_key(|worker| worker.worker);
        workers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_registers_again_replaces_itself() {
        let workers = Workers::default();
        let (first, predecessor) = workers.register("w", EnvironmentId(0));
        assert_eq!(predecessor, None);
        let (second, predecessor) = workers.register("w", EnvironmentId(0));
        assert_eq!(predecessor, Some(first));
        assert_eq!(workers.seen(first, Duration::ZERO), None);
        assert_eq!(workers.seen(second, Duration::from_secs(3600)), Some(false));
        assert_eq!(workers.seen(second, Duration::ZERO), Some(true));
    }

    #[test]
    fn what_a_crash_took_from_the_journal_is_stopped() {
        let workers = Workers::default();
        let id = WorkerId(4);
        let known = [(id, EnvironmentId(0), "w")].into_iter();
        workers.restore(known, [(id, RolloutId(9))].into_iter(), WorkerId(7));
        // A rollout with a lower number than the open ones: cancelled before the crash, or lost in an earlier one.
        let running = [RolloutId(8), RolloutId(9), RolloutId(10)];
        let told = workers.heartbeat(id, &running).expect("is known");
        assert_eq!(told.cancel, [RolloutId(8), RolloutId(10)]);
        assert_eq!(workers.register("v", EnvironmentId(0)).0, WorkerId(7));
        assert_eq!(workers.register("w", EnvironmentId(0)).1, Some(id));
    }

    #[test]
    fn a_cancellation_is_repeated_until_the_worker_has_stopped() {
        let workers = Workers::default();
        let (id, _) = workers.register("w", EnvironmentId(0));
        workers.leased(id, [RolloutId(1), RolloutId(2)].into_iter());
        workers.cancel(id, RolloutId(1));
        workers.closed(id, RolloutId(1));
        let told = workers
            .heartbeat(id, &[RolloutId(1), RolloutId(2)])
            .expect("is known");
        assert_eq!(
            told,
            Heartbeat {
                cancel: vec![RolloutId(1)],
                lost: vec![]
            }
        );
        workers.heartbeat(id, &[RolloutId(2)]).expect("is known");
        let told = workers.heartbeat(id, &[RolloutId(2)]).expect("is known");
        assert_eq!(told.cancel, []);
        assert_eq!(workers.heartbeat(WorkerId(9), &[]), None);
    }
}
