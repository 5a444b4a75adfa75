//! A sequence that only counts its tokens. While it decodes it has one more with each step of its engine, so nothing
//! of it is touched from the step that ends its prompt to its last one.

use primerl_engine_server::schedulable::{Rank, Schedulable};
use std::cell::Cell;
use std::rc::Rc;

/// Steps an engine has made.
pub type Clock = Rc<Cell<u64>>;

/// Consecutive steps of the engine, `[from, until)`, each of which sampled a token of the sequence.
pub type Decoded = (u64, u64);

#[derive(Clone, Debug)]
pub struct Sequence {
    arrival: u64,
    prompt: u64,
    /// Sampled tokens it will have in the end.
    target: u64,
    /// Valid KV entries, while it does not decode.
    computed: u64,
    /// Tokens sampled before `decodes_since`.
    sampled: u64,
    decodes_since: Option<u64>,
    decoded: Vec<Decoded>,
    clock: Clock,
}

impl Sequence {
    /// `cached`: so many tokens of the prompt need not be computed.
    pub fn new(arrival: u64, prompt: u64, target: u64, cached: u64, clock: Clock) -> Self {
        Sequence {
            arrival,
            prompt,
            target,
            computed: cached.min(prompt.saturating_sub(1)),
            sampled: 0,
            decodes_since: None,
            decoded: Vec::new(),
            clock,
        }
    }

    pub fn sampled(&self) -> u64 {
        let since = self
            .decodes_since
            .map_or(0, |since| self.clock.get() - since);
        self.sampled + since
    }

    /// The time at which it ends if it keeps decoding.
    pub fn ends_at(&self) -> Option<u64> {
        Some(self.decodes_since? + self.target - self.sampled)
    }

    /// `count` of its tokens were computed in the step that brought the clock to its reading.
    pub fn compute(&mut self, count: u64) {
        self.computed += count;
        if self.computed < self.tokens() {
            if self.tokens() - self.computed == 1 {
                self.decodes_since = Some(self.clock.get());
            }
            return;
        }
        let now = self.clock.get();
        self.note(now - 1, now);
        self.decodes_since = Some(now);
    }

    /// The steps that sampled its tokens, in order.
    pub fn into_decoded(mut self) -> Vec<Decoded> {
        self.stop_decoding();
        self.decoded
    }

    fn tokens(&self) -> u64 {
        self.prompt + self.sampled()
    }

    fn note(&mut self, from: u64, until: u64) {
        self.sampled += until - from;
        match self.decoded.last_mut() {
            Some(last) if last.1 == from => last.1 = until,
            _ if until > from => self.decoded.push((from, until)),
            _ => {}
        }
    }

    fn stop_decoding(&mut self) {
        if let Some(since) = self.decodes_since.take() {
            self.note(since, self.clock.get());
        }
    }
}

impl Schedulable for Sequence {
    fn rank(&self) -> Rank {
        (0, self.arrival)
    }

    fn kv_needed(&self) -> u64 {
        self.tokens()
    }

    fn remaining(&self) -> usize {
        match self.decodes_since {
            Some(_) => 1,
            None => (self.tokens() - self.computed) as usize,
        }
    }

    fn has_output(&self) -> bool {
        self.sampled() > 0
    }

    fn drop_cache(&mut self) {
        self.stop_decoding();
        self.computed = 0;
    }
}
