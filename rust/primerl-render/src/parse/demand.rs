//! A grammar of the calls that a model's tool parser reads, for answers that must call a tool.
//!
//! It is written in the Lark dialect of llguidance, which vLLM takes as `structured_outputs.grammar` too. Each parser
//! describes how its family writes calls ([`Form`]). Arguments are JSON of the tool's schema, or values that this module
//! writes one by one, where a family has a syntax of its own; a schema that cannot be written so is refused by tool and
//! parameter, because an answer that its own parser reads otherwise would be no call.

mod arguments;
mod form;
mod grammar;
mod guard;
mod literal;
mod python;
mod sample;
mod schema;
mod strings;

pub(super) use form::{ArgumentSyntax, Form, Marked, Part};
pub(super) use literal::Style;

use super::parsers::{TOOL_PARSERS, harmony};
use crate::parse::ParserChoice;
use crate::tokenizer::Tokenizer;
use form::Writer;
use grammar::delimited;
pub use grammar::literals;
use serde_json::{Value, json};

/// What an answer must be.
#[derive(Clone, Copy, Debug)]
pub struct Demand<'a> {
    /// OpenAI tool schemas.
    pub tools: &'a [Value],
    /// The only tool that may be called.
    pub name: Option<&'a str>,
    /// No more than one call.
    pub one_call: bool,
    /// Instead of calls the answer may be JSON of this schema.
    pub or_json: Option<&'a Value>,
    /// The end of the prompt: where reasoning is a channel of the answer (harmony), the prompt may have opened it.
    pub prompt: &'a [u32],
}

/// Why calls cannot be demanded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DemandError {
    #[error("there are no tools to call")]
    NoTools,
    #[error("there is no tool named {0:?}")]
    UnknownTool(String),
    #[error("tools[{0}] has no function with a name, and parameters that are an object")]
    Malformed(usize),
    #[error(
        "calls of this model (tool parser {0:?}) cannot be put into a grammar: only those of {known} can", known = known()
    )]
    Family(&'static str),
    /// The syntax of the model's calls has no way to write it.
    #[error("tool {tool:?}{at}: {problem}", at = at(parameter))]
    Unwritable {
        tool: String,
        parameter: Option<String>,
        problem: String,
    },
}

/// The parsers whose calls have a grammar.
fn known() -> String {
    let with_form = TOOL_PARSERS
        .iter()
        .filter(|parser| !parser.forms.is_empty());
    let names: Vec<_> = with_form.map(|parser| parser.name).collect();
    names.join(", ")
}

fn at(parameter: &Option<String>) -> String {
    parameter
        .as_ref()
        .map_or(String::new(), |name| format!(", parameter {name:?}"))
}

fn wanted_tools<'a>(demand: &Demand<'a>) -> Result<Vec<Tool<'a>>, DemandError> {
    if demand.tools.is_empty() {
        return Err(DemandError::NoTools);
    }
    let mut tools = Vec::new();
    for (index, tool) in demand.tools.iter().enumerate() {
        let (name, parameters) = function(tool).ok_or(DemandError::Malformed(index))?;
        if demand.name.is_none_or(|wanted| wanted == name) {
            tools.push(Tool {
                index,
                name,
                parameters,
                schema: tool,
            });
        }
    }
    if tools.is_empty() {
        let name = demand.name.unwrap_or_default().to_owned();
        return Err(DemandError::UnknownTool(name));
    }
    Ok(tools)
}

/// Writes the grammars of one model's calls.
pub(crate) struct CallGrammars<'a> {
    pub parsers: ParserChoice,
    pub tokenizer: &'a Tokenizer,
    /// Whether a template of the model holds this text.
    pub is_in_template: &'a dyn Fn(&str) -> bool,
    /// Whether the prompt has opened a reasoning block.
    pub starts_in_reasoning: bool,
}

