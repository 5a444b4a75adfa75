//! Trees of samples: tokens that samples of a group have in common go through the model once.
//!
//! ```text
//! sample 0   p p p p a a         row   p p p p a a | b b b | c      6 + 3 + 1 tokens in place of 6 + 7 + 8
//! sample 1   p p p p b b b       shared  0, 4, 7
//! sample 2   p p p p b b b c
//! ```
//! 1. The samples of a group are sorted by their tokens, so neighbours have the most in common. `shared[i]` is that
//!    number for a sample and the previous one, rounded down to [`BLOCK`]: a walk of the tree, depth first.
//! 2. A tree that is larger than a micro-batch is cut in that order; the path above the cut is repeated.
//! 3. Trees are packed and balanced as single samples are. Where ranks would get different numbers of micro-batches and
//!    each holds one tree only, the dearest tree is cut in two.
//! 4. Trees of one micro-batch are sorted too: what neighbours have in common (a system prompt) is shared as well.
//!
//! A tree's attention gathers, for each node, the keys of all tokens above it: a micro-batch has a bound for those too.

use super::assign::{Bin, Size, balance, first_fit_decreasing, make_divisible};
use super::prefixes::{compare, token_after};
use super::{MicroBatch, Weighted, micro_batches, plain};
use crate::config::FlopsModel;
use std::cell::RefCell;
use std::cmp::Ordering;
use std::ops::Range;

/// Samples share multiples of that many tokens: a node of a few tokens costs a pass over all keys above it.
pub(super) const BLOCK: usize = 32;
/// Keys gathered for a micro-batch, at most, for each token of `seq_len`. A key and its value take about a twentieth of
/// what a token's activations take, so these take less than half of what the tokens take.
pub(super) const KEYS_PER_TOKEN: usize = 8;
/// Trees are made where at most this share of the tokens has to be computed: for less, their attention does not pay.
const MOST_COMPUTED: f64 = 0.9;

/// Samples in the order of a walk of their tree, depth first.
#[derive(Clone, Debug, Default)]
struct Tree {
    /// Position of each sample.
    members: Vec<usize>,
    /// Leading tokens that each takes over from the previous one; 0 for the first.
    shared: Vec<usize>,
    measure: Measure,
}

/// What a tree takes, while it is walked.
#[derive(Clone, Debug, Default)]
struct Measure {
    /// Tokens that have to be computed.
    tokens: usize,
    /// Keys that are gathered: for each node, those of its tokens and of all above.
    keys: usize,
    flops: f64,
    /// Depths at which the nodes above the current token end, in order.
    ends: Vec<usize>,
}

impl Measure {
    /// Adds a sample that leaves the walk's path after `shared` tokens.
    fn add(&mut self, length: usize, shared: usize, flops: FlopsModel) {
        while self.ends.last().is_some_and(|end| *end > shared) {
            self.ends.pop();
        }
        // Where a sample leaves within a node, the node is divided.
        for end in [shared, length] {
            if end > self.ends.last().copied().unwrap_or(0) {
                self.ends.push(end);
                self.keys += end;
            }
        }
        self.tokens += length - shared;
        // Attention looks at each pair of a token and one above it.
        self.flops += flops.of(length) - flops.of(shared);
    }

    /// What it takes of a micro-batch's tokens, so that its keys are within their bound too.
    fn size(&self) -> Size {
        Size {
            tokens: self.tokens.max(self.keys.div_ceil(KEYS_PER_TOKEN)),
            flops: self.flops,
        }
    }
}

impl Tree {
    fn add(&mut self, member: usize, length: usize, shared: usize, flops: FlopsModel) {
        self.members.push(member);
        self.shared.push(shared);
        self.measure.add(length, shared, flops);
    }
}

/// Makes trees of samples.
struct Planter<'a> {
    samples: &'a [Weighted],
    seq_len: usize,
    flops: FlopsModel,
}

