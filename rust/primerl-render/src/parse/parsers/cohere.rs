//! Command R7B and Command A: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "name", "parameters": {..}}]
//! <|END_ACTION|>`.
//!
//! The number that the model gives a call is not an id: templates number the calls of a conversation by their ids, and a
//! model that began again at 0 would answer two calls with one id.

use crate::parse::demand::{Form, Part};
use crate::parse::json::Keys;
use crate::parse::list::{Items, ListSyntax};
use crate::parse::protocol::{Syntax, ToolParser};

pub(super) static PARSER: ToolParser = ToolParser {
    name: "cohere",
    templates: &[&["<|START_ACTION|>"]],
    openers: &["<|START_ACTION|>"],
    syntax: Syntax::List(ListSyntax {
        pairs: &[["<|START_ACTION|>", "<|END_ACTION|>"]],
        items: Items::Json(Keys {
            name: "tool_name",
            ..Keys::USUAL
        }),
        stands_alone: false,
    }),
    forms: &[Form {
        open: &[Part::Text("<|START_ACTION|>["), Part::Maybe("\n    ")],
        call: &[
            Part::Text("{\"tool_call_id\": \""),
            Part::Number,
            Part::Text("\", \"tool_name\": "),
            Part::QuotedName,
            Part::Text(", \"parameters\": "),
            Part::Arguments,
            Part::Text("}"),
        ],
        between: Some(&[Part::Either(&[
            &[Part::Text(",\n    ")],
            &[Part::Text(", ")],
        ])]),
        close: &[Part::Maybe("\n"), Part::Text("]<|END_ACTION|>")],
        ..Form::BARE
    }],
    reasoning: "cohere",
    ..ToolParser::NONE
};
