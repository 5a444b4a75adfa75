//! An engine: the real scheduler, and a price for each step.
//!
//! Steps in which every running sequence gets one token and none arrives or ends are made in one stride. A stride is
//! cut short where something happens in its middle, at the end of the step under way then, so every sequence gets
//! exactly the tokens it would get one step at a time.

use crate::plan::Inference;
use crate::sequence::{Clock, Decoded, Sequence};
use crate::tracks::Doing;
use primerl_core::{Duration, PolicyVersion, Time, VersionRun, VersionRuns};
use primerl_engine_server::request::RequestKey;
use primerl_engine_server::scheduler::{Limits, Part, Scheduler};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Steps under way.
#[derive(Debug)]
struct Stride {
    began: Time,
    step: Duration,
    steps: u64,
    prefill: Vec<Part>,
}

impl Stride {
    fn end(&self) -> Time {
        self.began + Duration(self.step.0 * self.steps)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Has proved no version, or is pausing for one: no new requests.
    Updating,
    Serving,
}

/// A sequence that ended.
#[derive(Debug)]
pub struct Ended {
    pub key: RequestKey,
    pub versions: VersionRuns,
}

#[derive(Debug)]
pub struct Engine {
    cost: Inference,
    scheduler: Scheduler<Sequence>,
    clock: Clock,
    ends: BinaryHeap<Reverse<(u64, RequestKey)>>,
    stride: Option<Stride>,
    pub phase: Phase,
    pub proved: Option<PolicyVersion>,
    /// The version it is to load once it stands still.
    pub told: Option<PolicyVersion>,
    /// From which reading of the clock on tokens are of which version.
    versions: Vec<(u64, PolicyVersion)>,
    longest_stride: u64,
    /// Given to it and not ended.
    pub requests: u32,
    pub measured: Measured,
}

/// Sums over time in which the engine made steps, seconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Measured {
    pub busy_s: f64,
    pub running: f64,
    pub kv_tokens: f64,
    pub kv_tokens_max: u64,
    pub steps: u64,
    pub prefill_tokens: u64,
}

impl Engine {
    pub fn new(cost: &Inference) -> Self {
        Engine {
            scheduler: Scheduler::new(Limits {
                max_num_seqs: cost.max_num_seqs,
                kv_cache_tokens: cost.kv_cache_tokens,
                max_num_batched_tokens: cost.max_num_batched_tokens,
            }),
            cost: cost.clone(),
            clock: Clock::default(),
            ends: BinaryHeap::new(),
            stride: None,
            phase: Phase::Updating,
            proved: None,
            told: None,
            versions: Vec::new(),
            longest_stride: u64::MAX,
            requests: 0,
            measured: Measured::default(),
        }
    }

    /// Queues a request. Prompt, answer and the part of the prompt that is cached, tokens.
    pub fn submit(&mut self, key: RequestKey, prompt: u64, answer: u64, cached: u64, now: Time) {
        let clock = self.clock.clone();
        let make = |arrival| Sequence::new(arrival, prompt, answer, cached, clock);
        self.scheduler.push(key, make);
        self.requests += 1;
        if self.stride.is_some() && self.scheduler.steady_steps() == 0 {
            self.cut_stride(now);
        }
    }

    /// Forgets a request.
    pub fn abort(&mut self, key: RequestKey, now: Time) {
        self.settle(now);
        if self.scheduler.remove(key).is_some() {
            self.requests -= 1;
        }
        self.cut_stride(now);
    }

    /// No step begins until [`Engine::load`]; returns whether the engine stands still already.
    pub fn pause(&mut self, now: Time) -> bool {
        self.phase = Phase::Updating;
        self.cut_stride(now);
        self.scheduler.pause();
        self.stride.is_none()
    }

    /// It serves `version` from now on.
    pub fn load(&mut self, version: PolicyVersion) {
        self.scheduler.weights_changed();
        self.scheduler.resume();
        self.versions.push((self.clock.get(), version));
        self.proved = Some(version);
        self.phase = Phase::Serving;
    }

    /// Begins the next stride if none is under way and there is work; returns whether one began.
    pub fn begin(&mut self, now: Time) -> bool {
        if self.stride.is_some() {
            return false;
        }
        let Some(work) = self.scheduler.plan_work() else {
            return false;
        };
        let prefill: usize = work.prefill.iter().map(|part| part.count).sum();
        let seconds = self.cost.step_s
            + self.cost.step_per_sequence_s * work.decoding as f64
            + self.cost.step_per_prefill_token_s * prefill as f64;
        let steps = match work.prefill.is_empty() {
            true => self.steps_without_change(),
            false => 1,
        };
        self.stride = Some(Stride {
            began: now,
            step: Duration(((seconds * 1e6).round() as u64).max(1)),
            steps: steps.min(self.longest_stride),
            prefill: work.prefill,
        });
        true
    }

    fn steps_without_change(&mut self) -> u64 {
        let steady = self.scheduler.steady_steps();
        self.steps_to_next_end().min(steady).max(1)
    }

    /// When the stride under way ends.
    pub fn stride_end(&self) -> Option<Time> {
        self.stride.as_ref().map(Stride::end)
    }

