//! Which weights an evaluation measures: those that the trainer has reached, never those that it has left.

use crate::effect::{EvaluationReport, LeasedRollout};
use crate::ids::*;
use std::collections::BTreeMap;

#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Where the trainer is.
    trained: Option<PolicyVersion>,
    digests: BTreeMap<PolicyVersion, String>,
    /// How many evaluation rollouts had been leased when other weights took the place of a version's.
    replaced: BTreeMap<PolicyVersion, u64>,
    leases: u64,
    /// The numbers of those leases, by environment, since its last report.
    leased: BTreeMap<EnvironmentId, Vec<u64>>,
}

impl Measured {
    pub fn saw_resume(&mut self, step: Step) {
        self.trained = Some(PolicyVersion(step.0));
    }

    pub fn saw_weights(&mut self, version: PolicyVersion, digest: &str) {
        self.trained = Some(version);
        let before = self.digests.insert(version, digest.to_owned());
        if before.is_some_and(|before| before != digest) {
            self.replaced.insert(version, self.leases);
        }
    }

    pub fn saw_lease(&mut self, rollout: &LeasedRollout) {
        if rollout.evaluation {
            self.leases += 1;
            let leased = self.leased.entry(rollout.environment).or_default();
            leased.push(self.leases);
        }
    }

    pub fn check(&mut self, report: &EvaluationReport) {
        let version = report.version;
        assert!(
            Some(version) <= self.trained,
            "version {version} is reported while the trainer is at {:?}",
            self.trained
        );
        let since = self.replaced.get(&version).copied().unwrap_or(0);
        let leased = self.leased.remove(&report.environment).unwrap_or_default();
        let counted = leased.iter().filter(|lease| **lease > since).count();
        assert!(
            counted >= report.rollouts as usize,
            "{} rollouts count for version {version}, and {counted} were leased since it has its weights",
            report.rollouts
        );
    }
}
