//! Who runs, with which tokens; who is preempted; who has ended. Pure: no clock, no thread, no IO.
//!
//! A sequence is *waiting* or *running*. Running ones hold a slot and KV for all their tokens; the sum of those never
//! exceeds the capacity when a step is planned. When it would, the newest running sequence is preempted: it loses its
//! KV, keeps its tokens and goes back to the front of the queue.

use crate::backend::StepOutput;
use crate::batch::{Batch, BatchSequence, arrange};
use crate::request::{FinishReason, RequestKey};
use crate::sequence::{Completion, Sequence, Submission};
use crate::versions::Versions;
use std::collections::{BTreeMap, HashMap};

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub max_num_seqs: u32,
    pub kv_cache_tokens: u64,
    pub max_num_batched_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    /// Only sequences that arrived before this number go on.
    Draining(u64),
    Closed,
}

/// What a step brought.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The first token of a sequence was sampled.
    FirstToken {
        key: RequestKey,
    },
    /// A token of a sequence with `stream`, which goes on.
    Token {
        key: RequestKey,
        token: crate::backend::ScoredToken,
    },
    Finished(Completion),
}

/// Order of running and waiting: priority, then arrival.
type Rank = (i32, u64);

#[derive(Debug)]
pub struct Scheduler {
    limits: Limits,
    gate: Gate,
    arrivals: u64,
    sequences: HashMap<RequestKey, Sequence>,
    waiting: BTreeMap<Rank, RequestKey>,
    running: BTreeMap<Rank, RequestKey>,
    /// Lowest slot last, so that running sequences stay close together.
    free_slots: Vec<u32>,
    /// KV entries the running sequences need for their next step.
    held: u64,
    preemptions: u64,
    pub versions: Versions,
}

impl Scheduler {
    pub fn new(limits: Limits) -> Self {
        Scheduler {
            limits,
            gate: Gate::Open,
            arrivals: 0,
            sequences: HashMap::new(),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            free_slots: (0..limits.max_num_seqs).rev().collect(),
            held: 0,
            preemptions: 0,
            versions: Versions::default(),
        }
    }

    pub fn submit(&mut self, submission: Submission) {
        let sequence = Sequence::new(submission, self.arrivals);
        self.arrivals += 1;
        self.waiting.insert(sequence.rank(), sequence.key);
        self.sequences.insert(sequence.key, sequence);
    }

    /// Ends a sequence with what it has. `None` if it has ended already.
    pub fn abort(&mut self, key: RequestKey) -> Option<Completion> {
        let sequence = self.remove(key)?;
        Some(sequence.complete(FinishReason::Abort, None, &self.versions))
    }

    /// Ends all of them, in order of arrival.
    pub fn abort_all(&mut self) -> Vec<Completion> {
        let mut keys: Vec<(u64, RequestKey)> = self
            .sequences
            .values()
            .map(|s| (s.arrival, s.key))
            .collect();
        keys.sort_unstable();
        keys.into_iter()
            .filter_map(|(_, key)| self.abort(key))
            .collect()
    }

    pub fn pause(&mut self) {
        self.gate = Gate::Closed;
    }

    /// Lets what is here now run to its end; later arrivals wait. See [`Scheduler::is_drained`].
    pub fn drain(&mut self) {
        if self.gate == Gate::Open {
            self.gate = Gate::Draining(self.arrivals);
        }
    }

    pub fn resume(&mut self) {
        self.gate = Gate::Open;
    }

    pub fn is_paused(&self) -> bool {
        self.gate != Gate::Open
    }

    /// Draining has come to its end: nothing that arrived before it is left.
    pub fn is_drained(&self) -> bool {
        match self.gate {
            Gate::Open => false,
            Gate::Closed => true,
            Gate::Draining(until) => {
                self.running.is_empty() && !self.waiting.keys().any(|&(_, at)| at < until)
            }
        }
    }

    /// Every running sequence loses its KV and will compute it again.
    pub fn clear_cache(&mut self) {
        while self.preempt_newest() {}
    }

    /// New weights were loaded. KV of sequences with output stays (the caller may clear it). Those without output start
    /// over, so that a prompt in chunks is never computed by two versions.
    pub fn weights_changed(&mut self) {
        for sequence in self
            .sequences
            .values_mut()
            .filter(|sequence| !sequence.has_output())
        {
            sequence.drop_cache();
        }
        self.versions.loaded();
    }

    /// The work of the next step; `None` when there is nothing to do.
    pub fn plan(&mut self) -> Option<Batch> {
        if self.gate == Gate::Closed {
            return None;
        }
        let mut preempted = false;
        while self.held > self.limits.kv_cache_tokens && self.preempt_newest() {
            preempted = true;
        }
        let mut budget = self.limits.max_num_batched_tokens as usize;
        let mut parts = Vec::with_capacity(self.running.len());
        self.take_running(&mut budget, &mut parts);
        if !preempted {
            self.admit(&mut budget, &mut parts);
        }
        (!parts.is_empty()).then(|| self.build(parts))
    }

    /// Sequences that are one token behind come first, so that a long prompt cannot starve them.
    fn take_running(&self, budget: &mut usize, parts: &mut Vec<(RequestKey, usize)>) {
        for decoding in [true, false] {
            for key in self.running.values() {
                let remaining = self.sequences[key].remaining();
                let count = remaining.min(*budget);
                if (remaining == 1) == decoding && count > 0 {
                    *budget -= count;
                    parts.push((*key, count));
                }
            }
        }
    }

