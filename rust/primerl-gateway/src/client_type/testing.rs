//! A request and a prompt, for tests of answers.

use crate::prompt::Prompt;
use crate::request::{Input, Parse, TurnRequest};
use crate::sampling::TurnSampling;
use primerl_core::Truncation;
use primerl_core::conversation::History;
use primerl_core::turn::ForkReason;
use std::sync::Arc;

pub(crate) fn request() -> TurnRequest {
    TurnRequest {
        input: Input::Ids(Vec::new()),
        sampling: TurnSampling {
            temperature: 1.0,
            max_tokens: 10,
            stop: vec!["END".into()],
            logprobs: None,
            truncation: Truncation::default(),
            structured_outputs: None,
            demanded: None,
        },
        choices: 1,
        parse: Parse::Message { one_call: false },
        digest: 7,
    }
}

pub(crate) fn prompt() -> Prompt {
    Prompt {
        session: "s".into(),
        start_digest: 1,
        context_digest: 2,
        parent: None,
        fork: Some(ForkReason::FirstTurn),
        history: History::default(),
        suffix: Arc::default(),
        resident: None,
        options: None,
        chat: None,
        observed: Vec::new(),
        holds_control_tokens: false,
    }
}
