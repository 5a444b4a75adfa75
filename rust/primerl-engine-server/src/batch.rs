//! One step's work: which tokens are computed, where their KV goes, and how to sample.
//!
//! Worked example, two running sequences (one token each) and one new prompt of three tokens:
//! ```text
//! token_ids    [a | b | p0 p1 p2]
//! positions    [9 | 4 |  0  1  2]
//! sequences    [slot 1, query 1, context 10] [slot 0, query 1, context 5] [slot 2, query 3, context 3]
//! ```
//! Sequences are sorted so that neighbours cost alike, and cut into [`Segment`]s a backend may pad without waste.

use crate::grammar::Allowed;
use crate::request::RequestKey;
use xxhash_rust::xxh3::xxh3_64_with_seed;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    /// Tokens whose KV is to be computed, `[N]`, sequence after sequence.
    pub token_ids: Vec<i32>,
    /// Position of each token in its sequence, `[N]`.
    pub positions: Vec<i32>,
    pub sequences: Vec<BatchSequence>,
    pub segments: Vec<Segment>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct BatchSequence {
    pub key: RequestKey,
    /// Where its KV lives.
    pub slot: u32,
    /// Tokens of this sequence in this batch, at least 1.
    pub query_len: u32,
    /// Position of its last token in this batch + 1: how many KV entries its last token attends to.
    pub context_len: u32,
    /// Sample the token after the last one. `None` in all but the last chunk of a long prompt.
    pub sample: Option<Sample>,
    /// Prompt tokens to be scored: target i follows the token at `first_row + i` of this sequence's part.
    pub prompt_targets: Option<PromptTargets>,
}

impl BatchSequence {
    /// Position of its first token in this batch.
    pub fn start(&self) -> usize {
        (self.context_len - self.query_len) as usize
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct PromptTargets {
    pub first_row: u32,
    pub targets: Vec<u32>,
    pub top: u32,
}

/// How to sample one token.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// 0 is greedy.
    pub temperature: f32,
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    pub min_p: f32,
    /// The one random number of this token, in (0, 1): the token is where the cumulative distribution passes it.
    pub uniform: f64,
    /// How many of the most likely tokens are to be returned.
    pub top: u32,
    /// Tokens that must not be sampled here (their raw log-probability is not changed by that).
    pub banned: Vec<u32>,
    /// All other tokens are excluded before anything else, raw log-probabilities included, as in vLLM.
    pub allowed: Option<Allowed>,
}

/// Consecutive sequences of a batch whose attention may be computed as one padded block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    pub first: u32,
    pub count: u32,
    /// Longest query of the segment.
    pub query_len: u32,
    /// Longest context of the segment.
    pub context_len: u32,
}

/// The random number of output token `index` of a request with this seed.
///
/// It depends on nothing else, so what a request samples does not depend on who shares its batch or whether it was
/// preempted. 48 bits, never 0 or 1.
pub fn uniform(seed: u64, index: u32) -> f64 {
    let bits = xxh3_64_with_seed(&index.to_le_bytes(), seed) >> 16;
    (bits as f64 + 0.5) / (1u64 << 48) as f64
}

/// A segment may cost this many times its exact cost plus [`FREE_PADDING`] before it is cut: a cut costs a backend
/// a fixed overhead, padding costs arithmetic.
const PADDING_FACTOR: u64 = 2;
/// Query-key pairs that cost less than the overhead of one more segment.
const FREE_PADDING: u64 = 4096;

impl Segment {
    fn of(index: u32, sequence: &BatchSequence) -> Segment {
        Segment {
            first: index,
            count: 1,
            query_len: sequence.query_len,
            context_len: sequence.context_len,
        }
    }