impl CallGrammars<'_> {
    pub(crate) fn of(&self, demand: &Demand<'_>) -> Result<String, DemandError> {
        let parser = self.parsers.tool;
        if parser.forms.is_empty() {
            return Err(DemandError::Family(parser.name));
        }
        let tools = wanted_tools(demand)?;
        let is_one = demand.one_call || demand.name.is_some();
        let mut writer = Writer::new(self.parsers, self.call_markers());
        let forms = self.forms();
        for (index, form) in forms.iter().enumerate() {
            writer.form(index, form, &tools, is_one)?;
        }
        let calls = (0..forms.len()).map(|index| format!("calls_{index}"));
        let calls = calls.collect::<Vec<_>>().join(" | ");
        let (start, answer) = match demand.or_json {
            None => ("calls", String::new()),
            Some(schema) => ("calls | answer", self.answer(&mut writer, schema)),
        };
        let start = match self.parsers.reads_harmony_reasoning() {
            true => format!("{} ({start})", self.analysis(&mut writer)),
            false => start.to_owned(),
        };
        let rules = writer.finish();
        Ok(format!("start: {start}\ncalls: {calls}\n{rules}{answer}"))
    }

    fn answer(&self, writer: &mut Writer<'_>, schema: &Value) -> String {
        let header = writer.fixed(match self.parsers.reads_harmony_calls() {
            true => harmony::FINAL,
            false => "",
        });
        format!("answer: {header} %json {schema}\n")
    }

    /// A block of reasoning as harmony writes it, as far as it is still to come.
    fn analysis(&self, writer: &mut Writer<'_>) -> String {
        let (open, close) = harmony::ANALYSIS;
        let text = "/(?s:.*)/";
        let rest = delimited(
            &mut writer.rules,
            &writer.special,
            text,
            &harmony::ENDS,
            close,
        );
        match self.starts_in_reasoning {
            true => rest,
            false => format!("({} {rest})?", writer.fixed(open)),
        }
    }

    /// How this model writes calls: as its template shows, else every way that its parser reads.
    fn forms(&self) -> &'static [Form] {
        let parser = self.parsers.tool;
        let shows_calls = (parser.openers.iter()).any(|text| (self.is_in_template)(text));
        let shown = |form: &Form| (self.is_in_template)(form.sign);
        let Some(first) = parser.forms.iter().position(shown).filter(|_| shows_calls) else {
            return parser.forms;
        };
        let same = |form: &&Form| form.sign == parser.forms[first].sign;
        let count = parser.forms[first..].iter().take_while(same).count();
        &parser.forms[first..first + count]
    }

    /// Special tokens of the syntax of calls, with their ids.
    fn call_markers(&self) -> Vec<(&str, u32)> {
        let parser = self.parsers.tool;
        self.tokenizer
            .added_tokens()
            .filter(|token| token.special && parser.has_marker(&token.content))
            .map(|token| (token.content.as_str(), token.id))
            .collect()
    }
}

/// A tool that may be called.
struct Tool<'a> {
    /// In the request.
    index: usize,
    name: &'a str,
    parameters: Value,
    /// As in the request.
    schema: &'a Value,
}

impl Tool<'_> {
    fn unwritable(&self, parameter: Option<&str>, problem: impl Into<String>) -> DemandError {
        DemandError::Unwritable {
            tool: self.name.to_owned(),
            parameter: parameter.map(str::to_owned),
            problem: problem.into(),
        }
    }
}

fn function(tool: &Value) -> Option<(&str, Value)> {
    let function = tool.get("function")?;
    let name = function
        .get("name")?
        .as_str()
        .filter(|name| !name.is_empty())?;
    match function.get("parameters") {
        None | Some(Value::Null) => Some((name, json!({"type": "object"}))),
        Some(parameters @ Value::Object(given)) => {
            let mut parameters = parameters.clone();
            // Readers take nothing but an object for arguments.
            if !given.contains_key("type") {
                parameters["type"] = "object".into();
            }
            Some((name, parameters))
        }
        Some(_) => None,
    }
}
