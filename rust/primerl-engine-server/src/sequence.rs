//! One sequence in the scheduler: its tokens, how far its KV is computed, and when it ends.

use crate::backend::ScoredToken;
use crate::batch::{BatchSequence, PromptTargets, Sample, uniform};
use crate::experts::{ExpertRows, SequenceExperts};
use crate::grammar::Grammar;
use crate::request::{FinishReason, RequestKey, SamplingParams};
use crate::schedulable::{Rank, Schedulable};
use crate::versions::{Epoch, VersionSpan, Versions};

/// A request for one sequence.
#[derive(Clone, Debug)]
pub struct Submission {
    pub key: RequestKey,
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    /// What the answer must obey.
    pub grammar: Option<Grammar>,
    /// Lower runs first; equal ones in order of arrival.
    pub priority: i32,
    /// Report every token as it is sampled.
    pub stream: bool,
}

/// The answer to a [`Submission`]: exactly one for each.
#[derive(Clone, Debug, PartialEq)]
pub struct Completion {
    pub key: RequestKey,
    pub finish: FinishReason,
    /// The stop token that ended it; `None` for end of sequence.
    pub stop_token: Option<u32>,
    pub tokens: Vec<ScoredToken>,
    pub versions: Vec<VersionSpan>,
    /// Scores of prompt tokens 1.. when they were asked for and computed.
    pub prompt: Option<Vec<ScoredToken>>,
    /// The experts of its tokens, from the request's first on, where the backend reports them.
    pub experts: Option<ExpertRows>,
    /// Why it ended with [`FinishReason::Error`].
    pub failure: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Sequence {
    pub key: RequestKey,
    pub priority: i32,
    pub arrival: u64,
    pub stream: bool,
    sampling: SamplingParams,
    grammar: Option<Grammar>,
    failure: Option<String>,
    prompt_len: usize,
    /// Prompt, then output.
    tokens: Vec<u32>,
    output: Vec<ScoredToken>,
    /// `(epoch, number of output tokens)`, in order.
    runs: Vec<(Epoch, u32)>,
    prompt_scores: Vec<ScoredToken>,
    experts: SequenceExperts,
    /// KV entries that are valid.
    pub computed: usize,
}

impl Schedulable for Sequence {
    fn rank(&self) -> Rank {
        (self.priority, self.arrival)
    }

    fn kv_needed(&self) -> u64 {
        self.tokens.len() as u64
    }

    fn remaining(&self) -> usize {
        self.tokens.len() - self.computed
    }

    fn has_output(&self) -> bool {
        !self.output.is_empty()
    }

    fn drop_cache(&mut self) {
        self.computed = 0;
        if self.output.is_empty() {
            self.prompt_scores.clear();
        }
    }
}

impl Sequence {
    pub fn new(submission: Submission, arrival: u64) -> Self {
        Sequence {
            key: submission.key,
            priority: submission.priority,
            arrival,
            stream: submission.stream,
            sampling: submission.sampling,
            grammar: submission.grammar,
            failure: None,
            prompt_len: submission.prompt.len(),
            tokens: submission.prompt,
            output: Vec::new(),
            runs: Vec::new(),
            prompt_scores: Vec::new(),
            experts: SequenceExperts::default(),
            computed: 0,
        }
    }

    /// The next `count` tokens as a part of a batch; their ids and positions are appended to the columns.
    pub fn schedule(
        &self,
        slot: u32,
        count: usize,
        token_ids: &mut Vec<i32>,
        positions: &mut Vec<i32>,
    ) -> BatchSequence {
        let end = self.computed + count;
        token_ids.extend(self.tokens[self.computed..end].iter().map(|&id| id as i32));
        positions.extend((self.computed..end).map(|position| position as i32));
        BatchSequence {
            key: self.key,
            slot,
            query_len: count as u32,
            context_len: end as u32,
            sample: (end == self.tokens.len()).then(|| self.sample()),
            prompt_targets: self.prompt_targets(end),
        }
    }

