//! What tests of the dialects share.

use crate::Sampling;
use crate::answer::{Answer, Choice, Head};
use primerl_core::turn::FinishReason;
use primerl_render::Message;
use serde_json::Value;

pub(super) const SAMPLING: Sampling = Sampling {
    temperature: 1.0,
    max_tokens: 28,
    rollout_max_tokens: None,
    replayed: None,
    template_kwargs: None,
    observes: Vec::new(),
};

/// To a prompt of three tokens, which it does not show; two tokens were sampled.
pub(super) fn answer(message: Message, finish: FinishReason) -> Answer {
    Answer {
        head: Head {
            id: "7-0".into(),
            created: 1,
            model: "m".into(),
            prompt_tokens: 3,
            choices: 1,
            prompt: None,
        },
        choices: vec![Choice {
            message,
            malformed: vec![],
            finish,
            stop: None,
            sampled: vec![4, 256].into(),
            logprobs: vec![-0.5, -1.0].into(),
            top: vec![],
            text: None,
        }],
    }
}

/// The data of OpenAI's chunks.
pub(super) fn chunks(out: Vec<u8>) -> Vec<Value> {
    let text = String::from_utf8(out).expect("is text");
    let mut chunks: Vec<&str> = text.split_terminator("\n\n").collect();
    assert_eq!(chunks.pop(), Some("data: [DONE]"));
    let data = |chunk: &&str| {
        let data = chunk.strip_prefix("data: ").expect("is data");
        serde_json::from_str(data).expect("is JSON")
    };
    chunks.iter().map(data).collect()
}
