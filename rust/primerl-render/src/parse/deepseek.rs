//! DeepSeek V3 and R1, ``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name\n```json\n{..}\n```<｜tool▁call▁end｜>``, and
//! V3.1, `<｜tool▁call▁begin｜>name<｜tool▁sep｜>{..}<｜tool▁call▁end｜>`; both within `<｜tool▁calls▁begin｜>` ..
//! `<｜tool▁calls▁end｜>`.

use super::arguments::ToolTypes;
use super::tagged::{Syntax, inside, split};
use super::{Call, CallProblem, json};

const CALL: [&str; 2] = ["<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"];
const SEPARATOR: &str = "<｜tool▁sep｜>";

pub(super) static SYNTAX: Syntax = Syntax {
    sections: &[["<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"]],
    calls: &[CALL],
    openers: &["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    markers: &[
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        SEPARATOR,
    ],
    read,
    types_matter: false,
};

fn read(text: &str, _types: &ToolTypes) -> Result<Call, CallProblem> {
    let (first, second) = split(inside(text, CALL), SEPARATOR)?;
    // A tool of V3.1 may have the name `function`; its arguments are in no fence.
    let (name, arguments) = match second.split_once("```json") {
        Some((name, fenced)) if first.trim() == "function" => {
            let arguments = fenced.trim_end().strip_suffix("```");
            let arguments = arguments.ok_or(CallProblem::Structure("the code fence is open"))?;
            (name, arguments)
        }
        _ => (first, second),
    };
    let arguments = json::object(arguments, "value of the arguments")?;
    Call::new(name.trim(), arguments.to_owned())
}