    /// With one more sequence; `None` if it is of another kind, or if padding would cost too much. `exact` is the cost
    /// of all sequences without padding.
    fn with(&self, sequence: &BatchSequence, exact: u64) -> Option<Segment> {
        let joined = Segment {
            count: self.count + 1,
            query_len: self.query_len.max(sequence.query_len),
            context_len: self.context_len.max(sequence.context_len),
            ..*self
        };
        let padded =
            u64::from(joined.count) * u64::from(joined.query_len) * u64::from(joined.context_len);
        let same_kind = (self.query_len > 1) == (sequence.query_len > 1);
        (same_kind && padded <= PADDING_FACTOR * exact + FREE_PADDING).then_some(joined)
    }
}

/// Sorts `sequences` (single tokens first, then by context) and cuts them into segments, which are sorted by slot:
/// where the slots lie side by side a backend need not gather their KV.
pub fn arrange(sequences: &mut [BatchSequence]) -> Vec<Segment> {
    sequences.sort_by_key(|sequence| (sequence.query_len > 1, sequence.context_len, sequence.key));
    let mut segments: Vec<Segment> = Vec::new();
    let mut exact = 0;
    for (index, sequence) in sequences.iter().enumerate() {
        let cost = u64::from(sequence.query_len) * u64::from(sequence.context_len);
        if let Some(last) = segments.last_mut()
            && let Some(joined) = last.with(sequence, exact + cost)
        {
            *last = joined;
            exact += cost;
            continue;
        }
        segments.push(Segment::of(index as u32, sequence));
        exact = cost;
    }
    for segment in &segments {
        let members = segment.first as usize..(segment.first + segment.count) as usize;
        sequences[members].sort_by_key(|sequence| sequence.slot);
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sequence(key: u64, query_len: u32, context_len: u32) -> BatchSequence {
        BatchSequence {
            key: RequestKey(key),
            slot: key as u32,
            query_len,
            context_len,
            sample: None,
            prompt_targets: None,
        }
    }

    #[test]
    fn one_long_sequence_gets_its_own_segment() {
        let mut sequences: Vec<_> = (0..100).map(|key| sequence(key, 1, 40)).collect();
        sequences.insert(3, sequence(100, 1, 1500));
        let segments = arrange(&mut sequences);
        assert_eq!(segments.len(), 2);
        assert_eq!((segments[0].count, segments[1].context_len), (100, 1500));
    }

    #[test]
    fn uniform_numbers_are_uniform_and_repeatable() {
        let numbers: Vec<f64> = (0..10_000)
            .map(|index| uniform(u64::from(index % 100), index / 100))
            .collect();
        let mean = numbers.iter().sum::<f64>() / numbers.len() as f64;
        let variance = numbers
            .iter()
            .map(|number| (number - mean).powi(2))
            .sum::<f64>()
            / numbers.len() as f64;
        assert!(
            (mean - 0.5).abs() < 0.01 && (variance - 1.0 / 12.0).abs() < 0.003,
            "{mean} {variance}"
        );
        assert_eq!(uniform(7, 3), uniform(7, 3));
    }

    proptest! {
        #[test]
        fn segments_cover_every_sequence_once_without_much_padding(
            lengths in prop::collection::vec((1u32..50, 0u32..2000), 1..80)
        ) {
            let mut sequences: Vec<_> = lengths
                .iter()
                .enumerate()
                .map(|(key, &(query, before))| sequence(key as u64, query, query + before))
                .collect();
            let segments = arrange(&mut sequences);
            let mut next = 0;
            for segment in segments {
                prop_assert_eq!(segment.first, next);
                next += segment.count;
                let members = &sequences[segment.first as usize..next as usize];
                let exact: u64 = members.iter().map(|m| u64::from(m.query_len) * u64::from(m.context_len)).sum();
                let padded = u64::from(segment.count) * u64::from(segment.query_len) * u64::from(segment.context_len);
                prop_assert!(members.iter().all(|m| m.query_len <= segment.query_len && m.context_len <= segment.context_len));
                prop_assert!(padded <= PADDING_FACTOR * exact + FREE_PADDING);
                prop_assert!(segment.query_len > 1 || members.iter().all(|m| m.query_len == 1));
            }
            prop_assert_eq!(next as usize, sequences.len());
        }
    }
}
