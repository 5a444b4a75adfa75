//! A rank's part of a batch as the trainer reads it: a msgpack header, followed by all columns as little-endian bytes
//! for `torch.frombuffer`. The columns are written here, once, directly from the tokens of the turns.
//!
//! ```text
//! {"header": bin(msgpack map), "columns": bin, "xxh3": bin(XXH3-64 of all bytes before this key, little-endian)}
//! ```
//! Where a micro-batch is packed as a tree, sequences share context with the previous one, whose values are the same in
//! all columns: these six omit them, and the header says how many (`omitted`).
//!
//! The columns of one micro-batch of N tokens follow those of the previous one: `token_ids` i32, `logprobs` f32,
//! `advantages` f32, `versions` i32, `temperatures` f32, `loss_mask` u8, each `[N]`, then zeros up to the next multiple
//! of [`ALIGNMENT`]; then the header's `extra_columns`, f32 `[N]`, each with its zeros: `teacher_logprobs` if a teacher
//! scored the tokens, `ce_weights`, 1 or 0, if it wrote some of them (or a weight, of what the environment said), both and
//! also `rl_weights` and `ref_kl_weights`, if environments learn from different things; then the rows of `routed_experts`,
//! `[tokens of its runs, layers, chosen]`, u8 or u16, if engines reported some, with their zeros. The first column also
//! begins at a multiple of [`ALIGNMENT`], counted from the body's start, so that a reader can use the columns in place.

mod body;

use body::{Body, Shared, omitted};
use bytes::Bytes;
use primerl_core::experts::ExpertsShape;
use primerl_core::pack::{ExpertsColumn, GrammarRun, MicroBatch, PackedBatch, TruncatedRun};
use primerl_core::{EnvironmentId, Grammar, RolloutId, Step, Truncation};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Alignment of a micro-batch's first column, in bytes; a multiple of every value's size.
const ALIGNMENT: usize = 16;
/// Size of one token in all columns together.
const BYTES_PER_TOKEN: usize = 5 * 4 + 1;
/// msgpack of a map of three entries and the first one's key, and of the second one's key.
const HEADER_KEY: &[u8] = b"\x83\xa6header";
const COLUMNS_KEY: &[u8] = b"\xa7columns";
/// The third key, with msgpack's mark of 8 bytes; the checksum of everything before it follows and ends the body.
const CHECKSUM_KEY: &[u8] = b"\xa4xxh3\xc4\x08";
const CHECKSUM_BYTES: usize = 8;
/// The first bytes of a body from before bodies ended with a checksum: a map of two entries.
const UNCHECKED: u8 = 0x82;
/// msgpack's mark of bytes whose length follows in four bytes, big-endian.
const BIN_32: u8 = 0xc6;

/// The batch does not have that rank, or the rank holds more than the format can express.
#[derive(Debug, thiserror::Error)]
#[error("cannot encode step {step} for the spool: {problem}")]
pub struct EncodeError {
    step: u64,
    problem: String,
}

#[derive(Serialize)]
struct Header<'a> {
    step: Step,
    rank: u32,
    ranks: u32,
    /// Number over all ranks.
    loss_tokens: u64,
    metrics: &'a BTreeMap<String, f64>,
    micro_batches: Vec<MicroBatchHeader>,
    /// Padding that aligns the first column.
    padding: &'a serde_bytes::Bytes,
}

/// N tokens in S sequences.
#[derive(Serialize)]
struct MicroBatchHeader {
    /// N
    tokens: usize,
    /// `[S]`
    sequence_lengths: Vec<usize>,
    /// `[S]`, leading tokens that each sequence takes over from the previous one, if any does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shared: Vec<usize>,
    /// `[S]`, leading tokens of each sequence that the first six columns omit: their values are those of the
    /// previous sequence's tokens at the same places.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    omitted: Vec<usize>,
    /// `[S]`
    rollouts: Vec<RolloutId>,
    /// `[S]`
    environments: Vec<EnvironmentId>,
    /// Tokens that were sampled from a truncated distribution.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    truncations: Vec<TruncationHeader>,
    /// Answers that were sampled with a grammar.
    #[serde(skip_serializing_if = "Grammars::is_empty")]
    grammars: Grammars,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    extra_columns: Vec<ExtraColumn>,
    /// Tokens whose experts are known.
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_experts: Option<ExpertsHeader>,
}

/// The rows behind the other columns: of each run's tokens, in order.
#[derive(Serialize)]
struct ExpertsHeader {
    #[serde(flatten)]
    shape: ExpertsShape,
    /// First token among the N, and the token after the last.
    runs: Vec<(usize, usize)>,
}

