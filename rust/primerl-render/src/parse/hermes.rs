//! Hermes, Qwen 2.5 and Qwen 3: `<tool_call>\n{"name": .., "arguments": {..}}\n</tool_call>`.

use super::json;
use super::tagged::{Syntax, inside};

const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];

pub(super) static SYNTAX: Syntax = Syntax {
    sections: &[],
    calls: &[CALL],
    openers: &["<tool_call>"],
    markers: &CALL,
    read: |text, _| json::call(inside(text, CALL)),
    types_matter: false,
};
