//! Kimi K2: `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{..}
//! <|tool_call_end|><|tool_calls_section_end|>`. The model numbers its calls; that text is the call's id.

use super::arguments::ToolTypes;
use super::tagged::{Syntax, inside, split};
use super::{Call, CallProblem, json};

const CALL: [&str; 2] = ["<|tool_call_begin|>", "<|tool_call_end|>"];
const ARGUMENTS: &str = "<|tool_call_argument_begin|>";

pub(super) static SYNTAX: Syntax = Syntax {
    sections: &[["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]],
    calls: &[CALL],
    openers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    markers: &[
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        ARGUMENTS,
    ],
    read,
    types_matter: false,
};

fn read(text: &str, _types: &ToolTypes) -> Result<Call, CallProblem> {
    let (id, arguments) = split(inside(text, CALL), ARGUMENTS)?;
    let id = id.trim();
    let numbered = id.rsplit_once(':').filter(|(_, number)| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    let name = numbered.map_or(id, |(name, _)| name);
    let name = name.strip_prefix("functions.").unwrap_or(name);
    let arguments = json::object(arguments, "value of the arguments")?;
    let mut call = Call::new(name, arguments.to_owned())?;
    // Without a number it is no id: two calls of a tool would share it.
    call.id = numbered.map(|_| id.to_owned());
    Ok(call)
}