impl Planter<'_> {
    fn length(&self, member: usize) -> usize {
        self.samples[member].sample.len()
    }

    fn compare(&self, a: usize, b: usize, known: usize) -> (usize, Ordering) {
        let (common, order) = compare(&self.samples[a].sample, &self.samples[b].sample, known);
        (common, order.then(a.cmp(&b)))
    }

    /// Leading tokens that a sample takes over from the previous one.
    fn shared(&self, before: usize, member: usize, known: usize) -> usize {
        let common = self.compare(before, member, known).0;
        common - common % BLOCK
    }

    /// Leading tokens that all these samples have in common.
    fn common(&self, members: &[usize]) -> usize {
        let Some((first, others)) = members.split_first() else {
            return 0;
        };
        let mut common = self.length(*first);
        for other in others {
            if common == 0 {
                break;
            }
            common = common.min(self.compare(*first, *other, 0).0);
        }
        common
    }

    /// Samples of a group in the order of their tokens, each with the leading tokens that it takes over from the previous
    /// one. Samples longer than a micro-batch are skipped. Of samples that share nothing, only the beginning is read.
    fn walk(&self, group: Range<usize>) -> Vec<(usize, usize)> {
        let fits = |member: &usize| self.length(*member) <= self.seq_len;
        let members: Vec<usize> = group.filter(fits).collect();
        // Read once only: sorting looks at most samples several times.
        let known = self.common(&members);
        let next = |member: usize| token_after(&self.samples[member].sample, known);
        let mut walk: Vec<(Option<u32>, usize)> = members
            .into_iter()
            .map(|member| (next(member), member))
            .collect();
        walk.sort_unstable_by(|(next, a), (other, b)| {
            next.cmp(other).then_with(|| self.compare(*a, *b, known).1)
        });
        let mut before: Option<(Option<u32>, usize)> = None;
        let steps = walk.into_iter().map(|(next, member)| {
            let shared = match before.replace((next, member)) {
                None => 0,
                Some((other, before)) if other == next => self.shared(before, member, known),
                Some(_) => known - known % BLOCK,
            };
            (member, shared)
        });
        steps.collect()
    }

    /// Trees of walks of groups, one after another, each within the size of a micro-batch.
    fn trees(&self, walks: &[(usize, usize)]) -> Vec<Tree> {
        let mut trees: Vec<Tree> = Vec::new();
        for (member, shared) in walks.iter().copied() {
            let length = self.length(member);
            let grown = trees.last().filter(|_| shared > 0).map(|tree| {
                let mut measure = tree.measure.clone();
                measure.add(length, shared, self.flops);
                measure
            });
            match (trees.last_mut(), grown) {
                (Some(tree), Some(measure)) if measure.size().tokens <= self.seq_len => {
                    tree.members.push(member);
                    tree.shared.push(shared);
                    tree.measure = measure;
                }
                _ => {
                    let mut tree = Tree::default();
                    tree.add(member, length, 0, self.flops);
                    trees.push(tree);
                }
            }
        }
        trees
    }

    /// A tree's samples in two trees, of which the dearer is as cheap as can be; `None` where it has one sample only.
    fn halve(&self, tree: &Tree) -> Option<[Tree; 2]> {
        let (mut before, mut best) = (0.0, None);
        for (place, (member, shared)) in tree.members.iter().zip(&tree.shared).enumerate() {
            let path = self.flops.of(*shared);
            if place > 0 {
                // The second tree has the path above the cut again.
                let dearer = f64::max(before, tree.measure.flops - before + path);
                if best.is_none_or(|(found, _)| dearer < found) {
                    best = Some((dearer, place));
                }
            }
            before += self.flops.of(self.length(*member)) - path;
        }
        let (_, cut) = best?;
        let mut halves = [Tree::default(), Tree::default()];
        for (place, (member, shared)) in tree.members.iter().zip(&tree.shared).enumerate() {
            let shared = if place == cut { 0 } else { *shared };
            let half = &mut halves[usize::from(place >= cut)];
            half.add(*member, self.length(*member), shared, self.flops);
        }
        Some(halves)
    }

    /// The micro-batches of each rank; `None` where the dearest rank's work is not less than `without` trees.
    fn packed(
        &self,
        group_sizes: &[usize],
        data_ranks: usize,
        without: f64,
    ) -> Option<Vec<Vec<Joined>>> {
        let trees = self.trees_that_pay(group_sizes)?;
        let (trees, ranks) = self.balanced(trees, data_ranks);
        if dearest(&ranks) >= without {
            return None;
        }
        let joined = |bin: &Bin| self.join(bin.members.iter().map(|tree| &trees[*tree]).collect());
        let joined = ranks.iter().map(|bins| bins.iter().map(joined).collect());
        Some(joined.collect())
    }

    fn trees_that_pay(&self, group_sizes: &[usize]) -> Option<Vec<Tree>> {
        let mut walks = Vec::with_capacity(self.samples.len());
        let mut start = 0;
        for size in group_sizes {
            walks.extend(self.walk(start..start + size));
            start += size;
        }
        let all: usize = walks.iter().map(|(member, _)| self.length(*member)).sum();
        let pays = |computed: usize| (computed as f64) < MOST_COMPUTED * all as f64;
        // Trees have to compute more where they are cut; mostly, it shows before there are any.
        let shared: usize = walks.iter().map(|(_, shared)| shared).sum();
        if !pays(all - shared) {
            return None;
        }
        let trees = self.trees(&walks);
        let computed = trees.iter().map(|tree| tree.measure.tokens).sum();
        pays(computed).then_some(trees)
    }

    /// The trees in bins of each rank; some are halved, so that each rank has as many bins.
    fn balanced(&self, trees: Vec<Tree>, data_ranks: usize) -> (Vec<Tree>, Vec<Vec<Bin>>) {
        let mut sizes: Vec<Size> = trees.iter().map(|tree| tree.measure.size()).collect();
        let mut bins = first_fit_decreasing(&sizes, self.seq_len);
        let trees = RefCell::new(trees);
        make_divisible(&mut bins, &mut sizes, data_ranks, |unit| {
            let mut trees = trees.borrow_mut();
            let [first, second] = self.halve(&trees[unit])?;
            let sizes = [first.measure.size(), second.measure.size()];
            trees[unit] = first;
            trees.push(second);
            Some(sizes)
        });
        (trees.into_inner(), balance(bins, data_ranks))
    }

    /// Sequences and what they share, in order, of the trees of one micro-batch.
    fn join(&self, mut trees: Vec<&Tree>) -> Joined {
        let first = |tree: &Tree| tree.members[0];
        trees.sort_by(|a, b| self.compare(first(a), first(b), 0).1);
        let mut keys: usize = trees.iter().map(|tree| tree.measure.keys).sum();
        let (mut members, mut shared) = (Vec::new(), Vec::new());
        for tree in trees {
            let start = shared.len();
            members.extend_from_slice(&tree.members);
            shared.extend_from_slice(&tree.shared);
            if let Some(before) = start.checked_sub(1) {
                let common = self.shared(members[before], members[start], 0);
                // One more node, at most, ends there.
                if keys + common <= KEYS_PER_TOKEN * self.seq_len {
                    keys += common;
                    shared[start] = common;
                }
            }
        }
        (members, shared)
    }
}

