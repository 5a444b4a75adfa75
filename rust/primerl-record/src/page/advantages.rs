//! The advantage of each token, as the trainer got it: from the spool, while that has the batch.

use crate::batch;
use crate::spool::Spool;
use bytes::Bytes;
use primerl_core::{RolloutId, Step};
use serde::Deserialize;

/// Largest batch of one rank that is searched for one rollout.
const LARGEST: u64 = 512 << 20;

/// One trained sequence of a rollout, N tokens.
#[derive(Clone, Debug)]
pub(super) struct Sequence {
    pub token_ids: Vec<u32>,
    pub advantages: Vec<f32>,
}

#[derive(Deserialize)]
struct Frame<'a> {
    #[serde(borrow)]
    header: &'a serde_bytes::Bytes,
    #[serde(borrow)]
    columns: &'a serde_bytes::Bytes,
}

#[derive(Deserialize)]
struct Header {
    micro_batches: Vec<MicroBatch>,
}

#[derive(Deserialize)]
struct MicroBatch {
    tokens: usize,
    sequence_lengths: Vec<usize>,
    rollouts: Vec<u64>,
    #[serde(default)]
    omitted: Vec<usize>,
    #[serde(default)]
    extra_columns: Vec<String>,
    #[serde(default)]
    routed_experts: Option<Experts>,
}

#[derive(Deserialize)]
struct Experts {
    layers: usize,
    chosen: usize,
    bytes: usize,
    runs: Vec<(usize, usize)>,
}

impl Experts {
    /// Size of their rows, without what aligns them.
    fn size(&self) -> Option<usize> {
        let rows = self
            .runs
            .iter()
            .map(|(begin, end)| end.checked_sub(*begin))
            .try_fold(0_usize, |sum, rows| sum.checked_add(rows?))?;
        let row = self.layers.checked_mul(self.chosen)?;
        rows.checked_mul(row.checked_mul(self.bytes)?)
    }
}

impl MicroBatch {
    /// Tokens whose values are written in the first columns.
    fn written(&self) -> Option<usize> {
        let mut omitted = self.omitted.iter();
        let omitted = omitted.try_fold(0_usize, |sum, tokens| sum.checked_add(*tokens))?;
        self.tokens.checked_sub(omitted)
    }

    /// Bytes of all columns.
    fn size(&self) -> Option<usize> {
        let aligned = |bytes: usize| bytes.checked_next_multiple_of(16);
        let own = aligned(self.written()?.checked_mul(21)?)?;
        let extra = aligned(self.tokens.checked_mul(4)?)?.checked_mul(self.extra_columns.len())?;
        let experts = match &self.routed_experts {
            Some(experts) => aligned(experts.size()?)?,
            None => 0,
        };
        own.checked_add(extra)?.checked_add(experts)
    }

    /// A column of four bytes a token, with the omitted values: those of the previous sequence.
    fn column(&self, columns: &[u8], number: usize) -> Option<Vec<[u8; 4]>> {
        let size = 4 * self.written()?;
        let mut rest = words(columns.get(number * size..)?.get(..size)?);
        let (mut column, mut before) = (Vec::with_capacity(self.tokens), 0..0);
        for (place, length) in self.sequence_lengths.iter().enumerate() {
            let omitted = self.omitted.get(place).copied().unwrap_or(0);
            let (start, own) = (column.len(), length.checked_sub(omitted)?);
            if omitted > before.len() {
                return None;
            }
            column.extend_from_within(before.start..before.start + omitted);
            column.extend(rest.by_ref().take(own));
            before = start..start + length;
            if column.len() < before.end {
                return None;
            }
        }
        Some(column)
    }

    /// The rollout's sequences in its columns.
    fn sequences(&self, columns: &[u8], rollout: RolloutId) -> Option<Vec<Sequence>> {
        // In the order of `batch`: ids, log-probabilities, advantages.
        let (token_ids, advantages) = (self.column(columns, 0)?, self.column(columns, 2)?);
        let (mut begin, mut found) = (0, Vec::new());
        let sequences = self.sequence_lengths.iter();
        for (length, of) in sequences.zip(&self.rollouts) {
            let own = begin..begin + length;
            if *of == rollout.0 {
                let bytes = |column: &[[u8; 4]]| Some(column.get(own.clone())?.to_vec());
                let ids = bytes(&token_ids)?.into_iter().map(u32::from_le_bytes);
                let values = bytes(&advantages)?.into_iter();
                found.push(Sequence {
                    token_ids: ids.collect(),
                    advantages: values.map(f32::from_le_bytes).collect(),
                });
            }
            begin += length;
        }
        Some(found)
    }
}

