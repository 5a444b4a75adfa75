//! Decides which sequences run, with which tokens, and which are preempted. Pure: no clock, no thread, no IO.
//!
//! A sequence is *waiting* or *running*. Running ones hold a slot and KV for all their tokens; the sum of those never
//! exceeds the capacity when a step is planned. When it would, the newest running sequence is preempted: it loses its
//! KV, keeps its tokens and goes back to the front of the queue.

mod steps;

use crate::numbered::NumberMap;
use crate::request::RequestKey;
use crate::schedulable::{Rank, Schedulable};
use crate::sequence::Sequence;
use crate::versions::Versions;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
pub use steps::Event;

#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub max_num_seqs: u32,
    pub kv_cache_tokens: u64,
    pub max_num_batched_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Gate {
    Open,
    /// Only sequences that arrived before this number continue.
    Draining(u64),
    Closed,
}

/// Some of the tokens of one running sequence, in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    pub key: RequestKey,
    /// Where its KV lives.
    pub slot: u32,
    pub count: usize,
}

/// Who gets what in one step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Work {
    /// The first so many of those that are one token behind get that token. They come first, so that a long prompt
    /// cannot starve them.
    pub decoding: usize,
    /// Parts of prompts, and of what is computed again.
    pub prefill: Vec<Part>,
}

#[derive(Debug)]
pub struct Scheduler<S = Sequence> {
    limits: Limits,
    gate: Gate,
    arrivals: u64,
    sequences: NumberMap<RequestKey, S>,
    waiting: BTreeMap<Rank, RequestKey>,
    /// Running and one token behind, with their slots.
    decoding: BTreeMap<Rank, (RequestKey, u32)>,
    /// Running and further behind.
    prefilling: BTreeMap<Rank, (RequestKey, u32)>,
    /// The lowest is taken first, so that running sequences stay close together.
    free_slots: BinaryHeap<Reverse<u32>>,
    /// KV entries the running sequences need for their next step.
    held: u64,
    preemptions: u64,
    pub versions: Versions,
}

impl<S: Schedulable> Scheduler<S> {
    pub fn new(limits: Limits) -> Self {
        Scheduler {
            limits,
            gate: Gate::Open,
            arrivals: 0,
            sequences: NumberMap::default(),
            waiting: BTreeMap::new(),
            decoding: BTreeMap::new(),
            prefilling: BTreeMap::new(),
            free_slots: (0..limits.max_num_seqs).map(Reverse).collect(),
            held: 0,
            preemptions: 0,
            versions: Versions::default(),
        }
    }

    /// Queues a sequence, made from the number of its arrival.
    pub fn push(&mut self, key: RequestKey, make: impl FnOnce(u64) -> S) {
        let sequence = make(self.arrivals);
        self.arrivals += 1;
        self.waiting.insert(sequence.rank(), key);
        self.sequences.insert(key, sequence);
    }

    pub fn get(&self, key: RequestKey) -> Option<&S> {
        self.sequences.get(&key)
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
                self.num_running() == 0 && !self.waiting.keys().any(|&(_, at)| at < until)
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
        let start_over = |(_, (key, _)): &(&Rank, &(RequestKey, u32))| {
            let sequence = self.sequences.get(key);
            sequence.is_some_and(|sequence| sequence.remaining() != 1)
        };
        let behind: Vec<Rank> = self
            .decoding
            .iter()
            .filter(start_over)
            .map(|(rank, _)| *rank)
            .collect();
        for rank in behind {
            if let Some(running) = self.decoding.remove(&rank) {
                self.prefilling.insert(rank, running);
            }
        }
        self.versions.loaded();
    }

    /// The work of the next step; `None` when there is nothing to do.
    pub fn plan_work(&mut self) -> Option<Work> {
        if self.gate == Gate::Closed {
            return None;
        }
        let mut preempted = false;
        while self.held > self.limits.kv_cache_tokens && self.preempt_newest() {
            preempted = true;
        }
        let mut budget = self.limits.max_num_batched_tokens as usize;
        let decoding = self.decoding.len().min(budget);
        budget -= decoding;
        let mut prefill = Vec::new();
        for (key, slot) in self.prefilling.values() {
            let count = self.sequences[key].remaining().min(budget);
            if count > 0 {
                budget -= count;
                prefill.push(Part {
                    key: *key,
                    slot: *slot,
                    count,
                });
            }
        }
        if !preempted {
            self.admit(&mut budget, &mut prefill);
        }
        (decoding + prefill.len() > 0).then_some(Work { decoding, prefill })
    }

