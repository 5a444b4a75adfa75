//! A rollout's requests for OpenAI's responses, one a line, each from its bytes to the answer's.

use crate::chat_request::conversation;
use primerl_gateway::testing::responses;

pub fn fuzz(data: &[u8]) {
    conversation(data, responses);
}