    /// The stride under way has ended: who ended with it, in order of time and of their keys.
    pub fn finish_stride(&mut self) -> Vec<Ended> {
        let Some(mut stride) = self.stride.take() else {
            return Vec::new();
        };
        self.advance(&mut stride, u64::MAX);
        for part in std::mem::take(&mut stride.prefill) {
            self.prefilled(part.key, part.count as u64);
        }
        let mut ended = Vec::new();
        while let Some(Reverse((at, key))) = self.ends.peek().copied()
            && at <= self.clock.get()
        {
            self.ends.pop();
            // It may have been preempted or aborted since that end was foretold.
            let is_due = self.scheduler.get(key).and_then(Sequence::ends_at) == Some(at);
            if is_due && let Some(sequence) = self.scheduler.remove(key) {
                self.requests -= 1;
                let versions = self.versions_of(&sequence.into_decoded());
                ended.push(Ended { key, versions });
            }
        }
        ended
    }

    /// Prompt tokens of a sequence were computed.
    fn prefilled(&mut self, key: RequestKey, tokens: u64) {
        let ends_at = self.scheduler.computed(key, |sequence| {
            sequence.compute(tokens);
            sequence.ends_at()
        });
        self.measured.prefill_tokens += tokens;
        if let Some(Some(at)) = ends_at {
            self.ends.push(Reverse((at, key)));
        }
    }

    /// How many of its requests are sampled, wait in its queue, and wait for its update.
    pub fn requests_by_doing(&self) -> [(Doing, usize); 3] {
        let stands = self.phase == Phase::Updating && self.stride.is_none();
        let (running, waiting) = (self.scheduler.num_running(), self.scheduler.num_waiting());
        let (sampled, queued, paused) = match stands {
            true => (0, 0, running + waiting),
            false => (running, waiting, 0),
        };
        [
            (Doing::Sampling, sampled),
            (Doing::Queued, queued),
            (Doing::WeightUpdate, paused),
        ]
    }

    /// Share of the KV cache that is held, 0 to 1.
    pub fn kv_cache_usage(&self) -> f64 {
        self.scheduler.kv_tokens_held() as f64 / self.cost.kv_cache_tokens as f64
    }

    pub fn preemptions(&self) -> u64 {
        self.scheduler.preemptions()
    }

    fn steps_to_next_end(&mut self) -> u64 {
        while let Some(Reverse((at, key))) = self.ends.peek().copied() {
            if self.scheduler.get(key).and_then(Sequence::ends_at) == Some(at) {
                return at - self.clock.get();
            }
            self.ends.pop();
        }
        u64::MAX
    }

    /// Makes the steps of the stride that were over before `now`.
    fn settle(&mut self, now: Time) {
        let Some(mut stride) = self.stride.take() else {
            return;
        };
        let since = now.since(stride.began).0;
        let over = (since.saturating_sub(1) / stride.step.0).min(stride.steps - 1);
        self.advance(&mut stride, over);
        self.stride = Some(stride);
    }

    /// The stride ends with the step under way at `now`.
    fn cut_stride(&mut self, now: Time) {
        let Some(stride) = &mut self.stride else {
            return;
        };
        let steps = now.since(stride.began).0.div_ceil(stride.step.0).max(1);
        if steps < stride.steps {
            stride.steps = steps;
        }
    }

    /// Makes up to `steps` steps of the stride.
    fn advance(&mut self, stride: &mut Stride, steps: u64) {
        let steps = steps.min(stride.steps);
        if steps == 0 {
            return;
        }
        let held = self.scheduler.kv_tokens_held();
        self.clock.set(self.clock.get() + steps);
        self.scheduler.decoded(steps);
        let grown = self.scheduler.kv_tokens_held();
        let span = Duration(stride.step.0 * steps);
        let seconds = span.as_secs_f64();
        let measured = &mut self.measured;
        measured.busy_s += seconds;
        measured.running += seconds * self.scheduler.num_running() as f64;
        measured.kv_tokens += seconds * (held + grown) as f64 / 2.0;
        measured.kv_tokens_max = measured.kv_tokens_max.max(grown);
        measured.steps += steps;
        stride.began = stride.began + span;
        stride.steps -= steps;
    }

    fn versions_of(&self, decoded: &[Decoded]) -> VersionRuns {
        let mut runs = VersionRuns::new();
        for &(from, until) in decoded {
            let first = self.versions.partition_point(|(since, _)| *since <= from);
            let mut at = from;
            for index in first.saturating_sub(1)..self.versions.len() {
                let next = self
                    .versions
                    .get(index + 1)
                    .map_or(until, |(since, _)| *since);
                let end = next.min(until);
                let (version, n_tokens) = (self.versions[index].1, (end - at.min(end)) as u32);
                match runs.last_mut() {
                    _ if n_tokens == 0 => {}
                    Some(last) if last.version == version => last.n_tokens += n_tokens,
                    _ => runs.push(VersionRun { version, n_tokens }),
                }
                at = at.max(end);
                if at >= until {
                    break;
                }
            }
        }
        runs
    }
}

#[cfg(test)]
#[path = "engine_tests.rs"]
mod tests;
