//! Kimi K2: `<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>{..}
//! <|tool_call_end|><|tool_calls_section_end|>`. The model numbers its calls; that text is the call's id.

use crate::parse::CallProblem;
use crate::parse::demand::{ArgumentSyntax, Form, Part};
use crate::parse::json::named_call;
use crate::parse::pairs::split;
use crate::parse::protocol::{Call, Syntax, ToolParser};
use crate::parse::tagged::{Read, TaggedSyntax};

const ARGUMENTS: &str = "<|tool_call_argument_begin|>";

pub(super) static PARSER: ToolParser = ToolParser {
    name: "kimi",
    templates: &[&["<|tool_calls_section_begin|>"]],
    model_types: &["kimi_k2"],
    openers: &["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    syntax: Syntax::Tagged(TaggedSyntax {
        sections: &[["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"]],
        calls: &[["<|tool_call_begin|>", "<|tool_call_end|>"]],
        read: Read::Own(read),
    }),
    special: &[ARGUMENTS],
    forms: &[Form {
        open: &[Part::Text("<|tool_calls_section_begin|>")],
        call: &[
            Part::Text("<|tool_call_begin|>functions."),
            Part::Name,
            Part::Text(":"),
            Part::Number,
            Part::Text(ARGUMENTS),
            Part::Arguments,
            Part::Text("<|tool_call_end|>"),
        ],
        close: &[Part::Text("<|tool_calls_section_end|>")],
        arguments: ArgumentSyntax::Json(&["<|tool_call_end|>"]),
        ..Form::BARE
    }],
    ..ToolParser::NONE
};

fn read(call: &str) -> Result<Call, CallProblem> {
    let (id, arguments) = split(call, ARGUMENTS)?;
    let id = id.trim();
    let numbered = id.rsplit_once(':').filter(|(_, number)| {
        !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    let name = numbered.map_or(id, |(name, _)| name);
    let name = name.strip_prefix("functions.").unwrap_or(name);
    let mut call = named_call(name, arguments)?;
    // Without a number it is not an id: two calls of a tool would share it.
    call.id = numbered.map(|_| id.to_owned());
    Ok(call)
}
