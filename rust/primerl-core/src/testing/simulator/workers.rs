//! What environment workers do in a simulation.

use super::Simulator;
use super::actors::{Action, Running, Worker};
use super::messages::MISSED_AFTER;
use super::process::Reply;
use super::restarts::SOON;
use crate::effect::LeasedRollout;
use crate::event::{Event, Outcome};
use crate::ids::*;
use crate::time::Duration;
use rand::Rng;
use std::collections::BTreeMap;

/// Longest wait for an answer that is given as soon as it is on disk.
const PROMPT: Duration = Duration(10_000_000);

impl Simulator {
    pub(super) fn worker_starts(&mut self, environment: EnvironmentId) {
        let name = format!("worker-{}", self.processes);
        self.processes += 1;
        self.worker_registers(Worker {
            environment,
            name,
            running: BTreeMap::new(),
            reporting: BTreeMap::new(),
            asking: false,
        });
    }

    fn worker_registers(&mut self, worker: Worker) {
        let id = WorkerId(self.next_worker);
        self.next_worker += 1;
        let (environment, name) = (worker.environment, worker.name.clone());
        self.witness.registers(id, &name);
        for rollout in worker.reporting.keys() {
            self.plan(SOON, Action::TellResult(id, *rollout));
        }
        self.workers.insert(id, worker);
        let known = self.core.open_workers();
        let same = known.filter(|known| known.name == name);
        let predecessor = same.map(|known| known.worker).next();
        if let Some(worker) = predecessor {
            let reason = None;
            self.send(Event::WorkerLeft { worker, reason });
        }
        self.send(Event::EnvironmentReady {
            environment,
            examples: self.scenario.examples,
            whole_groups: self.scenario.whole_groups,
        });
        self.send(Event::WorkerJoined {
            worker: id,
            environment,
            name,
        });
        self.heartbeat(id);
        self.ask_for_lease(id);
    }

    /// Whether the orchestrator knows the worker; one that it does not know registers again, and all its leases are void.
    pub(super) fn is_known(&mut self, id: WorkerId) -> bool {
        let known =
            self.disk.is_instant() || self.core.open_workers().any(|open| open.worker == id);
        if !known && let Some(worker) = self.workers.remove(&id) {
            self.restarts.lost_workers += 1;
            self.worker_registers(Worker {
                running: BTreeMap::new(),
                asking: false,
                ..worker
            });
        }
        known
    }

    pub(super) fn heartbeat(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let environment = worker.environment;
        if self.chance(self.scenario.faults.worker_dies) {
            self.workers.remove(&id);
            let after = self.spread(0.5, 20.0);
            return self.plan(after, Action::WorkerStarts(environment));
        }
        if !self.is_known(id) {
            return;
        }
        self.plan(Duration::from_secs(3), Action::Heartbeat(id));
        self.send(Event::WorkerSeen { worker: id });
        if !self.disk.is_instant() {
            self.compare_leases(id);
        }
    }

    /// What the worker runs and was not leased, it has to stop; what it was leased and does not know of is lost.
    fn compare_leases(&mut self, id: WorkerId) {
        let worker = &self.workers[&id];
        let is_unknown = |rollout: &RolloutId| !self.process.is_open(*rollout, id);
        let unknown: Vec<RolloutId> = worker.running.keys().copied().filter(is_unknown).collect();
        let open = self.process.open.iter().filter(|(_, (by, _))| *by == id);
        let settled = open.filter(|(_, (_, since))| self.now >= *since + MISSED_AFTER);
        let missed = settled.map(|(rollout, _)| *rollout).filter(|rollout| {
            !worker.running.contains_key(rollout) && !worker.reporting.contains_key(rollout)
        });
        for rollout in missed.collect::<Vec<_>>() {
            self.lease_missed(id, rollout);
        }
        for rollout in unknown {
            self.restarts.lost_leases += u64::from(!self.observer.is_leased(rollout));
            self.worker_cancels(id, rollout);
        }
    }

