//! Leading tokens that samples have in common.

use crate::sample::{Sample, Segment};
use std::cmp::Ordering;

/// Tokens that are compared at once.
const PIECE: usize = 64;

/// How many leading tokens two samples have in common, and their order: by the first token that differs; the beginning
/// of another sample comes before it. The first `known` tokens are known to be common and not read again.
pub(super) fn compare(a: &Sample, b: &Sample, known: usize) -> (usize, Ordering) {
    let (mut left, mut right) = (Tokens::after(a, known), Tokens::after(b, known));
    let mut common = known;
    loop {
        let tokens = left.rest.len().min(right.rest.len());
        if tokens == 0 {
            return (common, left.rest.len().cmp(&right.rest.len()));
        }
        let equal = equal(&left.rest[..tokens], &right.rest[..tokens]);
        common += equal;
        if equal < tokens {
            return (common, left.rest[equal].cmp(&right.rest[equal]));
        }
        left.skip(tokens);
        right.skip(tokens);
    }
}

/// The token after the first `known` ones; `None` where there is none, which comes before any other in order.
pub(super) fn token_after(sample: &Sample, known: usize) -> Option<u32> {
    Tokens::after(sample, known).rest.first().copied()
}

/// Leading tokens that are equal, of two slices of one length. Branches of a rollout share their turns' tokens, so the
/// same memory is often compared with itself.
fn equal(a: &[u32], b: &[u32]) -> usize {
    if std::ptr::eq(a, b) {
        return a.len();
    }
    let mut start = 0;
    // Equality of slices is several times faster than looking for the first difference.
    for (left, right) in a.chunks(PIECE).zip(b.chunks(PIECE)) {
        if left != right {
            let mut pairs = left.iter().zip(right);
            return start + pairs.position(|(left, right)| left != right).unwrap_or(0);
        }
        start += left.len();
    }
    a.len()
}

/// Tokens of a sample that were not compared yet.
struct Tokens<'a> {
    /// What is left of the current segment; empty at the end only.
    rest: &'a [u32],
    segments: std::slice::Iter<'a, Segment>,
}

impl<'a> Tokens<'a> {
    fn after(sample: &'a Sample, known: usize) -> Self {
        let mut tokens = Tokens {
            rest: &[],
            segments: sample.segments().iter(),
        };
        tokens.skip(known);
        tokens
    }

    fn skip(&mut self, mut tokens: usize) {
        loop {
            let here = tokens.min(self.rest.len());
            self.rest = &self.rest[here..];
            tokens -= here;
            if !self.rest.is_empty() {
                return;
            }
            let Some(segment) = self.segments.next() else {
                return;
            };
            self.rest = segment.token_ids();
        }
    }
}
