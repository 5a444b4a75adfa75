//! Llama 3.2 and 4, LFM 2: `[f(a=1), g()]` as the whole answer, or between markers.

use crate::parse::list::{Items, ListSyntax};
use crate::parse::protocol::{Syntax, ToolParser};

pub(super) static PARSER: ToolParser = ToolParser {
    name: "llama3_pythonic",
    templates: &[&["<|tool_call_start|>["], &["<|python_start|>"]],
    rank: 7,
    model_types: &["llama4"],
    openers: &["<|python_start|>", "<|tool_call_start|>"],
    syntax: Syntax::List(ListSyntax {
        pairs: &[
            ["<|python_start|>", "<|python_end|>"],
            ["<|tool_call_start|>", "<|tool_call_end|>"],
        ],
        items: Items::Python,
        stands_alone: true,
    }),
    ..ToolParser::NONE
};
