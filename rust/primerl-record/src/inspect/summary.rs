//! A run in a few lines.

use super::InspectError;
use super::play::{JournalSummary, Moment, Observer, play};
use primerl_core::counters::Counters;
use primerl_core::effect::EvaluationReport;
use primerl_core::status::RolloutStatus;
use primerl_core::*;
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::Path;

#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub story: JournalSummary,
    pub steps: u64,
    pub max_steps: u64,
    /// Since the run began.
    pub rollouts: RolloutStatus,
    pub groups_dropped: u64,
    /// Events of the played part by kind.
    pub events: BTreeMap<String, u64>,
    /// Starts of the orchestrator after the first one, in the played part.
    pub restarts: u64,
    /// Starts of the trainer, in the played part.
    pub trainer_starts: u64,
    pub engines: usize,
    pub engines_lost: u64,
    pub workers_joined: u64,
    pub workers_lost: u64,
    pub evaluations: Vec<EvaluationReport>,
    pub published_version: Option<PolicyVersion>,
    pub policy_version: Option<PolicyVersion>,
    /// Why the run is over, once it is.
    pub finished: Option<String>,
}

impl Summary {
    /// How rollouts ended.
    pub fn counters(&self) -> Counters {
        self.rollouts.counters
    }
}

#[derive(Default)]
struct Counting {
    events: BTreeMap<&'static str, u64>,
    workers_lost: u64,
    evaluations: Vec<EvaluationReport>,
}

impl Observer for Counting {
    fn saw(&mut self, moment: &Moment<'_>) {
        *self.events.entry(moment.event.kind()).or_default() += 1;
        // Not a worker that left: it was asked to.
        let ended_badly = matches!(
            moment.event,
            Event::WorkerLeft {
                reason: Some(_),
                ..
            }
        );
        self.workers_lost += u64::from(ended_badly);
        for effect in moment.effects {
            match effect {
                Effect::WorkerLost { .. } => self.workers_lost += 1,
                Effect::Evaluated(report) => self.evaluations.push(report.clone()),
                _ => {}
            }
        }
    }
}

/// Summarizes the journal in a few lines.
///
/// # Errors
/// The journal cannot be read.
pub fn summary(output_dir: &Path) -> Result<Summary, InspectError> {
    let played = play(output_dir, |_| Counting::default())?;
    let (counting, status) = (played.observer, played.core.status());
    let count = |kind: &str| counting.events.get(kind).copied().unwrap_or(0);
    Ok(Summary {
        story: played.story,
        steps: status.run.next_step.0 - 1,
        max_steps: status.run.max_steps,
        rollouts: status.rollouts,
        groups_dropped: status.groups.dropped,
        restarts: count("restarted"),
        trainer_starts: count("trainer_resumed"),
        engines: status.engines.len(),
        engines_lost: count("engine_lost"),
        workers_joined: count("worker_joined"),
        workers_lost: counting.workers_lost,
        events: counting
            .events
            .iter()
            .map(|(kind, count)| ((*kind).to_owned(), *count))
            .collect(),
        evaluations: counting.evaluations,
        published_version: status.run.published_version,
        policy_version: status.run.policy_version,
        finished: status.run.finished,
    })
}