impl From<&ExpertsColumn<'_>> for ExpertsHeader {
    fn from(column: &ExpertsColumn<'_>) -> Self {
        ExpertsHeader {
            shape: column.shape,
            runs: column.runs.clone(),
        }
    }
}

/// A column that only some micro-batches have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum ExtraColumn {
    TeacherLogprobs,
    RlWeights,
    CeWeights,
    RefKlWeights,
}

impl ExtraColumn {
    /// Those values of a micro-batch, in order.
    fn of(micro_batch: &MicroBatch) -> Vec<ExtraColumn> {
        let mixed = micro_batch.is_mixed();
        let given = [
            (
                ExtraColumn::TeacherLogprobs,
                mixed || micro_batch.is_scored(),
            ),
            (ExtraColumn::RlWeights, mixed),
            (ExtraColumn::CeWeights, micro_batch.has_ce_weights()),
            (ExtraColumn::RefKlWeights, mixed),
        ];
        let given = given.into_iter().filter(|(_, is_given)| *is_given);
        given.map(|(column, _)| column).collect()
    }
}

/// Tokens `begin..end` of the N were sampled in this way.
#[derive(Serialize)]
struct TruncationHeader {
    begin: usize,
    end: usize,
    top_p: f32,
    top_k: u32,
    min_p: f32,
}

/// Different grammars, and the answers that they apply to.
#[derive(Default, Serialize)]
struct Grammars {
    kinds: Vec<Arc<Grammar>>,
    /// First token among the N, the token after the last, and the index into `kinds`.
    runs: Vec<(usize, usize, usize)>,
}

