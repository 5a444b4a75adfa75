//! Digests of messages and of message lists.

use crate::turn::AnswerKey;
use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

// Distinct seeds, so that a tool list is never taken for a message of the same bytes.
const START_SEED: u64 = 0x7072_696d_6572_6c00;
const MESSAGE_SEED: u64 = 0x7072_696d_6572_6c01;
const ANSWER_SEED: u64 = 0x7072_696d_6572_6c02;

/// Digest of an empty message list under these canonical bytes of tools and template arguments.
pub fn digest_start(tools: &[u8]) -> u128 {
    xxh3_128_with_seed(tools, START_SEED)
}

/// Hash of one canonicalised message, or of a part of one.
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

/// Digest of a message list that ends with an answer of ours. Answers with the same words and other reasoning differ.
pub(super) fn digest_answer(context: u128, answer: &AnswerKey) -> u128 {
    let mut bytes = [0_u8; 33];
    bytes[..16].copy_from_slice(&answer.said.to_le_bytes());
    if let Some(reasoning) = answer.reasoning {
        bytes[16..32].copy_from_slice(&reasoning.to_le_bytes());
        bytes[32] = 1;
    }
    digest_next(context, xxh3_128_with_seed(&bytes, ANSWER_SEED))
}

/// How one message of a request is recognised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageKey {
    /// Hash of all it says.
    pub exact: u128,
    /// How an assistant message is compared with our answers; `None` for other messages.
    pub answer: Option<AnswerKey>,
}

impl MessageKey {
    /// The key of a message that only the client can have written.
    pub fn exact(exact: u128) -> MessageKey {
        MessageKey {
            exact,
            answer: None,
        }
    }
}