/// Like [`super::pack`], but tokens that samples of a group have in common are computed once, where that makes the
/// dearest rank's work less. The samples come group by group, `group_sizes[g]` of them for group g.
pub fn pack_trees(
    samples: Vec<Weighted>,
    group_sizes: &[usize],
    seq_len: usize,
    data_ranks: usize,
    flops: FlopsModel,
) -> Vec<Vec<MicroBatch>> {
    let without = plain(&samples, seq_len, data_ranks, flops);
    let planter = Planter {
        samples: &samples,
        seq_len,
        flops,
    };
    match planter.packed(group_sizes, data_ranks, dearest(&without)) {
        None => micro_batches(samples, &without),
        Some(ranks) => micro_batches_of_trees(samples, ranks),
    }
}

/// Sequences of a micro-batch, and how much each shares with those before it.
type Joined = (Vec<usize>, Vec<usize>);

fn micro_batches_of_trees(samples: Vec<Weighted>, ranks: Vec<Vec<Joined>>) -> Vec<Vec<MicroBatch>> {
    let mut samples: Vec<Option<Weighted>> = samples.into_iter().map(Some).collect();
    let mut micro_batch = |(members, shared): Joined| {
        let sequences = members.iter().filter_map(|index| samples[*index].take());
        MicroBatch::of_tree(sequences.collect(), shared)
    };
    let mut rank = |bins: Vec<Joined>| bins.into_iter().map(&mut micro_batch).collect();
    ranks.into_iter().map(&mut rank).collect()
}

/// Work of the rank that has most of it, FLOPs.
fn dearest(ranks: &[Vec<Bin>]) -> f64 {
    let work = ranks
        .iter()
        .map(|bins| bins.iter().map(|bin| bin.flops).sum());
    work.fold(0.0, f64::max)
}

#[cfg(test)]
mod tests;
