//! Hermes, Qwen 2.5 and Qwen 3: `<tool_call>\n{"name": .., "arguments": {..}}\n</tool_call>`.

use crate::parse::demand::{ArgumentSyntax, Form, Part};
use crate::parse::json::Keys;
use crate::parse::protocol::{Syntax, ToolParser};
use crate::parse::tagged::{Read, TaggedSyntax};

pub(super) static PARSER: ToolParser = ToolParser {
    name: "hermes",
    templates: &[&["<tool_call>"]],
    rank: 5,
    openers: &["<tool_call>"],
    syntax: Syntax::Tagged(TaggedSyntax {
        sections: &[],
        calls: &[["<tool_call>", "</tool_call>"]],
        read: Read::Json(Keys::USUAL),
    }),
    forms: &[Form {
        call: &[
            Part::Text("<tool_call>\n{\"name\": "),
            Part::QuotedName,
            Part::Text(", \"arguments\": "),
            Part::Arguments,
            Part::Text("}\n</tool_call>"),
        ],
        between: Some(&[Part::Text("\n")]),
        arguments: ArgumentSyntax::Json(&["</tool_call>"]),
        ..Form::BARE
    }],
    ..ToolParser::NONE
};
