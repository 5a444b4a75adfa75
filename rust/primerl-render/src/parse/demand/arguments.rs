//! The rules of a tool's arguments.

use super::form::{ArgumentSyntax, Marked, Writer};
use super::grammar::delimited;
use super::literal::Values;
use super::schema::{Parameter, Parameters, branches, is_any, resolved, standalone};
use super::strings::{listed, not_words, strings, types};
use super::{DemandError, Tool};
use crate::parse::arguments::Types;
use serde_json::Value;

/// Schemas deeper than this are no tool's.
const DEEPEST: usize = 8;
const AMBIGUOUS: &str = "a string could not be told from the other values that it allows; give each branch a `type`, not a `$ref`";

/// The name of the rule of these arguments.
pub(super) fn write(
    writer: &mut Writer<'_>,
    arguments: &ArgumentSyntax,
    tool: &Tool<'_>,
) -> Result<String, DemandError> {
    match arguments {
        ArgumentSyntax::Json(without) => {
            let schema = writer.guarded(&tool.parameters, without);
            Ok(writer.rules.rule(&format!("%json {schema}")))
        }
        ArgumentSyntax::Marked(marked) => {
            let mut sequence = Vec::new();
            for parameter in Parameters::of(tool)? {
                let written = parameter_rule(writer, marked, &parameter, &tool.parameters);
                let rule =
                    written.map_err(|problem| tool.unwritable(Some(parameter.name), problem))?;
                let rule = writer.rules.rule(&rule);
                sequence.push(match parameter.is_required {
                    true => rule,
                    false => format!("{rule}?"),
                });
            }
            let body = match sequence.is_empty() {
                true => "\"\"".to_owned(),
                false => sequence.join(" "),
            };
            Ok(writer.rules.rule(&body))
        }
        ArgumentSyntax::Literal(style) => {
            let mut values = Values::new(writer, *style, &tool.parameters);
            values
                .arguments(&Parameters::of(tool)?)
                .map_err(|(parameter, problem)| tool.unwritable(Some(&parameter), problem))
        }
    }
}

fn parameter_rule(
    writer: &mut Writer<'_>,
    marked: &Marked,
    parameter: &Parameter<'_>,
    root: &Value,
) -> Result<String, String> {
    let values = match marked.before_json {
        Some(before_json) => said_values(writer, marked, before_json, parameter, root)?,
        None => typed_values(writer, marked, parameter, root)?,
    };
    let after = writer.parts(marked.after, "", "");
    let values = values.join(" | ");
    Ok(format!("({values}) {after}"))
}

/// The parameter itself says whether its value is a text.
fn said_values(
    writer: &mut Writer<'_>,
    marked: &Marked,
    before_json: &[super::Part],
    parameter: &Parameter<'_>,
    root: &Value,
) -> Result<Vec<String>, String> {
    let mut values = Vec::new();
    let text = strings(parameter.schema, root).ok().flatten();
    let is_text = text.is_some() && allowed(parameter.schema, root)?.is_only_string();
    if let Some(text) = text {
        let before = writer.parts(marked.before, parameter.name, "");
        values.push(text_value(writer, &before, marked, &text));
    }
    if !is_text {
        let before = writer.parts(before_json, parameter.name, "");
        values.push(json_value(writer, &before, marked, parameter.schema, root)?);
    }
    Ok(values)
}

/// The parser reads a value by the types of the parameter's schema.
fn typed_values(
    writer: &mut Writer<'_>,
    marked: &Marked,
    parameter: &Parameter<'_>,
    root: &Value,
) -> Result<Vec<String>, String> {
    let before = writer.parts(marked.before, parameter.name, "");
    let read = Types::of(parameter.schema);
    let allowed = allowed(parameter.schema, root)?;
    let text = strings(parameter.schema, root);
    let text = match read {
        // All of it is text: it has no escapes.
        Some(types) if types.is_only_string() => match (allowed.is_only_string(), text?) {
            (true, Some(text)) => return Ok(vec![text_value(writer, &before, marked, &text)]),
            _ => return Err(AMBIGUOUS.to_owned()),
        },
        Some(types) if types.string && !types.includes(allowed) => {
            return Err(AMBIGUOUS.to_owned());
        }
        Some(types) if !types.string => None,
        // Strings that can be taken for nothing else may stand without quotes.
        _ => text.ok().flatten().map(|text| bare(&text, read)),
    };
    let mut values = vec![json_value(writer, &before, marked, parameter.schema, root)?];
    let words = words(parameter.schema, root, read)?;
    // The longest terminal wins, so `null` must be in the one that also matches `nullable`.
    let texts: Vec<String> = text.into_iter().chain(words).collect();
    if !texts.is_empty() {
        let text = format!("({})", texts.join(" | "));
        values.push(text_value(writer, &before, marked, &text));
    }
    Ok(values)
}