    fn sample(&self) -> Sample {
        let sampling = &self.sampling;
        let mut banned = Vec::new();
        if (self.output.len() as u32) < sampling.min_tokens {
            banned.extend(sampling.eos_token_id);
            banned.extend(&sampling.stop_token_ids);
        }
        Sample {
            temperature: sampling.temperature,
            top_p: sampling.top_p,
            top_k: sampling.top_k,
            min_p: sampling.min_p,
            uniform: uniform(sampling.seed, self.output.len() as u32),
            top: sampling.top_logprobs,
            banned,
            allowed: self.grammar.as_ref().map(|grammar| grammar.next().clone()),
        }
    }

    /// Each prompt token is scored once; a recomputation after a preemption scores none again.
    fn prompt_targets(&self, end: usize) -> Option<PromptTargets> {
        let top = self.sampling.prompt_logprobs?;
        let next = self.prompt_scores.len() + 1;
        let last = (end + 1).min(self.prompt_len);
        if self.has_output() || next < self.computed + 1 || next >= last {
            return None;
        }
        let first_row = (next - 1 - self.computed) as u32;
        Some(PromptTargets {
            first_row,
            targets: self.tokens[next..last].to_vec(),
            top,
        })
    }

    pub fn record_prompt(&mut self, scores: impl Iterator<Item = ScoredToken>) {
        self.prompt_scores.extend(scores);
    }

    /// Before the tokens count as computed: `step` has the rows of a batch, those of this sequence begin at `first`.
    pub fn record_experts(&mut self, step: &ExpertRows, first: usize, count: usize) {
        self.experts.record(step, first, count, self.computed);
    }

    /// Appends a sampled token and says whether, and why, the sequence has ended.
    pub fn record(
        &mut self,
        token: ScoredToken,
        epoch: Epoch,
    ) -> Option<(FinishReason, Option<u32>)> {
        let id = token.token_id;
        if let Some(failure) = self.disallowed(id) {
            self.failure = Some(failure);
            return Some((FinishReason::Error, None));
        }
        self.tokens.push(id);
        self.output.push(token);
        match self.runs.last_mut() {
            Some((last, count)) if *last == epoch => *count += 1,
            _ => self.runs.push((epoch, 1)),
        }
        let count = self.output.len() as u32;
        if count >= self.sampling.min_tokens {
            if self.sampling.eos_token_id == Some(id) {
                return Some((FinishReason::Stop, None));
            }
            if self.sampling.stop_token_ids.binary_search(&id).is_ok() {
                return Some((FinishReason::Stop, Some(id)));
            }
        }
        if count >= self.sampling.max_tokens {
            return Some((FinishReason::Length, None));
        }
        if let Some(grammar) = &mut self.grammar {
            grammar.push(id);
        }
        None
    }

    /// Why the grammar, if any, cannot have this token next.
    fn disallowed(&self, id: u32) -> Option<String> {
        match self.grammar.as_ref()?.allows(id) {
            Ok(true) => None,
            Ok(false) => Some(format!(
                "token {id} was sampled, which the grammar does not allow"
            )),
            Err(error) => Some(error.to_string()),
        }
    }

    pub fn last_output(&self) -> Option<&ScoredToken> {
        self.output.last()
    }

    pub fn output_len(&self) -> usize {
        self.output.len()
    }

    pub fn complete(
        self,
        finish: FinishReason,
        stop_token: Option<u32>,
        versions: &Versions,
    ) -> Completion {
        Completion {
            key: self.key,
            finish,
            stop_token,
            versions: versions.spans(&self.runs),
            tokens: self.output,
            prompt: self.sampling.prompt_logprobs.map(|_| self.prompt_scores),
            experts: self.experts.from(self.sampling.experts_from as usize),
            failure: self.failure,
        }
    }
}
