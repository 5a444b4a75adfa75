//! A rollout's requests for text completions, one a line, each from its bytes to the answer's.

use crate::chat_request::conversation;
use primerl_gateway::testing::completions;

pub fn fuzz(data: &[u8]) {
    conversation(data, completions);
}
