//! The tokens of a turn and of all before it.

use crate::turn::FinishReason;
use std::sync::Arc;

/// Token ids of a turn's prompt and answer, as shared chunks: taken under the lock in O(turns), copied outside of it.
#[derive(Clone, Debug, Default)]
pub struct History {
    pub(super) chunks: Vec<Arc<[u32]>>,
    pub(super) len: usize,
    /// How the last turn ended: a turn cut by length still has to be closed.
    pub finish: Option<FinishReason>,
}

impl History {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The ids and then `suffix`: the prompt of the next request.
    pub fn prompt_with(&self, suffix: &[u32]) -> Vec<u32> {
        let mut prompt = Vec::with_capacity(self.len + suffix.len());
        self.chunks
            .iter()
            .for_each(|chunk| prompt.extend_from_slice(chunk));
        prompt.extend_from_slice(suffix);
        prompt
    }

    pub fn to_vec(&self) -> Vec<u32> {
        self.prompt_with(&[])
    }

    /// The ids, in pieces.
    pub fn chunks(&self) -> &[Arc<[u32]>] {
        &self.chunks
    }

    /// The last id.
    pub fn last(&self) -> Option<u32> {
        self.chunks
            .iter()
            .rev()
            .find_map(|chunk| chunk.last().copied())
    }

    /// Whether `ids` begin with these.
    pub fn begins(&self, ids: &[u32]) -> bool {
        let mut rest = Some(ids);
        for chunk in &self.chunks {
            rest = rest.and_then(|rest| rest.strip_prefix(&**chunk));
        }
        rest.is_some()
    }
}
