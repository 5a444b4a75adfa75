//! DeepSeek V3.2 and V4: `<｜DSML｜function_calls>\n<｜DSML｜invoke name="name">\n<｜DSML｜parameter name="key"
//! string="true">value</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>`; V4 names the section
//! `tool_calls`. A parameter says itself whether it is a string or JSON.

use super::arguments::{Arguments, ToolTypes, quoted};
use super::tagged::{Syntax, inside, split};
use super::{Call, CallProblem, json};

const CALL: [&str; 2] = ["<｜DSML｜invoke name=\"", "</｜DSML｜invoke>"];
const PARAMETER: [&str; 2] = ["<｜DSML｜parameter name=\"", "</｜DSML｜parameter>"];

pub(super) const OPENERS: [&str; 2] = ["<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"];

pub(super) static SYNTAX: Syntax = Syntax {
    sections: &[
        ["<｜DSML｜function_calls>", "</｜DSML｜function_calls>"],
        ["<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"],
    ],
    calls: &[CALL],
    openers: &OPENERS,
    // Of all these, the tokenizer knows the first as a token.
    markers: &[
        "｜DSML｜",
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        CALL[0],
        CALL[1],
        PARAMETER[0],
        PARAMETER[1],
    ],
    read,
    types_matter: true,
};

fn read(text: &str, types: &ToolTypes) -> Result<Call, CallProblem> {
    let (name, mut rest) = split(inside(text, CALL), "\">")?;
    let mut arguments = Arguments::default();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Call::new(name, arguments.into_json());
        }
        let parameter = rest
            .strip_prefix(PARAMETER[0])
            .ok_or(CallProblem::Structure("text between the parameters"))?;
        let (head, after_head) = split(parameter, ">")?;
        let (value, after_value) = split(after_head, PARAMETER[1])?;
        let (key, kind) = split(head, "\"")?;
        match kind.trim() {
            "string=\"true\"" => arguments.add_json(key, quoted(value)),
            "string=\"false\"" if json::check(value).is_ok() => {
                arguments.add_json(key, value.trim().to_owned());
            }
            // Said wrongly or not at all: the tool's schema decides.
            _ => arguments.add(types, name, key, value),
        }
        rest = after_value;
    }
}