/// The rollout's sequences in the batch of `step`; empty if the batch is gone or cannot be read.
pub(super) fn of_rollout(
    spool: &Spool,
    ranks: u32,
    step: Step,
    rollout: RolloutId,
) -> Vec<Sequence> {
    // Checked before it is read: a batch that is too large must not be in memory either.
    let is_read = |rank: &u32| spool.size(step, *rank).is_some_and(|size| size <= LARGEST);
    let ranks = (0..ranks).filter(is_read);
    ranks
        .filter_map(|rank| spool.read(step, rank).ok())
        .flat_map(|body| in_body(&body, rollout).unwrap_or_default())
        .collect()
}

/// `None` if the body is not what `batch` writes, or is damaged.
fn in_body(body: &Bytes, rollout: RolloutId) -> Option<Vec<Sequence>> {
    if batch::checksum(body).is_none() && !batch::is_unchecked(body) {
        return None;
    }
    let frame: Frame<'_> = rmp_serde::from_slice(body).ok()?;
    let header: Header = rmp_serde::from_slice(frame.header).ok()?;
    let (mut columns, mut found) = (&frame.columns[..], Vec::new());
    for micro_batch in header.micro_batches {
        let (part, rest) = columns.split_at_checked(micro_batch.size()?)?;
        columns = rest;
        if !micro_batch.rollouts.contains(&rollout.0) {
            continue;
        }
        found.extend(micro_batch.sequences(part, rollout)?);
    }
    Some(found)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes
        .chunks_exact(4)
        .filter_map(|word| word.try_into().ok())
}

/// The advantages of a turn's sampled tokens, which follow `before` tokens of prompt in one of the sequences.
pub(super) fn of_turn(sequences: &[Sequence], before: usize, sampled: &[u32]) -> Option<Vec<f32>> {
    let end = before + sampled.len();
    let holds = |sequence: &&Sequence| sequence.token_ids.get(before..end) == Some(sampled);
    let sequence = sequences.iter().find(holds)?;
    Some(sequence.advantages[before..end].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_core::config::{FlopsModel, TrajectoryStrategy};
    use primerl_core::experts::{Experts, ExpertsShape};
    use primerl_core::pack::{Advantage, PackedBatch, Weighted, pack_trees};
    use primerl_core::sample::samples;
    use primerl_core::testing::turn;
    use primerl_core::{EnvironmentId, Turn};
    use std::collections::BTreeMap;
    use std::sync::Arc;

    fn weighted(rollout: u64, turn: Turn) -> Weighted {
        let strategy = TrajectoryStrategy::Interleaved;
        Weighted {
            sample: samples(strategy, RolloutId(rollout), vec![turn], &[Some(0)]).remove(0),
            environment: EnvironmentId(0),
            advantage: Advantage::Uniform(rollout as f32 + 0.5),
            teacher_logprobs: None,
            mode: None,
            echo: None,
        }
    }

    #[test]
    fn advantages_are_found_behind_omitted_context_and_experts() {
        // Two groups, of two micro-batches: each shares a prompt, and the engine told the experts of the first.
        let group = |first: u64, with_experts: bool| {
            (first..first + 3).map(move |rollout| {
                let prompt = vec![first as u32; 64];
                let mut turn = turn(None, &prompt, &[100 + rollout as u32, 7], 3);
                let shape = ExpertsShape {
                    layers: 1,
                    chosen: 1,
                    bytes: 1,
                };
                let experts = || Experts::new(0, shape, vec![0; 65]).map(Arc::new);
                turn.experts = with_experts.then(experts).flatten();
                weighted(rollout, turn)
            })
        };
        let all: Vec<Weighted> = group(0, true).chain(group(3, false)).collect();
        let flops = FlopsModel {
            linear: 1.0,
            quadratic: 0.0,
        };
        let batch = PackedBatch {
            step: Step(4),
            ranks: pack_trees(all, &[3, 3], 80, 1, flops),
            loss_tokens: 12,
            metrics: BTreeMap::new(),
        };
        assert_eq!(batch.ranks[0].len(), 2);
        let body = batch::encode(&batch, 0).expect("encodes");
        for rollout in 0..6 {
            let found = in_body(&body, RolloutId(rollout)).expect("is read");
            let sampled = [100 + rollout as u32, 7];
            let advantages = of_turn(&found, 64, &sampled).expect("the sequence is whole");
            assert_eq!(advantages, [rollout as f32 + 0.5; 2]);
            let prompt = &found[0].token_ids[..64];
            assert!(prompt.iter().all(|token| *token == rollout as u32 / 3 * 3));
        }
    }
}
