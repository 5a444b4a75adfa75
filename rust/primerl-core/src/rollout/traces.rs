//! The traces of a rollout that are trained.

use super::Rollout;
use crate::advantage::TraceLength;
use crate::event::{Outcome, Trace};
use crate::sample::{Sample, TrainedTrace};
use crate::turn::Turn;
use std::collections::BTreeSet;

impl Rollout {
    /// Leaves only traces that have samples, and renumbers the samples' traces accordingly.
    pub(super) fn keep_trained_traces(
        &mut self,
        samples: &mut [Sample],
        outcome: &Outcome,
        lengths: &[TraceLength],
    ) {
        let kept: BTreeSet<usize> = samples.iter().map(|sample| sample.trace).collect();
        let kept: Vec<usize> = kept.into_iter().collect();
        for sample in samples {
            sample.trace = kept
                .binary_search(&sample.trace)
                .expect("every sample's trace is kept");
        }
        let of = |index: &usize| trained(&outcome.traces[*index], &lengths[*index]);
        self.traces = kept.iter().map(of).collect();
    }
}

/// What each of a rollout's traces took. A turn's `prompt_suffix` is what its prompt has beyond its parent.
pub(super) fn trace_lengths(
    turns: &[Turn],
    trace_of: &[Option<usize>],
    traces: usize,
) -> Vec<TraceLength> {
    let mut lengths = vec![TraceLength::default(); traces];
    for (turn, trace) in turns.iter().zip(trace_of) {
        if let Some(length) = trace.and_then(|trace| lengths.get_mut(trace)) {
            length.output_tokens += turn.sampled.len() as u64;
            length.input_tokens += turn.prompt_suffix.len() as u64;
            length.turns += 1;
        }
    }
    lengths
}

fn trained(trace: &Trace, length: &TraceLength) -> TrainedTrace {
    TrainedTrace {
        seat: trace.seat.clone(),
        reward: trace.reward,
        metrics: trace.metrics.clone(),
        truncated: trace.truncated,
        turns: length.turns,
        output_tokens: length.output_tokens,
        input_tokens: length.input_tokens,
        demonstration: trace.demonstration.clone(),
    }
}
