//! A rollout's chat requests, one a line, each from its bytes to the answer's.

use crate::renderers::AGENT_MODEL;
use primerl_gateway::testing::{Desk, chat};
use std::sync::Arc;

pub fn fuzz(data: &[u8]) {
    conversation(data, chat);
}

/// Up to eight requests of one rollout, an evaluation's where `#` comes first.
pub fn conversation(data: &[u8], ask: fn(&Desk, &[u8])) {
    let (evaluation, lines) = match data.split_first() {
        Some((b'#', lines)) => (true, lines),
        _ => (false, data),
    };
    let desk = Desk::new(Arc::clone(&AGENT_MODEL), evaluation);
    for body in lines.split(|byte| *byte == b'\n').take(8) {
        ask(&desk, body);
    }
}
