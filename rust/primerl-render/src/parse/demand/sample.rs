//! Whether the family's own parser reads the names in a call as they are.

use super::form::{ArgumentSyntax, Form, Part};
use super::literal::Style;
use super::schema::Parameters;
use super::{DemandError, Tool};
use crate::parse::cut::Cut;
use crate::parse::newlines::Newlines;
use crate::parse::stream::Engine;
use crate::parse::{AnswerContext, ParserChoice};
use serde_json::Value;

/// Parses a call of the tool for each of its parameters, and one without any.
pub(super) fn check(choice: ParserChoice, form: &Form, tool: &Tool<'_>) -> Result<(), DemandError> {
    let unreadable = "the calls of this model cannot hold this name";
    if !is_read(choice, form, tool, None) {
        return Err(tool.unwritable(None, unreadable));
    }
    if matches!(form.arguments, ArgumentSyntax::Json(_)) {
        return Ok(());
    }
    let parameters = Parameters::of(tool)?;
    let names = parameters.iter().map(|parameter| parameter.name);
    match names
        .into_iter()
        .find(|name| !is_read(choice, form, tool, Some(name)))
    {
        Some(name) => Err(tool.unwritable(Some(name), unreadable)),
        None => Ok(()),
    }
}

fn is_read(choice: ParserChoice, form: &Form, tool: &Tool<'_>, parameter: Option<&str>) -> bool {
    let mut text = String::new();
    let arguments = parameter.map_or(String::new(), |name| argument(form, name));
    write(form.open, "", "", &mut text);
    let arguments = match form.arguments {
        ArgumentSyntax::Json(_) => "{}",
        _ => &arguments,
    };
    write(form.call, tool.name, arguments, &mut text);
    write(form.close, "", "", &mut text);
    let tools = [tool.schema.clone()];
    let context = AnswerContext {
        tools: Some(&tools),
        starts_in_reasoning: false,
    };
    let mut cut = Cut::default();
    cut.text = text;
    Engine::new(choice, Newlines::USUAL, &context).run(&mut cut, true);
    let [call] = &cut.calls[..] else {
        return false;
    };
    let arguments = call.function.arguments.as_str().unwrap_or_default();
    let Ok(Value::Object(arguments)) = serde_json::from_str(arguments) else {
        return false;
    };
    let keys: Vec<&str> = arguments.keys().map(String::as_str).collect();
    cut.malformed.is_empty() && call.function.name == tool.name && keys == Vec::from_iter(parameter)
}

/// A parameter with a value that every syntax can hold.
fn argument(form: &Form, name: &str) -> String {
    let value = "0";
    match &form.arguments {
        ArgumentSyntax::Json(_) => String::new(),
        ArgumentSyntax::Marked(marked) => {
            let mut text = String::new();
            write(marked.before, name, "", &mut text);
            text += value;
            text += marked.close;
            write(marked.after, name, "", &mut text);
            text
        }
        ArgumentSyntax::Literal(Style::Python) => format!("{name}={value}"),
        ArgumentSyntax::Literal(Style::Gemma) => format!("{name}:{value}"),
    }
}

fn write(parts: &[Part], name: &str, arguments: &str, text: &mut String) {
    for part in parts {
        match part {
            Part::Text(part) => text.push_str(part),
            Part::Maybe(_) => {}
            Part::Either(branches) => {
                if let Some(parts) = branches.first() {
                    write(parts, name, arguments, text);
                }
            }
            Part::Name => text.push_str(name),
            Part::QuotedName => text.push_str(&Value::from(name).to_string()),
            Part::Number => text.push('0'),
            Part::Id => text.push_str("aaaaaaaaa"),
            Part::Arguments => text.push_str(arguments),
        }
    }
}
