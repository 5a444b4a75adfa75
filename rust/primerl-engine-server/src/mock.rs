//! A backend without a model: seeded, deterministic, with latency and faults to order.
//!
//! What it samples is a pure function ([`MockConfig::sample`]) of the tokens before, the request's random number and
//! the policy version of the loaded weights, so a test can recompute every token and every log-probability. The tokens
//! before are folded slot by slot as they are computed, like a KV cache: a scheduler that mixes slots up, skips a token
//! or forgets to recompute gives other tokens.

mod processed;

use crate::backend::{Backend, BackendError, ScoredToken, StepOutput, TopToken};
use crate::batch::{Batch, BatchSequence, Sample};
use crate::checkpoint::{Checkpoint, digest};
use crate::experts::ExpertRows;
use crate::model_info::{Loadable, ModelInfo};
use serde::Deserialize;
use std::time::Duration;
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

#[derive(Clone, Debug)]
pub struct MockConfig {
    pub vocab_size: u32,
    /// KV slots and their length.
    pub slots: u32,
    pub max_model_len: u32,
    pub eos_token_id: Option<u32>,
    /// Probability of end of sequence at each token.
    pub eos_probability: f64,
    /// Other tokens are drawn from `first_token..last_token`.
    pub first_token: u32,
    pub last_token: u32,
    /// Each forward call takes this long, plus `token_latency` a token.
    pub step_latency: Duration,
    pub token_latency: Duration,
    /// `None` takes any checkpoint.
    pub loadable: Option<Loadable>,
    /// Log-probabilities after temperature and truncation; else those of temperature 1 and all tokens.
    pub processed_logprobs: bool,
    /// Experts of each token: two layers, one expert each, [`MockConfig::experts_of`].
    pub reports_experts: bool,
    pub faults: Faults,
    /// Answers to order; what none of them fits is drawn.
    pub script: Vec<ScriptedAnswer>,
}

/// After a prompt that ends with `after`, the model says `answer`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScriptedAnswer {
    pub after: Vec<u32>,
    pub answer: Vec<u32>,
}

impl ScriptedAnswer {
    /// The next token of the answer, where `tokens` end with `after` and a part of it.
    fn next(&self, tokens: &[u32]) -> Option<u32> {
        (0..self.answer.len()).rev().find_map(|said| {
            let before = tokens.strip_suffix(&self.answer[..said])?;
            (before.ends_with(&self.after)).then_some(self.answer[said])
        })
    }
}

/// What goes wrong on purpose.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The forward call with this number (from 1) fails.
    pub fail_forward_at: Option<u64>,
    /// The forward call with this number (from 1) never returns.
    pub hang_forward_at: Option<u64>,
    /// Weight updates are refused.
    pub refuse_update: bool,
    /// The digest that is reported is not that of the tensors.
    pub wrong_digest: bool,
    /// New weights are taken and proved, but it computes with those of the version after.
    pub wrong_weights: bool,
}

impl Default for MockConfig {
    fn default() -> Self {
        MockConfig {
            vocab_size: 264,
            slots: 128,
            max_model_len: 2048,
            eos_token_id: Some(256),
            eos_probability: 0.05,
            first_token: 0,
            last_token: 256,
            step_latency: Duration::ZERO,
            token_latency: Duration::ZERO,
            loadable: None,
            processed_logprobs: false,
            reports_experts: false,
            faults: Faults::default(),
            script: Vec::new(),
        }
    }
}

impl MockConfig {
    /// The experts of this token, one in each of two layers.
    pub fn experts_of(token_id: u32) -> [u8; 2] {
        [(token_id % 251) as u8, (token_id % 7) as u8]
    }
}

/// Digest of a token prefix; equal prefixes have equal digests.
pub fn fold(before: u64, token_id: u32) -> u64 {
    xxh3_64_with_seed(&token_id.to_le_bytes(), before)
}

/// [`fold`] over a whole prefix.
pub fn fold_all(token_ids: &[u32]) -> u64 {
    token_ids.iter().fold(0, |prefix, &id| fold(prefix, id))
}

