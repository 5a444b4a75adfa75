//! GLM 4.5 and later: `<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>`.

use crate::parse::demand::{ArgumentSyntax, Form, Marked, Part};
use crate::parse::pairs::Pairs;
use crate::parse::protocol::{Syntax, ToolParser};
use crate::parse::tagged::{Read, TaggedSyntax};

pub(super) static PARSER: ToolParser = ToolParser {
    name: "glm",
    templates: &[&["<tool_call>", "<arg_key>"]],
    rank: 3,
    model_types: &["glm4_moe"],
    openers: &["<tool_call>"],
    syntax: Syntax::Tagged(TaggedSyntax {
        sections: &[],
        calls: &[["<tool_call>", "</tool_call>"]],
        read: Read::Pairs(Pairs {
            function: ["", ""],
            name_end: "",
            key: ["<arg_key>", "</arg_key>"],
            value: ["<arg_value>", "</arg_value>"],
            are_quoted: false,
            have_line_breaks: false,
        }),
    }),
    forms: &[Form {
        open: &[Part::Maybe("\n")],
        call: &[
            Part::Text("<tool_call>"),
            Part::Name,
            Part::Maybe("\n"),
            Part::Arguments,
            Part::Text("</tool_call>"),
        ],
        between: Some(&[Part::Maybe("\n")]),
        // GLM 4.7 writes no line breaks.
        arguments: ArgumentSyntax::Marked(Marked {
            before: &[
                Part::Text("<arg_key>"),
                Part::Name,
                Part::Text("</arg_key>"),
                Part::Maybe("\n"),
                Part::Text("<arg_value>"),
            ],
            before_json: None,
            close: "</arg_value>",
            after: &[Part::Maybe("\n")],
            without: &["</arg_value>", "</tool_call>"],
        }),
        ..Form::BARE
    }],
    ..ToolParser::NONE
};
