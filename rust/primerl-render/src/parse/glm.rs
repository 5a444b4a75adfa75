//! GLM 4.5 and later: `<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>`.

use super::arguments::{Arguments, ToolTypes};
use super::tagged::{Syntax, inside, split};
use super::{Call, CallProblem};

const CALL: [&str; 2] = ["<tool_call>", "</tool_call>"];

pub(super) static SYNTAX: Syntax = Syntax {
    sections: &[],
    calls: &[CALL],
    openers: &["<tool_call>"],
    markers: &[
        "<tool_call>",
        "</tool_call>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ],
    read,
    types_matter: true,
};

fn read(text: &str, types: &ToolTypes) -> Result<Call, CallProblem> {
    let call = inside(text, CALL);
    let start = call.find("<arg_key>").unwrap_or(call.len());
    let (name, mut rest) = (call[..start].trim(), &call[start..]);
    if name.contains(['<', '\n']) {
        return Err(CallProblem::Structure("text between name and arguments"));
    }
    let mut arguments = Arguments::default();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Call::new(name, arguments.into_json());
        }
        let pair = rest
            .strip_prefix("<arg_key>")
            .ok_or(CallProblem::Structure("text between the arguments"))?;
        let (key, after_key) = split(pair, "</arg_key>")?;
        let value = after_key
            .trim_start()
            .strip_prefix("<arg_value>")
            .ok_or(CallProblem::Structure("a key without a value"))?;
        let (value, after_value) = split(value, "</arg_value>")?;
        arguments.add(types, name, key.trim(), value);
        rest = after_value;
    }
}
