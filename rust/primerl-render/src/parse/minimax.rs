//! MiniMax M2: `<minimax:tool_call>\n<invoke name="name">\n<parameter name="key">value</parameter>\n</invoke>\n
//! </minimax:tool_call>`.

use super::arguments::{Arguments, ToolTypes};
use super::tagged::{Syntax, inside, split};
use super::{Call, CallProblem};

const CALL: [&str; 2] = ["<invoke name=", "</invoke>"];

pub(super) static SYNTAX: Syntax = Syntax {
    sections: &[["<minimax:tool_call>", "</minimax:tool_call>"]],
    calls: &[CALL],
    openers: &["<minimax:tool_call>"],
    markers: &[
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        "<invoke name=",
        "</invoke>",
        "<parameter name=",
        "</parameter>",
    ],
    read,
    types_matter: true,
};

fn read(text: &str, types: &ToolTypes) -> Result<Call, CallProblem> {
    let (name, mut rest) = split(inside(text, CALL), ">")?;
    let name = unquoted(name);
    let mut arguments = Arguments::default();
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Call::new(name, arguments.into_json());
        }
        let parameter = rest
            .strip_prefix("<parameter name=")
            .ok_or(CallProblem::Structure("text between the parameters"))?;
        let (key, after_key) = split(parameter, ">")?;
        let (value, after_value) = split(after_key, "</parameter>")?;
        arguments.add(types, name, unquoted(key), value);
        rest = after_value;
    }
}

fn unquoted(text: &str) -> &str {
    text.trim().trim_matches(['"', '\''])
}