fn text_value(writer: &mut Writer<'_>, before: &str, marked: &Marked, text: &str) -> String {
    let (without, close) = (marked.without, marked.close);
    let value = delimited(&mut writer.rules, &writer.special, text, without, close);
    format!("{before} {value}")
}

fn json_value(
    writer: &mut Writer<'_>,
    before: &str,
    marked: &Marked,
    schema: &Value,
    root: &Value,
) -> Result<String, String> {
    let schema = writer.guarded(&standalone(schema, root)?, marked.without);
    let close = writer.fixed(marked.close);
    Ok(format!("{before} %json {schema} {close}"))
}

/// Those of the texts that the parser reads as strings.
fn bare(text: &str, read: Option<Types>) -> String {
    let may_be = |has: fn(&Types) -> bool| read.as_ref().is_none_or(has);
    let mut first = String::from("\\s\"");
    if may_be(|types| types.container) {
        first.push_str("{\\[");
    }
    if may_be(|types| types.number) {
        first.push_str("0-9\\-");
    }
    let words = not_words(&["True", "true", "False", "false", "None", "null"]);
    format!("({text} & /(?s:[^{first}].*)?/ & {words})")
}

/// The words for true, false and null, as far as the schema allows them and the parser reads them so.
fn words(schema: &Value, root: &Value, read: Option<Types>) -> Result<Vec<String>, String> {
    let mut values = Vec::new();
    add_words(schema, root, 0, &mut values)?;
    let python = |value: &Value| match value {
        Value::Bool(true) => read.is_some_and(|types| types.boolean).then_some("True"),
        Value::Bool(false) => read.is_some_and(|types| types.boolean).then_some("False"),
        _ => read
            .is_some_and(|types| types.null || !types.string)
            .then_some("None"),
    };
    let spellings = values.iter().flat_map(|value| {
        let json = format!("\"{value}\"");
        std::iter::once(json).chain(python(value).map(|word| format!("\"{word}\"")))
    });
    Ok(spellings.collect())
}

fn add_words(
    schema: &Value,
    root: &Value,
    depth: usize,
    words: &mut Vec<Value>,
) -> Result<(), String> {
    let schema = resolved(schema, root)?;
    if depth > DEEPEST {
        return Ok(());
    }
    if let Some(values) = listed(schema) {
        words.extend(
            values
                .into_iter()
                .filter(|value| value.is_boolean() || value.is_null()),
        );
    } else if let Some(list) = branches(schema) {
        for branch in list {
            add_words(branch, root, depth + 1, words)?;
        }
    } else {
        words.extend(words_of_types(schema));
    }
    Ok(())
}

fn words_of_types(schema: &Value) -> Vec<Value> {
    let names = types(schema);
    let allows =
        |name: &str| is_any(schema) || names.as_ref().is_some_and(|names| names.contains(&name));
    let mut words = Vec::new();
    if allows("boolean") {
        words.extend([Value::Bool(true), Value::Bool(false)]);
    }
    if allows("null") {
        words.push(Value::Null);
    }
    words
}

/// All types that a schema allows.
fn allowed(schema: &Value, root: &Value) -> Result<Types, String> {
    let mut allowed = Types::default();
    add_allowed(schema, root, 0, &mut allowed)?;
    Ok(allowed)
}

fn add_allowed(
    schema: &Value,
    root: &Value,
    depth: usize,
    allowed: &mut Types,
) -> Result<(), String> {
    let schema = resolved(schema, root)?;
    if let Some(values) = listed(schema) {
        values
            .iter()
            .for_each(|value| allowed.add(Types::of_value(value)));
    } else if let (Some(list), true) = (branches(schema), depth < DEEPEST) {
        for branch in list {
            add_allowed(branch, root, depth + 1, allowed)?;
        }
    } else {
        match types(schema) {
            Some(names) => names
                .into_iter()
                .filter_map(Types::named)
                .for_each(|types| allowed.add(types)),
            None => allowed.add(Types::ALL),
        }
    }
    Ok(())
}
