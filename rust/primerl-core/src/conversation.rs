//! Messages matched against what was recorded: does a request extend a turn, or does it start a new branch?
//!
//! Works on digests, so it knows neither JSON nor templates. The gateway canonicalises each message to bytes, takes
//! [`message_hash`] of each, and asks [`Conversation::plan`]. A request's messages are folded into a chain
//!
//! ```text
//! start = digest_start(tools and template arguments)
//! d(0) = start,  d(i + 1) = digest_next(d(i), hash of message i)
//! ```
//!
//! so that every prefix of a request has a digest of its own. A turn records the digest of its context (all messages
//! that made the prompt) and of its context plus the answer. A request extends the turn whose answer digest is its
//! longest prefix: only the messages after it are rendered. No search through the history: one look-up a message.
//!
//! ```
//! use primerl_core::conversation::{Conversation, Plan, digest_next, digest_start, message_hash};
//! use primerl_core::turn::ForkReason;
//!
//! let conversation = Conversation::default();
//! let start = digest_start(b"[]");
//! let question = message_hash(br#"{"role":"user","content":"2+2?"}"#);
//! assert_eq!(conversation.plan(start, &[question], &[false]), Plan::Fork { reason: ForkReason::FirstTurn });
//! // Once the turn was sampled: context_digest = digest_next(start, question), and
//! // answer_digest = digest_next(context_digest, message_hash(<the assistant message we answered>)).
//! # let _ = digest_next(start, question);
//! ```
//!
//! Several turns may have one parent (an agent that asks again, or goes on from an earlier answer): the turns of a
//! conversation are a forest, of which [`crate::sample`] takes the branches.

use crate::ids::TurnIndex;
use crate::turn::{FinishReason, ForkReason, Turn};
use std::collections::HashMap;
use std::sync::Arc;
use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

// Distinct seeds, so that a tool list is never taken for a message of the same bytes.
const START_SEED: u64 = 0x7072_696d_6572_6c00;
const MESSAGE_SEED: u64 = 0x7072_696d_6572_6c01;

/// Digest of an empty message list under these canonical bytes of tools and template arguments.
pub fn digest_start(tools: &[u8]) -> u128 {
    xxh3_128_with_seed(tools, START_SEED)
}

/// Hash of one canonicalised message.
pub fn message_hash(message: &[u8]) -> u128 {
    xxh3_128_with_seed(message, MESSAGE_SEED)
}

/// Digest of a message list with digest `previous` and one more message of hash `message`.
pub fn digest_next(previous: u128, message: u128) -> u128 {
    let mut bytes = [0_u8; 32];
    bytes[..16].copy_from_slice(&previous.to_le_bytes());
    bytes[16..].copy_from_slice(&message.to_le_bytes());
    xxh3_128(&bytes)
}

/// Digest of a whole message list.
pub fn digest_messages(start: u128, messages: &[u128]) -> u128 {
    messages
        .iter()
        .fold(start, |digest, message| digest_next(digest, *message))
}

/// How a request's prompt is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The prompt is [`Conversation::history`] of `parent` and the rendering of `messages[first_new_message..]`.
    Extend {
        parent: TurnIndex,
        first_new_message: usize,
    },
    /// The prompt is the rendering of all messages.
    Fork { reason: ForkReason },
}

/// Token ids of a turn's prompt and answer, as shared chunks: taken under the lock in O(turns), copied outside of it.
#[derive(Clone, Debug, Default)]
pub struct History {
    chunks: Vec<Arc<[u32]>>,
    len: usize,
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
}

#[derive(Clone, Debug)]
struct Recorded {
    parent: Option<TurnIndex>,
    prompt_suffix: Arc<[u32]>,
    sampled: Arc<[u32]>,
    finish: FinishReason,
}

/// The recorded turns of one session of one rollout. Kept by the gateway under a short lock.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    turns: HashMap<TurnIndex, Recorded>,
    by_answer: HashMap<u128, TurnIndex>,
    by_context: HashMap<u128, TurnIndex>,
    /// Every `start` a turn was recorded under, in order of first use; more than one only if tools changed.
    starts: Vec<u128>,
}

