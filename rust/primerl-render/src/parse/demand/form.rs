//! How a family writes calls, and the rules that follow from it.

use super::grammar::{Rules, Sequence, literals};
use super::guard::guarded;
use super::literal::Style;
use super::{DemandError, Tool, arguments, sample};
use crate::parse::ParserChoice;
use serde_json::Value;

/// One way to write the calls of an answer.
pub(in crate::parse) struct Form {
    /// A chat template that shows calls shows them in the first form whose sign it holds, and in those with that sign
    /// that follow.
    pub sign: &'static str,
    /// Before the first call.
    pub open: &'static [Part],
    pub call: &'static [Part],
    /// Between two calls. `None`: an answer has one call.
    pub between: Option<&'static [Part]>,
    /// After the last call.
    pub close: &'static [Part],
    pub arguments: ArgumentSyntax,
}

impl Form {
    /// A call after another, with nothing around them, and JSON arguments: the base of the others.
    pub const BARE: Self = Self {
        sign: "",
        open: &[],
        call: &[],
        between: Some(&[]),
        close: &[],
        arguments: ArgumentSyntax::Json(&[]),
    };
}

/// A part of a call, or of a parameter.
pub(in crate::parse) enum Part {
    /// With the markers that are special tokens.
    Text(&'static str),
    /// May be missing.
    Maybe(&'static str),
    /// One of these.
    Either(&'static [&'static [Part]]),
    /// The name of the tool, or of the parameter.
    Name,
    /// The name as a JSON string.
    QuotedName,
    /// A small number.
    Number,
    /// Nine letters and digits.
    Id,
    Arguments,
}

/// How arguments are written.
pub(in crate::parse) enum ArgumentSyntax {
    /// JSON of the tool's schema. The parser ends a call at these texts, even within a string.
    Json(&'static [&'static str]),
    /// Each parameter between markers.
    Marked(Marked),
    /// `key` and value, with commas between.
    Literal(Style),
}

/// How one parameter is written between markers.
pub(in crate::parse) struct Marked {
    /// Before a value.
    pub before: &'static [Part],
    /// Before a value that is JSON, where the form has such a mark; elsewhere the parser decides by the schema.
    pub before_json: Option<&'static [Part]>,
    /// Ends a value.
    pub close: &'static str,
    pub after: &'static [Part],
    /// What the parser looks for within a value: a string must not hold it.
    pub without: &'static [&'static str],
}

/// Writes the rules of forms.
pub(super) struct Writer<'a> {
    choice: ParserChoice,
    pub special: Vec<(&'a str, u32)>,
    pub rules: Rules,
    needs_guidance: bool,
}

impl<'a> Writer<'a> {
    pub fn new(choice: ParserChoice, special: Vec<(&'a str, u32)>) -> Self {
        Self {
            choice,
            special,
            rules: Rules::default(),
            needs_guidance: false,
        }
    }

    /// Adds `calls_{index}`.
    pub fn form(
        &mut self,
        index: usize,
        form: &Form,
        tools: &[Tool<'_>],
        is_one: bool,
    ) -> Result<(), DemandError> {
        let mut calls = Vec::new();
        for tool in tools {
            sample::check(self.choice, form, tool)?;
            let arguments = arguments::write(self, &form.arguments, tool)?;
            let call = self.parts(form.call, tool.name, &arguments);
            let name = format!("call_{index}_{}", tool.index);
            self.rules.add(&name, &call);
            calls.push(name);
        }
        let call = format!("call_{index}");
        self.rules.add(&call, &calls.join(" | "));
        let more = match form.between {
            Some(between) if !is_one => {
                format!(" ({} {call})*", self.parts(between, "", ""))
            }
            _ => String::new(),
        };
        let open = self.parts(form.open, "", "");
        let close = self.parts(form.close, "", "");
        let calls = format!("{open} {call}{more} {close}");
        self.rules.add(&format!("calls_{index}"), &calls);
        Ok(())
    }

    /// A text of the syntax.
    pub fn fixed(&self, text: &str) -> String {
        literals(text, &self.special)
    }

    /// Parts with this name and these arguments.
    pub fn parts(&self, parts: &[Part], name: &str, arguments: &str) -> String {
        let mut sequence = Sequence::new(&self.special);
        for part in parts {
            match part {
                Part::Text(text) => sequence.fixed(text),
                Part::Maybe(text) => sequence.item(format!("({})?", self.fixed(text))),
                Part::Either(branches) => {
                    let branches = branches
                        .iter()
                        .map(|parts| self.parts(parts, name, arguments));
                    let branches: Vec<_> = branches.collect();
                    sequence.item(format!("({})", branches.join(" | ")));
                }
                Part::Name => sequence.text(name),
                Part::QuotedName => sequence.text(&Value::from(name).to_string()),
                Part::Number => sequence.item("/0|[1-9][0-9]{0,2}/"),
                Part::Id => sequence.item("/[a-zA-Z0-9]{9}/"),
                Part::Arguments => sequence.item(arguments),
            }
        }
        sequence.finish()
    }

    /// A schema whose strings hold none of these texts.
    pub fn guarded(&mut self, schema: &Value, without: &[&str]) -> Value {
        let (schema, is_demanding) = guarded(schema, without);
        self.needs_guidance |= is_demanding;
        schema
    }

    pub fn finish(mut self) -> String {
        if self.needs_guidance {
            // vLLM prefers xgrammar, which ignores the length of a string with a pattern. It refuses an intersection of
            // terminals, and vLLM then takes guidance.
            self.rules.add("GUIDANCE", "\"a\" & \"a\"");
        }
        self.rules.finish()
    }
}
