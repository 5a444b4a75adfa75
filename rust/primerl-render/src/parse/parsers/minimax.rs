//! MiniMax M2: `<minimax:tool_call>\n<invoke name="name">\n<parameter name="key">value</parameter>\n</invoke>\n
//! </minimax:tool_call>`.

use crate::parse::demand::{ArgumentSyntax, Form, Marked, Part};
use crate::parse::pairs::Pairs;
use crate::parse::protocol::{Syntax, ToolParser};
use crate::parse::tagged::{Read, TaggedSyntax};

pub(super) static PARSER: ToolParser = ToolParser {
    name: "minimax",
    templates: &[&["<minimax:tool_call>"]],
    model_types: &["minimax_m2"],
    openers: &["<minimax:tool_call>"],
    syntax: Syntax::Tagged(TaggedSyntax {
        sections: &[["<minimax:tool_call>", "</minimax:tool_call>"]],
        calls: &[["<invoke name=", "</invoke>"]],
        read: Read::Pairs(Pairs {
            function: ["", ""],
            name_end: ">",
            key: ["<parameter name=", ">"],
            value: ["", "</parameter>"],
            are_quoted: true,
            have_line_breaks: false,
        }),
    }),
    forms: &[Form {
        open: &[Part::Maybe("\n"), Part::Text("<minimax:tool_call>\n")],
        call: &[
            Part::Text("<invoke name=\""),
            Part::Name,
            Part::Text("\">\n"),
            Part::Arguments,
            Part::Text("</invoke>\n"),
        ],
        close: &[Part::Text("</minimax:tool_call>")],
        arguments: ArgumentSyntax::Marked(Marked {
            before: &[
                Part::Text("<parameter name=\""),
                Part::Name,
                Part::Text("\">"),
            ],
            before_json: None,
            close: "</parameter>",
            after: &[Part::Text("\n")],
            without: &["</parameter>", "</invoke>"],
        }),
        ..Form::BARE
    }],
    ..ToolParser::NONE
};
