//! DeepSeek V3 and R1, ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{..}\n```<｜tool▁call▁end｜>``, and
//! V3.1, `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{..}<｜tool▁call▁end｜>`; both within `<｜tool▁calls▁begin｜>` ..
//! `<｜tool▁calls▁end｜>`.

use crate::parse::CallProblem;
use crate::parse::demand::{ArgumentSyntax, Form, Part};
use crate::parse::json::named_call;
use crate::parse::pairs::split;
use crate::parse::protocol::{Call, Syntax, ToolParser};
use crate::parse::tagged::{Read, TaggedSyntax};

const SEPARATOR: &str = "<｜tool▁sep｜>";

pub(super) static PARSER: ToolParser = ToolParser {
    name: "deepseek",
    templates: &[&["<｜tool▁calls▁begin｜>"]],
    rank: 2,
    model_types: &["deepseek_v3"],
    openers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    syntax: Syntax::Tagged(TaggedSyntax {
        sections: &[["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]],
        calls: &[["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"]],
        read: Read::Own(read),
    }),
    special: &[SEPARATOR],
    forms: &[
        Form {
            sign: "```json",
            call: &[
                Part::Text("<｜tool▁call▁begin｜>function<｜tool▁sep｜>"),
                Part::Name,
                Part::Text("\n```json\n"),
                Part::Arguments,
                Part::Text("\n```<｜tool▁call▁end｜>"),
            ],
            between: Some(&[Part::Text("\n")]),
            ..PLAIN
        },
        PLAIN,
    ],
    ..ToolParser::NONE
};

/// Of V3.1.
const PLAIN: Form = Form {
    open: &[Part::Text("<｜tool▁calls▁begin｜>")],
    call: &[
        Part::Text("<｜tool▁call▁begin｜>"),
        Part::Name,
        Part::Text(SEPARATOR),
        Part::Arguments,
        Part::Text("<｜tool▁call▁end｜>"),
    ],
    close: &[Part::Text("<｜tool▁calls▁end｜>")],
    arguments: ArgumentSyntax::Json(&["<｜tool▁call▁end｜>"]),
    ..Form::BARE
};

fn read(call: &str) -> Result<Call, CallProblem> {
    let (first, second) = split(call, SEPARATOR)?;
    // A tool of V3.1 may have the name `function`; its arguments are in no fence.
    let (name, arguments) = match second.split_once("```json") {
        Some((name, fenced)) if first.trim() == "function" => {
            let arguments = fenced.trim_end().strip_suffix("```");
            let arguments = arguments.ok_or(CallProblem::Structure("the code fence is open"))?;
            (name, arguments)
        }
        _ => (first, second),
    };
    named_call(name.trim(), arguments)
}
