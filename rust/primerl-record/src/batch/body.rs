//! The columns of a micro-batch as bytes, written once, directly from the tokens of the turns.

use super::{ALIGNMENT, BIN_32, BYTES_PER_TOKEN, ExtraColumn, experts_size};
use primerl_core::pack::{Advantage, ExpertsColumn, MicroBatch, Weighted};
use primerl_core::sample::{Segment, Trained};

/// What becomes of context that sequences share.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shared {
    Omitted,
    /// As earlier versions did.
    Written,
}

/// Leading tokens of each sequence whose values in the first six columns are those of the previous sequence's tokens at
/// the same places: of what both share, the context, of which nothing was sampled in either. Empty where there are none.
pub(super) fn omitted(micro_batch: &MicroBatch, shared: Shared) -> Vec<usize> {
    if shared == Shared::Written {
        return Vec::new();
    }
    let context = |weighted: &Weighted| -> usize {
        let segments = weighted.sample.segments().iter();
        let context = segments.take_while(|segment| segment.trained().is_none());
        context.map(Segment::len).sum()
    };
    let mut before = 0;
    let sequences = micro_batch.sequences().iter().zip(micro_batch.shared());
    let omitted = sequences.map(|(weighted, shared)| {
        let own = context(weighted);
        let both = std::mem::replace(&mut before, own).min(own);
        both.min(*shared)
    });
    let omitted: Vec<usize> = omitted.collect();
    match omitted.iter().any(|tokens| *tokens > 0) {
        true => omitted,
        false => Vec::new(),
    }
}

/// What is written of a segment: all but its first tokens.
#[derive(Clone, Copy)]
struct Part<'a> {
    segment: &'a Segment,
    /// Omitted tokens, none of which was sampled.
    skipped: usize,
    /// Its first token's place in the sample.
    start: usize,
    advantage: &'a Advantage,
}

impl Part<'_> {
    fn len(&self) -> usize {
        self.segment.len() - self.skipped
    }
}

fn parts(micro_batch: &MicroBatch, shared: Shared) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let omitted = omitted(micro_batch, shared);
    for (place, weighted) in micro_batch.sequences().iter().enumerate() {
        let mut left = omitted.get(place).copied().unwrap_or(0);
        let mut start = 0;
        for segment in weighted.sample.segments() {
            let skipped = left.min(segment.len());
            left -= skipped;
            parts.push(Part {
                segment,
                skipped,
                start,
                advantage: &weighted.advantage,
            });
            start += segment.len();
        }
    }
    parts
}

pub(super) struct Body(pub(super) Vec<u8>);

impl Body {
    /// Writes the header of so many bytes.
    pub(super) fn bytes_of(&mut self, length: usize) -> Result<(), String> {
        let length = u32::try_from(length)
            .map_err(|_| format!("{length} bytes are too many for one answer: raise data_ranks"))?;
        self.0.push(BIN_32);
        self.0.extend_from_slice(&length.to_be_bytes());
        Ok(())
    }

    pub(super) fn columns(&mut self, micro_batch: &MicroBatch, shared: Shared) {
        let parts = parts(micro_batch, shared);
        for part in &parts {
            let tokens = &part.segment.token_ids()[part.skipped..];
            self.values(tokens, |token| (*token as i32).to_le_bytes());
        }
        for part in &parts {
            match part.segment.logprobs() {
                Some(logprobs) => self.values(logprobs, |logprob| logprob.to_le_bytes()),
                None => self.zeros(4 * part.len()),
            }
        }
        for part in &parts {
            self.advantages(part);
        }
        for part in &parts {
            self.versions(part.segment.trained(), part.len());
        }
        for part in &parts {
            let trained = part.segment.trained();
            let temperature = trained.map_or(1.0, |trained| trained.temperature);
            self.repeated(temperature.to_le_bytes(), part.len());
        }
        for part in &parts {
            let mask = u8::from(part.segment.trained().is_some());
            self.0.resize(self.0.len() + part.len(), mask);
        }
        let size = parts.iter().map(Part::len).sum::<usize>() * BYTES_PER_TOKEN;
        self.zeros(size.next_multiple_of(ALIGNMENT) - size);
        for column in ExtraColumn::of(micro_batch) {
            self.extra(column, micro_batch);
        }
    }

    fn extra(&mut self, column: ExtraColumn, micro_batch: &MicroBatch) {
        match column {
            ExtraColumn::TeacherLogprobs => {
                for weighted in micro_batch.sequences() {
                    self.values(&weighted.teacher_logprobs(), |value| value.to_le_bytes());
                }
            }
            ExtraColumn::RlWeights => self.weights(micro_batch.rl_weights()),
            ExtraColumn::CeWeights => self.weights(micro_batch.ce_weights().into_iter()),
            ExtraColumn::RefKlWeights => self.weights(micro_batch.ref_kl_weights()),
        }
        let size = 4 * micro_batch.len();
        self.zeros(size.next_multiple_of(ALIGNMENT) - size);
    }

    fn weights(&mut self, weights: impl Iterator<Item = f32>) {
        self.0.extend(weights.flat_map(f32::to_le_bytes));
    }

    pub(super) fn experts(&mut self, column: &ExpertsColumn<'_>) {
        for ids in &column.ids {
            self.0.extend_from_slice(ids);
        }
        self.zeros(experts_size(column) - column.len());
    }

    fn advantages(&mut self, part: &Part<'_>) {
        match (part.segment.trained(), part.advantage) {
            (None, _) => self.zeros(4 * part.len()),
            (Some(_), Advantage::Uniform(advantage)) => {
                self.repeated(advantage.to_le_bytes(), part.len());
            }
            (Some(_), Advantage::PerToken { values, scale }) => {
                let values = &values[part.start..part.start + part.len()];
                self.values(values, |value| (value * scale).to_le_bytes());
            }
        }
    }

    fn versions(&mut self, trained: Option<&Trained>, tokens: usize) {
        let Some(trained) = trained else {
            return self.repeated((-1_i32).to_le_bytes(), tokens);
        };
        for run in &trained.versions {
            self.repeated((run.version.0 as i32).to_le_bytes(), run.n_tokens as usize);
        }
    }

    fn zeros(&mut self, bytes: usize) {
        self.0.resize(self.0.len() + bytes, 0);
    }

    /// In pieces that stay in the cache: value by value would be several times slower.
    fn values<T>(&mut self, values: &[T], to_bytes: impl Fn(&T) -> [u8; 4]) {
        let mut piece = [0_u8; 4096];
        for values in values.chunks(piece.len() / 4) {
            for (bytes, value) in piece.chunks_exact_mut(4).zip(values) {
                bytes.copy_from_slice(&to_bytes(value));
            }
            self.0.extend_from_slice(&piece[..4 * values.len()]);
        }
    }

    fn repeated(&mut self, value: [u8; 4], times: usize) {
        let mut piece = [0_u8; 4096];
        let filled = piece.len().min(4 * times);
        for bytes in piece[..filled].chunks_exact_mut(4) {
            bytes.copy_from_slice(&value);
        }
        let mut left = 4 * times;
        while left > 0 {
            let length = left.min(piece.len());
            self.0.extend_from_slice(&piece[..length]);
            left -= length;
        }
    }
}
