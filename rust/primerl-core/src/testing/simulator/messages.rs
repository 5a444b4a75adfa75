//! Messages that are lost, repeated, or come too late.

use super::Simulator;
use super::actors::Action;
use crate::effect::LeasedRollout;
use crate::event::{Event, Outcome};
use crate::failure::RolloutError;
use crate::ids::*;
use crate::testing::{outcome, turn};
use crate::time::Duration;
use rand::Rng;

/// A worker that does not name a lease in its heartbeats for so long has not got it.
pub const MISSED_AFTER: Duration = Duration::from_secs(10);

impl Simulator {
    pub(super) fn message_fault(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.message_rng.random_bool(probability)
    }

    /// The worker knows nothing of the rollouts; its call failed, and it asks again.
    pub(super) fn lease_is_lost(&mut self, id: WorkerId, rollouts: &[LeasedRollout]) {
        // Where there is a disk, heartbeats bring it to light.
        let told = if self.disk.is_instant() {
            rollouts
        } else {
            &[]
        };
        for leased in told {
            self.plan(MISSED_AFTER, Action::LeaseMissed(id, leased.rollout));
        }
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.asking = false;
            self.plan(Duration::from_secs(1), Action::AskForLease(id));
        }
    }

    /// What the shell says of a lease that is missing in its worker's heartbeats.
    pub(super) fn lease_missed(&mut self, worker: WorkerId, rollout: RolloutId) {
        if !self.workers.contains_key(&worker) {
            return;
        }
        let error = RolloutError {
            kind: "lease_lost".to_owned(),
            message: "the worker does not know of it".to_owned(),
            ..RolloutError::default()
        };
        let outcome = Outcome {
            error: Some(error),
            ..Outcome::default()
        };
        self.send(Event::RolloutFinished {
            rollout,
            worker,
            outcome,
        });
    }

    /// A turn and a good end of a rollout that is over: neither may change anything.
    pub(super) fn reports_late(&mut self, worker: WorkerId, rollout: RolloutId) {
        // A restart may have lost that it is.
        if self.process.is_open(rollout, worker) {
            return;
        }
        let before = self.core.counters();
        let token = self.next_token;
        self.next_token += 1;
        self.send(Event::TurnFinished {
            rollout,
            turn: turn(None, &[1], &[token], 0),
        });
        self.send(Event::RolloutFinished {
            rollout,
            worker,
            outcome: outcome(1.0),
        });
        assert_eq!(
            self.core.counters().trained + self.core.counters().failed,
            before.trained + before.failed,
            "a late report of rollout {rollout} counted"
        );
        self.late_reports += 1;
    }
}
