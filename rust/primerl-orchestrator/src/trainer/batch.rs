//! A rank's part of a batch as the trainer takes it: msgpack, columns as little-endian bytes for `torch.frombuffer`.

use crate::failure::RunError;
use bytes::Bytes;
use primerl_core::pack::{MicroBatch, PackedBatch};
use primerl_core::{EnvironmentId, RolloutId, Step};
use serde::Serialize;
use serde_bytes::ByteBuf;
use std::collections::BTreeMap;

#[derive(Serialize)]
struct WireBatch<'a> {
    step: Step,
    rank: u32,
    ranks: u32,
    /// Over all ranks.
    loss_tokens: u64,
    metrics: &'a BTreeMap<String, f64>,
    micro_batches: Vec<WireMicroBatch<'a>>,
}

/// N tokens in S sequences.
#[derive(Serialize)]
struct WireMicroBatch<'a> {
    /// i32 `[N]`
    token_ids: ByteBuf,
    /// u8 `[N]`
    loss_mask: &'a serde_bytes::Bytes,
    /// f32 `[N]`
    logprobs: ByteBuf,
    /// f32 `[N]`
    advantages: ByteBuf,
    /// i32 `[N]`
    versions: ByteBuf,
    /// f32 `[N]`
    temperatures: ByteBuf,
    /// i32 `[S]`
    sequence_lengths: ByteBuf,
    /// `[S]`
    rollouts: &'a [RolloutId],
    /// `[S]`
    environments: &'a [EnvironmentId],
}

fn i32_column(column: &[i32]) -> ByteBuf {
    ByteBuf::from(
        column
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect::<Vec<u8>>(),
    )
}

fn f32_column(column: &[f32]) -> ByteBuf {
    ByteBuf::from(
        column
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect::<Vec<u8>>(),
    )
}

impl<'a> From<&'a MicroBatch> for WireMicroBatch<'a> {
    fn from(micro_batch: &'a MicroBatch) -> Self {
        WireMicroBatch {
            token_ids: i32_column(&micro_batch.token_ids),
            loss_mask: serde_bytes::Bytes::new(&micro_batch.loss_mask),
            logprobs: f32_column(&micro_batch.logprobs),
            advantages: f32_column(&micro_batch.advantages),
            versions: i32_column(&micro_batch.versions),
            temperatures: f32_column(&micro_batch.temperatures),
            sequence_lengths: i32_column(&micro_batch.sequence_lengths),
            rollouts: &micro_batch.rollouts,
            environments: &micro_batch.environments,
        }
    }
}

/// The bytes of the answer and of the spool.
pub fn encode(batch: &PackedBatch, rank: u32) -> Result<Bytes, RunError> {
    let failed = |problem: String| RunError::Encode {
        step: batch.step.0,
        problem,
    };
    let micro_batches = batch.ranks.get(rank as usize).ok_or_else(|| {
        failed(format!(
            "it has {} ranks, rank {rank} was asked for",
            batch.ranks.len()
        ))
    })?;
    let wire = WireBatch {
        step: batch.step,
        rank,
        ranks: batch.ranks.len() as u32,
        loss_tokens: batch.loss_tokens,
        metrics: &batch.metrics,
        micro_batches: micro_batches.iter().map(WireMicroBatch::from).collect(),
    };
    rmp_serde::to_vec_named(&wire)
        .map(Bytes::from)
        .map_err(|error| failed(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;

    #[derive(Deserialize)]
    struct Decoded {
        step: u64,
        rank: u32,
        ranks: u32,
        loss_tokens: u64,
        metrics: BTreeMap<String, f64>,
        micro_batches: Vec<DecodedColumns>,
    }

    #[derive(Deserialize)]
    struct DecodedColumns {
        token_ids: ByteBuf,
        loss_mask: ByteBuf,
        versions: ByteBuf,
        logprobs: ByteBuf,
        rollouts: Vec<u64>,
    }

    #[test]
    fn columns_are_little_endian_bytes() {
        let micro_batch = MicroBatch {
            token_ids: vec![1, 256],
            loss_mask: vec![0, 1],
            logprobs: vec![0.0, -0.5],
            advantages: vec![0.0, 2.0],
            versions: vec![-1, 3],
            temperatures: vec![1.0, 1.0],
            sequence_lengths: vec![2],
            rollouts: vec![RolloutId(9)],
            environments: vec![EnvironmentId(0)],
        };
        let batch = PackedBatch {
            step: Step(4),
            ranks: vec![vec![], vec![micro_batch]],
            loss_tokens: 1,
            metrics: BTreeMap::from([("reward/all/mean".into(), 0.5)]),
        };
        let body = encode(&batch, 1).expect("encodes");
        let decoded: Decoded = rmp_serde::from_slice(&body).expect("is a map");
        assert_eq!((decoded.step, decoded.rank, decoded.ranks), (4, 1, 2));
        assert_eq!(decoded.loss_tokens, 1);
        assert_eq!(decoded.metrics["reward/all/mean"], 0.5);
        let columns = &decoded.micro_batches[0];
        assert_eq!(columns.token_ids.as_slice(), [1, 0, 0, 0, 0, 1, 0, 0]);
        assert_eq!(columns.loss_mask.as_slice(), [0, 1]);
        assert_eq!(
            columns.versions.as_slice(),
            [255, 255, 255, 255, 3, 0, 0, 0]
        );
        assert_eq!(columns.logprobs.as_slice(), [0, 0, 0, 0, 0, 0, 0, 191]);
        assert_eq!(columns.rollouts, [9]);
        assert!(matches!(
            encode(&batch, 2),
            Err(RunError::Encode { step: 4, .. })
        ));
    }
}
