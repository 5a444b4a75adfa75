//! Qwen 3 Coder, Qwen 3.5 and Nemotron 3:
//! `<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>`.

use super::arguments::{Arguments, ToolTypes};
use super::tagged::{Syntax, inside, split, without_line_breaks};
use super::{Call, CallProblem};

const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];

pub(super) static SYNTAX: Syntax = Syntax {
    sections: &[],
    // The models often forget the outer marker; vLLM takes the inner one alone, too.
    calls: &[CALL, ["<function=", "</function>"]],
    openers: &["<tool_call>", "<function="],
    markers: &[
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
    ],
    read,
    types_matter: true,
};

fn read(text: &str, types: &ToolTypes) -> Result<Call, CallProblem> {
    let function = inside(text, CALL).trim();
    let function = function
        .strip_prefix("<function=")
        .and_then(|rest| rest.strip_suffix("</function>"))
        .ok_or(CallProblem::Structure("no function within the call"))?;
    let (name, mut rest) = split(function, ">")?;
    let name = name.trim();
    let mut arguments = Arguments::default();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Call::new(name, arguments.into_json());
        }
        let parameter = rest
            .strip_prefix("<parameter=")
            .ok_or(CallProblem::Structure("text between the parameters"))?;
        let (key, after_key) = split(parameter, ">")?;
        let (value, after_value) = split(after_key, "</parameter>")?;
        arguments.add(types, name, key.trim(), without_line_breaks(value));
        rest = after_value;
    }
}