    fn admit(&mut self, budget: &mut usize, prefill: &mut Vec<Part>) {
        while *budget > 0
            && let Some((rank, key)) = self.next_admitted()
            && let Some(Reverse(slot)) = self.free_slots.pop()
        {
            let sequence = &self.sequences[&key];
            self.held += sequence.kv_needed();
            let count = sequence.remaining().min(*budget);
            *budget -= count;
            prefill.push(Part { key, slot, count });
            self.waiting.remove(&rank);
            // Also where it is one token behind: it joins the decoding ones when this part is computed.
            self.prefilling.insert(rank, (key, slot));
        }
    }

    /// The next of those that wait, if there is a slot and KV for it.
    fn next_admitted(&self) -> Option<(Rank, RequestKey)> {
        let until = match self.gate {
            Gate::Open => u64::MAX,
            Gate::Draining(until) => until,
            Gate::Closed => 0,
        };
        let mut waiting = self.waiting.iter();
        let (&rank, &key) = waiting.find(|((_, arrival), _)| *arrival < until)?;
        // Room for one more token of every sequence, or the next step would preempt what this one admitted.
        let running = self.num_running();
        let need = self.held + self.sequences[&key].kv_needed() + running as u64 + 1;
        let fits = need <= self.limits.kv_cache_tokens || running == 0;
        (fits && !self.free_slots.is_empty()).then_some((rank, key))
    }

    /// For how many steps from now [`Scheduler::plan_work`] would give each decoding sequence its token and do nothing
    /// else, if none of them ended: as long as no sequence can be admitted and KV lasts.
    pub fn steady_steps(&self) -> u64 {
        let running = self.decoding.len() as u64;
        let steady = running > 0
            && self.gate != Gate::Closed
            && self.prefilling.is_empty()
            && running <= u64::from(self.limits.max_num_batched_tokens)
            && self.next_admitted().is_none();
        match self.limits.kv_cache_tokens.checked_sub(self.held) {
            Some(room) if steady => room / running + 1,
            _ => 0,
        }
    }

    /// Each decoding sequence has so many tokens more.
    pub fn decoded(&mut self, steps: u64) {
        self.held += steps * self.decoding.len() as u64;
    }

    /// A part of a sequence was computed, and perhaps a token sampled: `change` notes it in the sequence.
    pub fn computed<R>(&mut self, key: RequestKey, change: impl FnOnce(&mut S) -> R) -> Option<R> {
        let sequence = self.sequences.get_mut(&key)?;
        let (rank, before) = (sequence.rank(), sequence.kv_needed());
        let result = change(sequence);
        self.held += sequence.kv_needed() - before;
        if sequence.remaining() == 1
            && let Some(running) = self.prefilling.remove(&rank)
        {
            self.decoding.insert(rank, running);
        }
        Some(result)
    }

    /// Takes a sequence out, wherever it is, and gives back what it held.
    pub fn remove(&mut self, key: RequestKey) -> Option<S> {
        let sequence = self.sequences.remove(&key)?;
        let rank = sequence.rank();
        self.waiting.remove(&rank);
        let running = self.decoding.remove(&rank);
        if let Some((_, slot)) = running.or_else(|| self.prefilling.remove(&rank)) {
            self.held -= sequence.kv_needed();
            self.free_slots.push(Reverse(slot));
        }
        Some(sequence)
    }

    fn preempt_newest(&mut self) -> bool {
        let newest_of =
            |running: &BTreeMap<Rank, _>| running.last_key_value().map(|(rank, _)| *rank);
        let newest = match newest_of(&self.decoding) > newest_of(&self.prefilling) {
            true => self.decoding.pop_last(),
            false => self.prefilling.pop_last(),
        };
        let Some((rank, (key, slot))) = newest else {
            return false;
        };
        if let Some(sequence) = self.sequences.get_mut(&key) {
            self.held -= sequence.kv_needed();
            sequence.drop_cache();
        }
        self.free_slots.push(Reverse(slot));
        self.waiting.insert(rank, key);
        self.preemptions += 1;
        true
    }

    pub fn num_running(&self) -> usize {
        self.decoding.len() + self.prefilling.len()
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
