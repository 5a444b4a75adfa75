//! Qwen 3 Coder, Qwen 3.5 and Nemotron 3:
//! `<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`.

use crate::parse::demand::{ArgumentSyntax, Form, Marked, Part};
use crate::parse::pairs::Pairs;
use crate::parse::protocol::{Syntax, ToolParser};
use crate::parse::tagged::{Read, TaggedSyntax};

const FUNCTION: [&str; 2] = ["<function=", "</function>"];

pub(super) static PARSER: ToolParser = ToolParser {
    name: "qwen3_coder",
    templates: &[&["<function=", "<parameter="]],
    rank: 4,
    openers: &["<tool_call>", FUNCTION[0]],
    syntax: Syntax::Tagged(TaggedSyntax {
        sections: &[],
        // The models often forget the outer marker; vLLM takes the inner one alone, too.
        calls: &[["<tool_call>", "</tool_call>"], FUNCTION],
        read: Read::Pairs(Pairs {
            function: FUNCTION,
            name_end: ">",
            key: ["<parameter=", ">"],
            value: ["", "</parameter>"],
            are_quoted: false,
            have_line_breaks: true,
        }),
    }),
    forms: &[Form {
        call: &[
            Part::Text("<tool_call>\n<function="),
            Part::Name,
            Part::Text(">\n"),
            Part::Arguments,
            Part::Text("</function>\n</tool_call>"),
        ],
        between: Some(&[Part::Text("\n")]),
        close: &[Part::Maybe("\n")],
        arguments: ArgumentSyntax::Marked(Marked {
            before: &[Part::Text("<parameter="), Part::Name, Part::Text(">\n")],
            before_json: None,
            close: "\n</parameter>",
            after: &[Part::Text("\n")],
            without: &["</parameter>", "</tool_call>"],
        }),
        ..Form::BARE
    }],
    ..ToolParser::NONE
};