impl Grammars {
    fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

impl From<Vec<GrammarRun>> for Grammars {
    fn from(found: Vec<GrammarRun>) -> Self {
        let mut places: HashMap<Arc<Grammar>, usize> = HashMap::new();
        let mut grammars = Grammars::default();
        for GrammarRun {
            begin,
            end,
            grammar,
        } in found
        {
            let place = *places.entry(grammar).or_insert_with_key(|grammar| {
                grammars.kinds.push(Arc::clone(grammar));
                grammars.kinds.len() - 1
            });
            grammars.runs.push((begin, end, place));
        }
        grammars
    }
}

impl From<TruncatedRun> for TruncationHeader {
    fn from(run: TruncatedRun) -> Self {
        let Truncation {
            top_p,
            top_k,
            min_p,
        } = run.truncation;
        TruncationHeader {
            begin: run.begin,
            end: run.end,
            top_p,
            top_k,
            min_p,
        }
    }
}

impl MicroBatchHeader {
    fn new(micro_batch: &MicroBatch, experts: Option<&ExpertsColumn<'_>>, shared: Shared) -> Self {
        let sequences = micro_batch.sequences().iter();
        MicroBatchHeader {
            tokens: micro_batch.len(),
            sequence_lengths: sequences
                .clone()
                .map(|weighted| weighted.sample.len())
                .collect(),
            shared: micro_batch.shared().to_vec(),
            omitted: omitted(micro_batch, shared),
            rollouts: sequences
                .clone()
                .map(|weighted| weighted.sample.rollout)
                .collect(),
            environments: sequences.map(|weighted| weighted.environment).collect(),
            truncations: micro_batch
                .truncations()
                .into_iter()
                .map(TruncationHeader::from)
                .collect(),
            grammars: micro_batch.grammars().into(),
            extra_columns: ExtraColumn::of(micro_batch),
            routed_experts: experts.map(ExpertsHeader::from),
        }
    }
}

/// The bytes of the HTTP answer and of the spool.
pub fn encode(batch: &PackedBatch, rank: u32) -> Result<Bytes, EncodeError> {
    encode_with(batch, rank, Shared::Omitted)
}

/// Whether a body that was read is this rank's part of the batch: what [`encode`] writes, or what it wrote before bodies
/// had a checksum, or before they omitted anything.
pub fn is_of(read: &[u8], batch: &PackedBatch, rank: u32) -> Result<bool, EncodeError> {
    let is = |shared| Ok(is_the_same(read, &encode_with(batch, rank, shared)?));
    Ok(is(Shared::Omitted)? || is(Shared::Written)?)
}

fn encode_with(batch: &PackedBatch, rank: u32, shared: Shared) -> Result<Bytes, EncodeError> {
    let failed = |problem: String| EncodeError {
        step: batch.step.0,
        problem,
    };
    let micro_batches = batch.ranks.get(rank as usize).ok_or_else(|| {
        failed(format!(
            "it has {} ranks, rank {rank} was asked for",
            batch.ranks.len()
        ))
    })?;
    let experts: Result<Vec<_>, _> = micro_batches.iter().map(MicroBatch::experts).collect();
    let experts = experts.map_err(|error| failed(error.to_string()))?;
    let header = header(batch, rank, micro_batches, &experts, shared)
        .map_err(|error| failed(error.to_string()))?;
    let columns: usize = micro_batches
        .iter()
        .map(|micro_batch| aligned_size(micro_batch, shared))
        .sum();
    let columns = columns + experts.iter().flatten().map(experts_size).sum::<usize>();
    let end = CHECKSUM_KEY.len() + CHECKSUM_BYTES;
    let mut body = Body(Vec::with_capacity(frame(header.len()) + columns + end));
    body.0.extend_from_slice(HEADER_KEY);
    body.bytes_of(header.len()).map_err(failed)?;
    body.0.extend_from_slice(&header);
    body.0.extend_from_slice(COLUMNS_KEY);
    body.bytes_of(columns).map_err(failed)?;
    for (micro_batch, experts) in micro_batches.iter().zip(&experts) {
        body.columns(micro_batch, shared);
        if let Some(experts) = experts {
            body.experts(experts);
        }
    }
    let checksum = xxh3_64(&body.0);
    body.0.extend_from_slice(CHECKSUM_KEY);
    body.0.extend_from_slice(&checksum.to_le_bytes());
    Ok(Bytes::from(body.0))
}

/// The checksum that a body ends with, if it has one.
pub fn checksum(body: &[u8]) -> Option<u64> {
    let (content, stated) = checked(body)?;
    (xxh3_64(content) == stated).then_some(stated)
}

/// Whether a body was written before bodies ended with a checksum.
pub fn is_unchecked(body: &[u8]) -> bool {
    body.first() == Some(&UNCHECKED)
}

/// Whether a body that was read equals what `encode` writes: the same bytes, or those from before bodies had a
/// checksum.
fn is_the_same(read: &[u8], encoded: &[u8]) -> bool {
    let before = || -> Option<bool> {
        let (content, _) = checked(encoded)?;
        Some(is_unchecked(read) && read.get(1..) == content.get(1..))
    };
    read == encoded || before().unwrap_or(false)
}

/// The bytes before the checksum, and the checksum.
fn checked(body: &[u8]) -> Option<(&[u8], u64)> {
    let (content, end) = body.split_at_checked(
        body.len()
            .checked_sub(CHECKSUM_KEY.len() + CHECKSUM_BYTES)?,
    )?;
    let stated = end.strip_prefix(CHECKSUM_KEY)?;
    Some((content, u64::from_le_bytes(stated.try_into().ok()?)))
}

/// Where the columns begin after a header of that many bytes.
fn frame(header: usize) -> usize {
    HEADER_KEY.len() + 5 + header + COLUMNS_KEY.len() + 5
}

fn aligned_size(micro_batch: &MicroBatch, shared: Shared) -> usize {
    let extra = ExtraColumn::of(micro_batch).len();
    let extra = extra * (micro_batch.len() * 4).next_multiple_of(ALIGNMENT);
    let written = micro_batch.len() - omitted(micro_batch, shared).iter().sum::<usize>();
    (written * BYTES_PER_TOKEN).next_multiple_of(ALIGNMENT) + extra
}

fn experts_size(column: &ExpertsColumn<'_>) -> usize {
    column.len().next_multiple_of(ALIGNMENT)
}

fn header(
    batch: &PackedBatch,
    rank: u32,
    micro_batches: &[MicroBatch],
    experts: &[Option<ExpertsColumn<'_>>],
    shared: Shared,
) -> Result<Vec<u8>, rmp_serde::encode::Error> {
    let mut header = Header {
        step: batch.step,
        rank,
        ranks: batch.ranks.len() as u32,
        loss_tokens: batch.loss_tokens,
        metrics: &batch.metrics,
        micro_batches: (micro_batches.iter().zip(experts))
            .map(|(micro_batch, experts)| {
                MicroBatchHeader::new(micro_batch, experts.as_ref(), shared)
            })
            .collect(),
        padding: serde_bytes::Bytes::new(&[]),
    };
    let start = frame(rmp_serde::to_vec_named(&header)?.len());
    let padding = [0; ALIGNMENT];
    header.padding = serde_bytes::Bytes::new(&padding[..start.next_multiple_of(ALIGNMENT) - start]);
    rmp_serde::to_vec_named(&header)
}

#[cfg(test)]
mod tests;
