//! DeepSeek V3.2 and V4: `<｜DSML｜function_calls>\n<｜DSML｜invoke name="name">\n<｜DSML｜parameter name="key"
//! string="true">value</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>`; V4 names the section
//! `tool_calls`. A parameter itself says whether it is a string or JSON.

use crate::parse::arguments::{Arguments, ToolTypes, quoted};
use crate::parse::demand::{ArgumentSyntax, Form, Marked, Part};
use crate::parse::pairs::{each_argument, split};
use crate::parse::protocol::{Call, Syntax, ToolParser};
use crate::parse::tagged::{Read, TaggedSyntax};
use crate::parse::{CallProblem, json};

const PARAMETER: [&str; 2] = ["<｜DSML｜parameter name=\"", "</｜DSML｜parameter>"];

pub(super) static PARSER: ToolParser = ToolParser {
    name: "deepseek_v32",
    templates: &[&["｜DSML｜"]],
    model_types: &["deepseek_v32", "deepseek_v4"],
    openers: &["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"],
    syntax: Syntax::Tagged(TaggedSyntax {
        sections: &[
            ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>"],
            ["<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"],
        ],
        calls: &[["<｜DSML｜invoke name=\"", "</｜DSML｜invoke>"]],
        read: Read::Typed(read),
    }),
    // Of all these, the tokenizer knows the first as a token.
    special: &["｜DSML｜", PARAMETER[0], PARAMETER[1]],
    forms: &[
        Form {
            sign: "｜DSML｜tool_calls",
            open: &[Part::Maybe("\n\n"), Part::Text("<｜DSML｜tool_calls>\n")],
            close: &[Part::Text("</｜DSML｜tool_calls>")],
            ..V32
        },
        V32,
    ],
    // DeepSeek's own code writes an empty line; its folders come without a template.
    newlines_before_call: 2,
    ..ToolParser::NONE
};

const V32: Form = Form {
    open: &[
        Part::Maybe("\n\n"),
        Part::Text("<｜DSML｜function_calls>\n"),
    ],
    call: &[
        Part::Text("<｜DSML｜invoke name=\""),
        Part::Name,
        Part::Text("\">\n"),
        Part::Arguments,
        Part::Text("</｜DSML｜invoke>\n"),
    ],
    close: &[Part::Text("</｜DSML｜function_calls>")],
    arguments: ArgumentSyntax::Marked(Marked {
        before: &[
            Part::Text(PARAMETER[0]),
            Part::Name,
            Part::Text("\" string=\"true\">"),
        ],
        before_json: Some(&[
            Part::Text(PARAMETER[0]),
            Part::Name,
            Part::Text("\" string=\"false\">"),
        ]),
        close: PARAMETER[1],
        after: &[Part::Text("\n")],
        without: &[PARAMETER[1], "</｜DSML｜invoke>"],
    }),
    ..Form::BARE
};

fn read(call: &str, types: &ToolTypes) -> Result<Call, CallProblem> {
    let (name, rest) = split(call, "\">")?;
    let mut arguments = Arguments::default();
    each_argument(rest, PARAMETER[0], |parameter| {
        let (head, after_head) = split(parameter, ">")?;
        let (value, after_value) = split(after_head, PARAMETER[1])?;
        let (key, kind) = split(head, "\"")?;
        match kind.trim() {
            "string=\"true\"" => arguments.add_json(key, quoted(value)),
            "string=\"false\"" if json::check(value).is_ok() => {
                arguments.add_json(key, value.trim().to_owned());
            }
            // The attribute is wrong or missing: the tool's schema decides.
            _ => arguments.add(types, name, key, value),
        }
        Ok(after_value)
    })?;
    Call::new(name, arguments.into_json())
}
