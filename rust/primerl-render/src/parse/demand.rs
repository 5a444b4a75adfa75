//! A grammar of the calls that a model's tool parser reads, for answers that must call a tool.
//!
//! It is written in the Lark dialect of llguidance, which vLLM takes as `structured_outputs.grammar` too. Families whose
//! calls are a JSON object behind a fixed text have one; the others write arguments in a syntax of their own, in which a
//! schema cannot be said.

use super::parsers::TOOL_PARSERS;
use crate::renderer::Renderer;
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
}

/// The parsers whose calls have a grammar.
fn known() -> String {
    let with_form = TOOL_PARSERS.iter().filter(|parser| parser.form.is_some());
    let names: Vec<_> = with_form.map(|parser| parser.name).collect();
    names.join(" and ")
}

/// How a family writes one call: `before`, the name as a JSON string, `between`, the arguments, `after`.
pub(super) struct Form {
    pub before: &'static [&'static str],
    pub between: &'static str,
    pub after: &'static [&'static str],
    pub separator: &'static str,
}

impl Renderer {
    /// The grammar of an answer that is calls, or JSON where the demand allows it. Reasoning is not in it.
    ///
    /// # Errors
    /// The model's calls have no grammar, or the demand names no tool.
    pub fn call_grammar(&self, demand: &Demand<'_>) -> Result<String, DemandError> {
        let parser = self.parsers().tool;
        let form = parser.form.as_ref();
        let form = form.ok_or(DemandError::Family(parser.name))?;
        if demand.tools.is_empty() {
            return Err(DemandError::NoTools);
        }
        let mut rules = String::new();
        let mut calls = Vec::new();
        for (index, tool) in demand.tools.iter().enumerate() {
            let (name, parameters) = function(tool).ok_or(DemandError::Malformed(index))?;
            if demand.name.is_some_and(|wanted| wanted != name) {
                continue;
            }
            let name = Value::from(name).to_string();
            let call = [
                self.literals(form.before),
                quoted(&(name + form.between)),
                format!("arguments_{index}"),
                self.literals(form.after),
            ];
            rules += &format!("call_{index}: {}\n", call.join(" "));
            rules += &format!("arguments_{index}: %json {parameters}\n");
            calls.push(format!("call_{index}"));
        }
        if calls.is_empty() {
            let name = demand.name.unwrap_or_default().to_owned();
            return Err(DemandError::UnknownTool(name));
        }
        let more = match demand.one_call || demand.name.is_some() {
            true => String::new(),
            false => format!(" ({} call)*", quoted(form.separator)),
        };
        let (start, answer) = match demand.or_json {
            None => ("calls", String::new()),
            Some(schema) => ("calls | answer", format!("answer: %json {schema}\n")),
        };
        let calls = calls.join(" | ");
        Ok(format!(
            "start: {start}\ncalls: call{more}\ncall: {calls}\n{rules}{answer}"
        ))
    }

    /// The markers of a reasoning block that may, or does, come before the rest of an answer to this prompt: the opening
    /// one, where the prompt has not opened the block, and the closing one. `None`: no block comes.
    pub fn reasoning_ahead(&self, prompt: &[u32]) -> Option<(Option<&'static str>, &'static str)> {
        let think = self.parsers().think()?;
        if self.starts_in_reasoning(prompt) {
            return Some((None, think.close));
        }
        let is_over = self.prompt_tail(prompt).trim_end().ends_with(think.close);
        (!is_over).then_some((Some(think.open), think.close))
    }

    fn literals(&self, texts: &[&str]) -> String {
        let literal = |text: &&str| match self.tokenizer().added_token(text) {
            Some(id) if self.tokenizer().is_special(id) => format!("<[{id}]>"),
            _ => quoted(text),
        };
        let literals: Vec<String> = texts.iter().map(literal).collect();
        literals.join(" ")
    }
}

/// Strings of the grammar language escape as JSON's do.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
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
