//! A rollout's requests in Anthropic's dialect, one a line, each from its bytes to the answer's.

use crate::chat_request::conversation;
use primerl_gateway::testing::messages;

pub fn fuzz(data: &[u8]) {
    conversation(data, messages);
}
