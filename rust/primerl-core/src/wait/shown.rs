//! Every wait there is, for `/status`.

use super::{Armed, Wait};
use crate::Core;
use crate::evaluation::Round;
use crate::ids::*;
use crate::status::WaitStatus;
use std::collections::BTreeMap;

impl Core {
    /// Every wait there is, in the order of who waits for whom: the trainer for a batch, an evaluation or groups for what
    /// they lack, those that are warned about, and last workers that hold no one up. What rollouts in flight are doing, the
    /// shell adds.
    pub(crate) fn all_waits(&self) -> Vec<WaitStatus> {
        let round = self.evaluations.round.iter().map(round_wait);
        let custom = self.signals.custom.iter();
        let custom = custom.map(|(id, armed)| (Wait::Advantages(*id), *armed));
        let teacher = self.signals.teacher.iter();
        let teacher = teacher.map(|(id, armed)| (Wait::Teacher(*id), *armed));
        let warned = self.waits.iter().map(|(wait, armed)| (*wait, *armed));
        let armed = round
            .chain(custom)
            .chain(teacher)
            .chain(warned)
            .chain(self.waits_of_blocked());
        let armed = armed.map(|(wait, Armed { since, deadline })| WaitStatus {
            who: self.who(wait),
            waiting_for: self.words(wait),
            since,
            deadline,
            is_usual: false,
            is_end: self.is_end(wait),
        });
        let requests = self.waits_for_batches();
        requests.chain(armed).chain(self.waits_of_idle()).collect()
    }

    fn waits_for_batches(&self) -> impl Iterator<Item = WaitStatus> + '_ {
        self.batches.requests.values().map(|request| WaitStatus {
            who: format!("trainer, data rank {}", request.rank),
            waiting_for: self.words(self.step_wait(request.step)),
            since: self.trainer.waiting_since.unwrap_or(self.now),
            deadline: request.deadline,
            is_usual: false,
            is_end: false,
        })
    }

    fn waits_of_blocked(&self) -> impl Iterator<Item = (Wait, Armed)> + '_ {
        self.workers.registered.iter().filter_map(|(id, worker)| {
            let since = worker.blocked.as_ref()?.since;
            let running = worker.running.iter();
            let held = running.filter_map(|id| self.rollouts.in_flight.get(id));
            let deadline = held.map(|rollout| rollout.deadline).min();
            let deadline = deadline.unwrap_or(since + self.config.rollout_span(worker.environment));
            Some((Wait::Blocked(*id), Armed { since, deadline }))
        })
    }

    /// Workers that have nothing to do.
    fn waits_of_idle(&self) -> Vec<WaitStatus> {
        let mut reasons: BTreeMap<EnvironmentId, String> = BTreeMap::new();
        let mut waits = Vec::new();
        for lease in self.leases.requests.values() {
            let Some(worker) = self.workers.registered.get(&lease.worker) else {
                continue;
            };
            if !worker.running.is_empty() || worker.blocked.is_some() {
                continue;
            }
            let environment = lease.environment;
            let reason = reasons
                .entry(environment)
                .or_insert_with(|| self.words(self.lease_wait(environment)));
            waits.push(WaitStatus {
                who: self.short_name(lease.worker),
                waiting_for: reason.clone(),
                since: lease.deadline - self.config.timeouts.long_poll,
                deadline: lease.deadline,
                is_usual: true,
                is_end: false,
            });
        }
        waits
    }
}

fn round_wait(round: &Round) -> (Wait, Armed) {
    let wait = match round.is_over() {
        false => Wait::Evaluation(round.version),
        // Else it would be reported and closed.
        true => Wait::EvaluationReport(round.version),
    };
    let (since, deadline) = (round.since, round.deadline);
    (wait, Armed { since, deadline })
}
