//! Hermes, Qwen 2.5 and Qwen 3: `<tool_call>\n{"name": .., "arguments": {..}}\n</tool_call>`.

use crate::parse::demand::Form;
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
    form: Some(Form {
        before: &["<tool_call>", "\n{\"name\": "],
        between: ", \"arguments\": ",
        after: &["}\n", "</tool_call>"],
        separator: "\n",
    }),
    ..ToolParser::NONE
};