/// A number in [0, 1) that depends on all arguments.
fn draw(prefix: u64, version: u64, purpose: u64) -> f64 {
    let bits = xxh3_64_with_seed(
        &[version.to_le_bytes(), purpose.to_le_bytes()].concat(),
        prefix,
    );
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

impl MockConfig {
    /// The token after a prefix whose digest is `prefix`, sampled by weights of `version` (0 before any update).
    pub fn sample(&self, prefix: u64, sample: &Sample, version: u64) -> ScoredToken {
        if sample.allowed.is_some() {
            return self.structured(prefix, sample, version, None);
        }
        let token_id = self.draw_token(prefix, sample, version);
        let scored = self.score(prefix, token_id, version, sample.top);
        match self.processed_logprobs {
            true => self.processed(scored, prefix, sample, version),
            false => scored,
        }
    }

    /// The log-probability of a token after a prefix, at temperature 1: between -6 and 0. Not normalised over the vocabulary.
    fn logprob(&self, prefix: u64, token_id: u32, version: u64) -> f32 {
        -6.0 * draw(prefix, version, 3 + u64::from(token_id)) as f32
    }

    fn draw_token(&self, prefix: u64, sample: &Sample, version: u64) -> u32 {
        let randomness = match sample.temperature {
            0.0 => 0,
            _ => sample.uniform.to_bits(),
        };
        let chosen = prefix ^ xxh3_64(&randomness.to_le_bytes());
        if let Some(eos) = self.eos_token_id
            && draw(chosen, version, 2) < self.eos_probability
            && !sample.banned.contains(&eos)
        {
            return eos;
        }
        let span = self.last_token - self.first_token;
        let token_id = self.first_token + (draw(chosen, version, 1) * f64::from(span)) as u32;
        if !sample.banned.contains(&token_id) {
            return token_id;
        }
        let mut others = (1..self.vocab_size).map(|step| (token_id + step) % self.vocab_size);
        let other = others.find(|id| !sample.banned.contains(id));
        other.unwrap_or(token_id)
    }

    /// Raw log-probability and rank of a token after a prefix, and the `top` most likely ones.
    pub fn score(&self, prefix: u64, token_id: u32, version: u64, top: u32) -> ScoredToken {
        let logprob = |id: u32| self.logprob(prefix, id, version);
        let mut scored = ScoredToken {
            token_id,
            logprob: logprob(token_id),
            rank: 1,
            top: Vec::new(),
        };
        if top == 0 {
            return scored;
        }
        let mut all: Vec<(u32, f32)> = (0..self.vocab_size).map(|id| (id, logprob(id))).collect();
        all.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let top_token = |((token_id, logprob), rank)| TopToken {
            token_id,
            logprob,
            rank,
        };
        let ranked = all.into_iter().zip(1..).map(top_token);
        let own = ranked.clone().find(|ranked| ranked.token_id == token_id);
        scored.rank = own.map_or(1, |own| own.rank);
        scored.top = ranked.take(top as usize).collect();
        scored
    }
}

fn expert_rows(batch: &Batch) -> ExpertRows {
    let ids = batch.token_ids.iter();
    ExpertRows {
        layers: 2,
        chosen: 1,
        bytes: 1,
        ids: ids
            .flat_map(|id| MockConfig::experts_of(*id as u32))
            .collect(),
    }
}

pub struct MockBackend {
    config: MockConfig,
    info: ModelInfo,
    /// For each slot, the prefix digest after each of its positions.
    prefixes: Vec<Vec<u64>>,
    /// For each slot its tokens, where a script needs them.
    tokens: Vec<Vec<u32>>,
    version: u64,
    digest: String,
    forwards: u64,
}

impl MockBackend {
    pub fn new(config: MockConfig) -> Self {
        let info = ModelInfo {
            vocab_size: config.vocab_size,
            max_model_len: config.max_model_len,
            slots: config.slots,
            eos_token_ids: config.eos_token_id.into_iter().collect(),
            loadable: config.loadable.clone(),
        };
        let prefixes = vec![Vec::new(); config.slots as usize];
        let tokens = vec![Vec::new(); config.slots as usize];
        MockBackend {
            config,
            info,
            prefixes,
            tokens,
            version: 0,
            digest: digest(std::iter::empty()),
            forwards: 0,
        }
    }

    /// Computes the part's tokens: they follow what its slot holds.
    fn advance(&mut self, part: &BatchSequence, token_ids: &[i32]) -> Result<(), BackendError> {
        let slot = &mut self.prefixes[part.slot as usize];
        let start = part.start();
        if slot.len() < start {
            return Err(BackendError::Failed(format!(
                "slot {} has no KV before position {start}",
                part.slot
            )));
        }
        slot.truncate(start);
        for &token_id in token_ids {
            slot.push(fold(slot.last().copied().unwrap_or(0), token_id as u32));
        }
        if !self.config.script.is_empty() {
            let tokens = &mut self.tokens[part.slot as usize];
            tokens.truncate(start);
            tokens.extend(token_ids.iter().map(|id| *id as u32));
        }
        Ok(())
    }

    fn prompt_scores(&self, part: &BatchSequence) -> Vec<ScoredToken> {
        let Some(targets) = &part.prompt_targets else {
            return Vec::new();
        };
        let first = part.start() + targets.first_row as usize;
        let prefixes = &self.prefixes[part.slot as usize][first..];
        let scored = targets.targets.iter().zip(prefixes);
        scored
            .map(|(&id, &prefix)| self.config.score(prefix, id, self.version, targets.top))
            .collect()
    }

    fn next_token(&self, slot: u32, sample: &Sample) -> ScoredToken {
        let prefix = self.prefixes[slot as usize].last().copied().unwrap_or(0);
        let tokens = &self.tokens[slot as usize];
        let mut scripted = self.config.script.iter().map(|one| one.next(tokens));
        match scripted.find_map(|next| next) {
            next @ Some(_) if sample.allowed.is_some() => {
                self.config.structured(prefix, sample, self.version, next)
            }
            Some(next) => self.config.score(prefix, next, self.version, sample.top),
            None => self.config.sample(prefix, sample, self.version),
        }
    }

    fn break_down(&self) -> Result<(), BackendError> {
        if self.config.faults.fail_forward_at == Some(self.forwards) {
            return Err(BackendError::Failed(format!(
                "forward call {} fails as ordered",
                self.forwards
            )));
        }
        while self.config.faults.hang_forward_at == Some(self.forwards) {
            std::thread::park();
        }
        Ok(())
    }
}

impl Backend for MockBackend {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &Batch) -> Result<StepOutput, BackendError> {
        self.forwards += 1;
        self.break_down()?;
        let latency =
            self.config.step_latency + self.config.token_latency * batch.token_ids.len() as u32;
        if !latency.is_zero() {
            std::thread::sleep(latency);
        }
        let mut output = StepOutput {
            experts: self.config.reports_experts.then(|| expert_rows(batch)),
            ..StepOutput::default()
        };
        let mut row = 0;
        for sequence in &batch.sequences {
            let end = row + sequence.query_len as usize;
            self.advance(sequence, &batch.token_ids[row..end])?;
            row = end;
            output.prompt.extend(self.prompt_scores(sequence));
            let sample = sequence.sample.as_ref();
            output
                .sampled
                .extend(sample.map(|sample| self.next_token(sequence.slot, sample)));
        }
        Ok(output)
    }

    fn load_weights(&mut self, checkpoint: &Checkpoint) -> Result<(), BackendError> {
        if self.config.faults.refuse_update {
            return Err(BackendError::Refused(
                "the update is refused as ordered".into(),
            ));
        }
        self.version = checkpoint.policy_version + u64::from(self.config.faults.wrong_weights);
        self.digest = digest(
            checkpoint
                .tensors
                .iter()
                .map(|tensor| (&tensor.spec, xxh3_64(checkpoint.bytes(tensor)))),
        );
        Ok(())
    }

    fn digest(&mut self) -> Result<String, BackendError> {
        Ok(if self.config.faults.wrong_digest {
            "0".repeat(32)
        } else {
            self.digest.clone()
        })
    }
}