impl Conversation {
    /// Decides how to make the prompt of a request with these messages, in O(messages).
    ///
    /// `messages` are [`message_hash`]es, `is_assistant` says which of them have the role `assistant` (same length).
    /// A new assistant message that we did not sample makes the request a fork: it may replace an answer of ours, and
    /// a template need not render a foreign answer as it renders one.
    pub fn plan(&self, start: u128, messages: &[u128], is_assistant: &[bool]) -> Plan {
        debug_assert_eq!(messages.len(), is_assistant.len());
        if self.turns.is_empty() {
            return Plan::Fork {
                reason: ForkReason::FirstTurn,
            };
        }
        if let Some((parent, first_new_message)) =
            self.longest_prefix(start, messages, is_assistant)
        {
            if is_assistant[first_new_message..].contains(&true) {
                return Plan::Fork {
                    reason: ForkReason::HistoryEdited,
                };
            }
            return Plan::Extend {
                parent,
                first_new_message,
            };
        }
        Plan::Fork {
            reason: self.fork_reason(start, messages, is_assistant),
        }
    }

    /// Records a finished turn. `index` is the turn's number within the rollout: turns of all sessions of a rollout are numbered together, in the order of their
    /// [`crate::Event::TurnFinished`] events. Take the number and send the event under one lock.
    pub fn record(&mut self, index: TurnIndex, turn: &Turn) {
        let start = turn.start_digest;
        if !self.starts.contains(&start) {
            self.starts.push(start);
        }
        // Of two turns with the same text the later one is extended: it is the one the agent saw last.
        self.by_answer.insert(turn.answer_digest, index);
        self.by_context.insert(turn.context_digest, index);
        self.turns.insert(
            index,
            Recorded {
                parent: turn.parent,
                prompt_suffix: Arc::clone(&turn.prompt_suffix),
                sampled: Arc::clone(&turn.sampled),
                finish: turn.finish,
            },
        );
    }

    /// The last turn recorded with this context: what a retried request repeats.
    pub fn answered(&self, context_digest: u128) -> Option<TurnIndex> {
        self.by_context.get(&context_digest).copied()
    }

    /// Prompt and answer of a turn. Empty for a turn that was not recorded here.
    pub fn history(&self, turn: TurnIndex) -> History {
        let mut history = self.prompt_history(turn);
        if let Some(recorded) = self.turns.get(&turn) {
            history.len += recorded.sampled.len();
            history.chunks.push(Arc::clone(&recorded.sampled));
            history.finish = Some(recorded.finish);
        }
        history
    }

    /// The ids the engine was given for a turn.
    pub fn prompt_of(&self, turn: TurnIndex) -> Vec<u32> {
        self.prompt_history(turn).to_vec()
    }

    pub fn len(&self) -> usize {
        self.turns.len()
    }

    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    fn prompt_history(&self, turn: TurnIndex) -> History {
        let mut chunks = Vec::new();
        let mut at = self.turns.get(&turn);
        while let Some(recorded) = at {
            chunks.push(Arc::clone(&recorded.prompt_suffix));
            at = recorded.parent.and_then(|parent| self.turns.get(&parent));
            if let Some(parent) = at {
                chunks.push(Arc::clone(&parent.sampled));
            }
        }
        chunks.reverse();
        let len = chunks.iter().map(|chunk| chunk.len()).sum();
        History {
            chunks,
            len,
            finish: None,
        }
    }

    /// The turn whose context and answer are the longest prefix of the messages, and the prefix's length.
    fn longest_prefix(
        &self,
        start: u128,
        messages: &[u128],
        is_assistant: &[bool],
    ) -> Option<(TurnIndex, usize)> {
        let mut digest = start;
        let mut longest = None;
        for (position, message) in messages.iter().enumerate() {
            digest = digest_next(digest, *message);
            if is_assistant[position] {
                longest = self
                    .by_answer
                    .get(&digest)
                    .map(|turn| (*turn, position + 1))
                    .or(longest);
            }
        }
        longest
    }

    fn fork_reason(&self, start: u128, messages: &[u128], is_assistant: &[bool]) -> ForkReason {
        let matches_otherwise = |other: &u128| {
            *other != start
                && (self
                    .longest_prefix(*other, messages, is_assistant)
                    .is_some()
                    || self
                        .by_context
                        .contains_key(&digest_messages(*other, messages)))
        };
        if self.starts.iter().any(matches_otherwise) {
            ForkReason::ToolsChanged
        } else if is_assistant.contains(&true) {
            ForkReason::HistoryEdited
        } else {
            ForkReason::NewConversation
        }
    }
}

#[cfg(test)]
mod tests;
