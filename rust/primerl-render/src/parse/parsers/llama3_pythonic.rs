//! Llama 3.2 and 4, LFM 2: `[f(a=1), g()]` as the whole answer, or between markers.

use crate::parse::demand::{ArgumentSyntax, Form, Part, Style};
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
    forms: &[
        Form {
            sign: "<|tool_call_start|>",
            open: &[Part::Text("<|tool_call_start|>[")],
            close: &[Part::Text("]<|tool_call_end|>")],
            ..LIST
        },
        Form {
            sign: "<|python_start|>",
            open: &[Part::Text("<|python_start|>[")],
            close: &[Part::Text("]"), Part::Maybe("<|python_end|>")],
            ..LIST
        },
        // Llama 4 often forgets the markers.
        Form {
            sign: "<|python_start|>",
            ..LIST
        },
        LIST,
    ],
    ..ToolParser::NONE
};

const LIST: Form = Form {
    open: &[Part::Text("[")],
    call: &[
        Part::Name,
        Part::Text("("),
        Part::Arguments,
        Part::Text(")"),
    ],
    between: Some(&[Part::Text(","), Part::Maybe(" ")]),
    close: &[Part::Text("]")],
    arguments: ArgumentSyntax::Literal(Style::Python),
    ..Form::BARE
};
