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
    extra_columns: Vec<String>,
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
        let n = micro_batch.tokens;
        let own = (21 * n).next_multiple_of(16);
        let extra = micro_batch.extra_columns.len() * (4 * n).next_multiple_of(16);
        let (part, rest) = columns.split_at_checked(own + extra)?;
        columns = rest;
        let mut begin = 0;
        for (length, of) in micro_batch
            .sequence_lengths
            .iter()
            .zip(&micro_batch.rollouts)
        {
            if *of == rollout.0 {
                // In the order of `batch`: ids, log-probabilities, advantages.
                let word = |column: usize| part.get(4 * (column * n + begin)..)?.get(..4 * length);
                found.push(Sequence {
                    token_ids: words(word(0)?).map(u32::from_le_bytes).collect(),
                    advantages: words(word(2)?).map(f32::from_le_bytes).collect(),
                });
            }
            begin += length;
        }
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
