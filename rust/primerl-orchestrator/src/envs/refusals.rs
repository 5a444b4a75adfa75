//! Workers that were refused: a run without other workers waits for one, and has to report why.

use parking_lot::Mutex;
use primerl_core::EnvironmentId;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::Instant;

#[derive(Debug)]
struct Refused {
    workers: u64,
    since: Instant,
    last: String,
    reason: String,
}

/// One line of `/status`.
#[derive(Clone, Debug, Serialize)]
pub struct RefusedStatus {
    pub environment: String,
    /// Registrations refused since one was accepted.
    pub refused: u64,
    /// The last one's name.
    pub name: String,
    pub reason: String,
    pub since_s: f64,
}

/// By environment, since a worker of it was accepted. Written at registration; held for one map operation.
#[derive(Debug, Default)]
pub struct Refusals(Mutex<BTreeMap<EnvironmentId, Refused>>);

impl Refusals {
    pub fn note(&self, environment: EnvironmentId, name: &str, reason: &str) {
        let mut refusals = self.0.lock();
        let refused = refusals.entry(environment).or_insert_with(|| Refused {
            workers: 0,
            since: Instant::now(),
            last: String::new(),
            reason: String::new(),
        });
        refused.workers += 1;
        refused.last = name.to_owned();
        refused.reason = reason.to_owned();
    }

    pub fn forget(&self, environment: EnvironmentId) {
        self.0.lock().remove(&environment);
    }

    /// `environments` are names by id.
    pub fn status(&self, environments: &[String]) -> Vec<RefusedStatus> {
        let refusals = self.0.lock();
        let line = |(id, refused): (&EnvironmentId, &Refused)| RefusedStatus {
            environment: environments.get(id.0 as usize).cloned().unwrap_or_default(),
            refused: refused.workers,
            name: refused.last.clone(),
            reason: refused.reason.clone(),
            since_s: refused.since.elapsed().as_secs_f64(),
        };
        refusals.iter().map(line).collect()
    }
}
