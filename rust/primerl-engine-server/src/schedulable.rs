//! The view that the scheduler has of a sequence.

/// Order of running and waiting: priority, then arrival.
pub type Rank = (i32, u64);

/// What the scheduler must know of a sequence to decide about it. A capacity planner has sequences of its own, which
/// only count their tokens.
pub trait Schedulable {
    fn rank(&self) -> Rank;

    /// Tokens it holds, which is the KV it needs before its next token can be sampled.
    fn kv_needed(&self) -> u64;

    /// Tokens whose KV is not computed, at least 1.
    fn remaining(&self) -> usize;

    fn has_output(&self) -> bool;

    /// Forget the KV: it will be computed again.
    fn drop_cache(&mut self);
}