    pub(super) fn ask_for_lease(&mut self, id: WorkerId) {
        if !self.is_known(id) {
            return;
        }
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        let capacity = self.scenario.rollouts_per_worker as usize;
        let free = capacity.saturating_sub(worker.running.len());
        if free == 0 || std::mem::replace(&mut worker.asking, true) {
            return;
        }
        let request = self.new_request();
        self.lease_requests.insert(request, id);
        self.send(Event::LeaseRequested {
            request,
            worker: id,
            max: free as u32,
        });
    }

    pub(super) fn worker_gets(
        &mut self,
        request: RequestId,
        worker: WorkerId,
        rollouts: Vec<LeasedRollout>,
    ) {
        assert_eq!(
            self.lease_requests.remove(&request),
            Some(worker),
            "a lease goes to the worker that asked"
        );
        if self.message_fault(self.scenario.faults.lease_lost) {
            return self.lease_is_lost(worker, &rollouts);
        }
        let mut capacity = self.scenario.rollouts_per_worker as usize;
        if self.scenario.whole_groups {
            capacity += rollouts.len();
        }
        for leased in rollouts {
            let running = Running {
                example: leased.example,
                turns_left: self.rng.random_range(1..=4),
                slow: self.chance(self.scenario.faults.rollout_slow),
                two_seats: self.chance(0.2),
                turns: Vec::new(),
                unanswered: false,
            };
            let after = self.spread(0.01, 0.5);
            // A worker that died while it waited leaves its lease to its deadline.
            let Some(known) = self.workers.get_mut(&worker) else {
                continue;
            };
            assert!(leased.environment == known.environment && known.running.len() < capacity);
            self.witness.gets_lease(worker, &leased);
            known.running.insert(leased.rollout, running);
            self.plan(after, Action::BeginTurn(worker, leased.rollout));
        }
        let Some(known) = self.workers.get_mut(&worker) else {
            return;
        };
        known.asking = false;
        let after = self.spread(0.01, 0.1);
        self.plan(after, Action::AskForLease(worker));
    }

    pub(super) fn worker_gets_nothing(&mut self, request: RequestId, finished: bool) {
        let id = self
            .lease_requests
            .remove(&request)
            .expect("somebody asked");
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.asking = false;
            if finished {
                self.witness.is_over();
            } else {
                self.plan(Duration(1_000), Action::AskForLease(id));
            }
        }
    }

    pub(super) fn worker_cancels(&mut self, id: WorkerId, rollout: RolloutId) {
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.running.remove(&rollout);
            self.plan(Duration(1_000), Action::AskForLease(id));
            if self.message_fault(self.scenario.faults.report_late) {
                self.plan(Duration::from_secs(2), Action::ReportsLate(id, rollout));
            }
        }
    }

    /// Tells the result until it is answered.
    pub(super) fn tell_result(&mut self, id: WorkerId, rollout: RolloutId) {
        let worker = self.workers.get(&id);
        let outcome = worker
            .and_then(|worker| worker.reporting.get(&rollout))
            .cloned();
        let Some(outcome) = outcome else { return };
        if !self.is_known(id) {
            return;
        }
        if !self.disk.is_instant() {
            self.plan(PROMPT, Action::TellResult(id, rollout));
        }
        self.send_result(id, rollout, outcome);
    }

    pub(super) fn send_result(&mut self, worker: WorkerId, rollout: RolloutId, outcome: Outcome) {
        let reply = Reply::Report {
            worker,
            rollout,
            open: self.process.is_open(rollout, worker),
        };
        let event = Event::RolloutFinished {
            rollout,
            worker,
            outcome,
        };
        self.ask(event, reply);
    }

    pub(super) fn report_answered(&mut self, id: WorkerId, rollout: RolloutId, open: bool) {
        if open {
            self.witness.accepted(rollout);
        }
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.reporting.remove(&rollout);
        }
    }
}
