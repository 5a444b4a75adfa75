//! The experts of a mixture that the engine chose for tokens, to be replayed by the trainer.

use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;
use std::sync::Arc;

/// The experts that the engine chose for the tokens of one turn, from the token before `prompt_suffix` on, or from its
/// first: one row a token, of `layers` times `chosen` ids.
///
/// The engine never computed the last token that it sampled, so there is no row of it; the next turn's first row is
/// that token's.
///
/// Worked example, two turns of one conversation:
/// ```text
/// turn 0: prompt_suffix [p0 p1 p2],  sampled [a b END]     rows p0 p1 p2 a b
/// turn 1: prompt_suffix [\n u0 u1],  sampled [c END]       rows END \n u0 u1 c      before = 1
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Experts {
    /// Rows of tokens before `prompt_suffix`: 0 or 1.
    pub before: u32,
    pub shape: ExpertsShape,
    /// Rows one after the other, ids little-endian.
    ids: ByteBuf,
}

/// What the rows of one model have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpertsShape {
    pub layers: u16,
    /// Experts a token and layer.
    pub chosen: u16,
    /// Bytes of an id: 1 or 2.
    pub bytes: u8,
}

impl ExpertsShape {
    /// Bytes of a token's row. 0 for no row at all.
    pub fn row(&self) -> usize {
        usize::from(self.layers) * usize::from(self.chosen) * usize::from(self.bytes)
    }
}

impl Experts {
    /// `None` for ids that are not whole rows of that shape, or none.
    pub fn new(before: u32, shape: ExpertsShape, ids: Vec<u8>) -> Option<Experts> {
        let is_sound = matches!(shape.bytes, 1 | 2) && shape.row() > 0 && before <= 1;
        let is_whole = is_sound && !ids.is_empty() && ids.len().is_multiple_of(shape.row());
        is_whole.then(|| Experts {
            before,
            shape,
            ids: ByteBuf::from(ids),
        })
    }

    /// Number of tokens whose experts are known.
    pub fn rows(&self) -> usize {
        self.ids.len().checked_div(self.shape.row()).unwrap_or(0)
    }

    /// The ids of the first `rows` tokens.
    pub fn first(&self, rows: usize) -> &[u8] {
        let end = rows.saturating_mul(self.shape.row());
        self.ids.get(..end).unwrap_or(&self.ids)
    }

    /// Whether they can be of a turn with a parent or without, which added `tokens` tokens.
    pub fn are_of(&self, has_parent: bool, tokens: usize) -> bool {
        let row = self.shape.row();
        self.before <= u32::from(has_parent)
            && row > 0
            && self.ids.len().is_multiple_of(row)
            && self.rows() <= self.before as usize + tokens
    }
}

/// A turn's experts in a sample.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SampleExperts {
    /// The sample's token that the first row is of.
    pub begin: usize,
    pub experts: Arc<Experts>,
}

/// The rows of consecutive tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsRun<'a> {
    /// First token, and the one after the last.
    pub begin: usize,
    pub end: usize,
    pub shape: ExpertsShape,
    pub ids: &'a [u8],
}

/// The runs of a sample of `tokens` tokens, in order and apart from each other: where two turns report a token, the later
/// one is believed, which computed it last.
pub(crate) fn runs(turns: &[SampleExperts], tokens: usize) -> impl Iterator<Item = ExpertsRun<'_>> {
    let ends = (turns.iter().skip(1).map(|next| next.begin)).chain(std::iter::once(tokens));
    turns.iter().zip(ends).filter_map(move |(turn, end)| {
        let end = end
            .min(tokens)
            .min(turn.begin.saturating_add(turn.experts.rows()));
        (turn.begin < end).then(|| ExpertsRun {
            begin: turn.begin,
            end,
            shape: turn.experts.shape,
            ids: turn.experts.first(end - turn.begin),
        })
    })
}