    fn admit(&mut self, budget: &mut usize, parts: &mut Vec<(RequestKey, usize)>) {
        let until = match self.gate {
            Gate::Open => u64::MAX,
            Gate::Draining(until) => until,
            Gate::Closed => 0,
        };
        while *budget > 0
            && let Some((&rank, &key)) = self
                .waiting
                .iter()
                .find(|((_, arrival), _)| *arrival < until)
            && let Some(&slot) = self.free_slots.last()
        {
            // Room for one more token of everybody, or the next step would preempt what this one admitted.
            let need = self.held + self.sequences[&key].len() + self.running.len() as u64 + 1;
            if need > self.limits.kv_cache_tokens && !self.running.is_empty() {
                break;
            }
            self.start(rank, key, slot, budget, parts);
        }
    }

    fn start(
        &mut self,
        rank: Rank,
        key: RequestKey,
        slot: u32,
        budget: &mut usize,
        parts: &mut Vec<(RequestKey, usize)>,
    ) {
        let Some(sequence) = self.sequences.get_mut(&key) else {
            return;
        };
        sequence.slot = Some(slot);
        self.free_slots.pop();
        self.held += sequence.len();
        let count = sequence.remaining().min(*budget);
        *budget -= count;
        parts.push((key, count));
        self.waiting.remove(&rank);
        self.running.insert(rank, key);
    }

    fn build(&self, parts: Vec<(RequestKey, usize)>) -> Batch {
        let mut counts = HashMap::with_capacity(parts.len());
        let mut sequences: Vec<BatchSequence> = Vec::with_capacity(parts.len());
        let (mut token_ids, mut positions) = (Vec::new(), Vec::new());
        for (key, count) in parts {
            let sequence = &self.sequences[&key];
            let Some(slot) = sequence.slot else { continue };
            let start = token_ids.len();
            sequences.push(sequence.schedule(slot, count, &mut token_ids, &mut positions));
            counts.insert(key, start..start + count);
        }
        let segments = arrange(&mut sequences);
        // Arranging moved the sequences; their columns follow.
        let gather = |column: &[i32]| -> Vec<i32> {
            sequences
                .iter()
                .flat_map(|sequence| &column[counts[&sequence.key].clone()])
                .copied()
                .collect()
        };
        Batch {
            token_ids: gather(&token_ids),
            positions: gather(&positions),
            sequences,
            segments,
        }
    }

    /// Takes in what the backend made of `batch`. The lengths of `output` have been checked.
    pub fn apply(&mut self, batch: Batch, output: StepOutput) -> Vec<Event> {
        let epoch = self.versions.epoch();
        let mut events = Vec::new();
        let mut sampled = output.sampled.into_iter();
        let mut scores = output.prompt.into_iter();
        for part in batch.sequences {
            let Some(sequence) = self.sequences.get_mut(&part.key) else {
                continue;
            };
            sequence.computed += part.query_len as usize;
            if let Some(targets) = part.prompt_targets {
                sequence.record_prompt(scores.by_ref().take(targets.targets.len()));
            }
            if part.sample.is_none() {
                continue;
            }
            let Some(token) = sampled.next() else {
                continue;
            };
            self.held += 1;
            let end = sequence.record(token, epoch);
            if sequence.output_len() == 1 {
                events.push(Event::FirstToken { key: part.key });
            }
            match end {
                None if sequence.stream => {
                    events.extend(sequence.last_output().cloned().map(|token| Event::Token {
                        key: part.key,
                        token,
                    }));
                }
                None => {}
                Some((finish, stop_token)) => {
                    if let Some(sequence) = self.remove(part.key) {
                        events.push(Event::Finished(sequence.complete(
                            finish,
                            stop_token,
                            &self.versions,
                        )));
                    }
                }
            }
        }
        events
    }

    /// Takes a sequence out, wherever it is, and gives back what it held.
    fn remove(&mut self, key: RequestKey) -> Option<Sequence> {
        let mut sequence = self.sequences.remove(&key)?;
        let rank = sequence.rank();
        self.waiting.remove(&rank);
        if self.running.remove(&rank).is_some() {
            self.held -= sequence.len();
            self.free_slots.extend(sequence.slot.take());
            self.sort_free_slots();
        }
        Some(sequence)
    }

    fn preempt_newest(&mut self) -> bool {
        let Some((rank, key)) = self.running.pop_last() else {
            return false;
        };
        if let Some(sequence) = self.sequences.get_mut(&key) {
            self.held -= sequence.len();
            sequence.drop_cache();
            self.free_slots.extend(sequence.slot.take());
        }
        self.sort_free_slots();
        self.waiting.insert(rank, key);
        self.preemptions += 1;
        true
    }

    fn sort_free_slots(&mut self) {
        self.free_slots.sort_unstable_by(|a, b| b.cmp(a));
    }

    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    pub fn num_waiting(&self) -> usize {
        self.waiting.len()
    }

    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// KV entries in use.
    pub fn kv_tokens_held(&self) -> u64 {
        self.held
    }
}

#[cfg(test)]
#[path = "scheduler_tests.rs"]
mod tests;
