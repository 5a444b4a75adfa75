//! Gemma 4: `<|tool_call>call:name{city:<|"|>Paris<|"|>,days:2}<tool_call|>`. Keys are bare, strings stand between
//! `<|"|>` and are not escaped, everything else is JSON.

use crate::parse::arguments::{Arguments, quoted};
use crate::parse::demand::{ArgumentSyntax, Form, Part, Style};
use crate::parse::protocol::{Call, Syntax, ToolParser};
use crate::parse::tagged::{Read, TaggedSyntax};
use crate::parse::{CallProblem, json};

/// Around a string.
pub(in crate::parse) const QUOTE: &str = "<|\"|>";
/// Ends a call.
pub(in crate::parse) const CLOSE: &str = "<tool_call|>";
/// Deeper values are refused, so that no answer can overflow the stack.
const MAX_DEPTH: usize = 64;

pub(super) static PARSER: ToolParser = ToolParser {
    name: "gemma4",
    templates: &[&["<|tool_call>call:"]],
    openers: &["<|tool_call>"],
    syntax: Syntax::Tagged(TaggedSyntax {
        sections: &[],
        calls: &[["<|tool_call>", CLOSE]],
        read: Read::Own(read),
    }),
    special: &[QUOTE],
    forms: &[Form {
        call: &[
            Part::Text("<|tool_call>call:"),
            Part::Name,
            Part::Text("{"),
            Part::Arguments,
            Part::Text("}"),
            Part::Text(CLOSE),
        ],
        arguments: ArgumentSyntax::Literal(Style::Gemma),
        ..Form::BARE
    }],
    reasoning: "gemma4",
    ..ToolParser::NONE
};

fn read(call: &str) -> Result<Call, CallProblem> {
    let call = call
        .trim()
        .strip_prefix("call:")
        .ok_or(CallProblem::Structure("no `call:` begins the call"))?;
    let open = call
        .find('{')
        .ok_or(CallProblem::Structure("the call has no arguments"))?;
    let mut reader = Reader {
        rest: &call[open..],
    };
    let arguments = reader.mapping(0)?;
    match reader.rest.trim().is_empty() {
        true => Call::new(call[..open].trim(), arguments),
        false => Err(CallProblem::Structure("text after the arguments")),
    }
}

struct Reader<'a> {
    rest: &'a str,
}

impl<'a> Reader<'a> {
    fn take(&mut self, token: &str) -> bool {
        self.rest = self.rest.trim_start();
        let after = self.rest.strip_prefix(token);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    fn until(&mut self, marker: &str, missing: &'static str) -> Result<&'a str, CallProblem> {
        let (before, after) = self
            .rest
            .split_once(marker)
            .ok_or(CallProblem::Structure(missing))?;
        self.rest = after;
        Ok(before)
    }

    fn mapping(&mut self, depth: usize) -> Result<String, CallProblem> {
        self.take("{");
        let mut entries = Arguments::default();
        while !self.take("}") {
            let key = match self.take(QUOTE) {
                true => {
                    let key = self.until(QUOTE, "a key is open")?;
                    self.take(":");
                    key
                }
                false => self.until(":", "a key has no value")?.trim(),
            };
            entries.add_json(key, self.value(depth + 1)?);
            self.separator("}")?;
        }
        Ok(entries.into_json())
    }

    fn value(&mut self, depth: usize) -> Result<String, CallProblem> {
        if depth > MAX_DEPTH {
            return Err(CallProblem::Structure("the arguments are nested too deep"));
        }
        if self.take(QUOTE) {
            return Ok(quoted(self.until(QUOTE, "a string is open")?));
        }
        if self.rest.starts_with('{') {
            return self.mapping(depth);
        }
        if self.take("[") {
            let mut items = Vec::new();
            while !self.take("]") {
                items.push(self.value(depth + 1)?);
                self.separator("]")?;
            }
            return Ok(format!("[{}]", items.join(", ")));
        }
        let end = self.rest.find([',', '}', ']']).unwrap_or(self.rest.len());
        let (literal, rest) = self.rest.split_at(end);
        self.rest = rest;
        json::check(literal)?;
        Ok(literal.trim().to_owned())
    }

    /// A comma, unless `close` comes next.
    fn separator(&mut self, close: &str) -> Result<(), CallProblem> {
        if self.take(",") || self.rest.starts_with(close) {
            return Ok(());
        }
        Err(CallProblem::Structure("no comma between two values"))
    }
}
