//! Strings of a schema as regular expressions, for syntaxes that write them without JSON's quotes and escapes.

use super::grammar::{escaped, quoted};
use super::schema::{branches, is_any, only, resolved};
use serde_json::Value;

/// Schemas deeper than this are no tool's.
const DEEPEST: usize = 8;

/// The strings that a schema allows, as an expression of a terminal; `None`: it allows no string.
///
/// # Errors
/// It allows strings of which no such expression is known: the reason.
pub(super) fn strings(schema: &Value, root: &Value) -> Result<Option<String>, String> {
    nested(schema, root, 0)
}

fn nested(schema: &Value, root: &Value, depth: usize) -> Result<Option<String>, String> {
    if depth > DEEPEST {
        return Err("it is nested too deep".to_owned());
    }
    let schema = resolved(schema, root)?;
    if is_any(schema) {
        return Ok(Some(any()));
    }
    if let Some(values) = listed(schema) {
        return Ok(union(values.iter().filter_map(Value::as_str).map(quoted)));
    }
    if let Some(list) = branches(schema) {
        only(schema, &["anyOf", "oneOf", "allOf", "type"])?;
        let parts = list.iter().map(|branch| nested(branch, root, depth + 1));
        let parts: Vec<_> = parts
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .flatten()
            .collect();
        let may_overlap = schema.get("oneOf").is_some() && parts.len() > 1;
        if may_overlap && !list.iter().all(|branch| listed(branch).is_some()) {
            return Err("several branches of `oneOf` allow strings; write `anyOf`".to_owned());
        }
        return Ok(union(parts.into_iter()));
    }
    if schema.get("allOf").is_some() {
        return Err("the calls of this model have no grammar for `allOf`".to_owned());
    }
    match types(schema) {
        Some(types) if types.contains(&"string") => constrained(schema, types.len() > 1).map(Some),
        Some(_) => Ok(None),
        None => Err("it has no `type`".to_owned()),
    }
}

/// The only values that a schema allows, where it lists them.
pub(super) fn listed(schema: &Value) -> Option<Vec<Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value.clone()]),
        (None, Some(Value::Array(values))) => Some(values.clone()),
        _ => None,
    }
}

/// The types that a schema names.
pub(super) fn types(schema: &Value) -> Option<Vec<&str>> {
    match schema.get("type")? {
        Value::String(name) => Some(vec![name]),
        Value::Array(names) => Some(names.iter().filter_map(Value::as_str).collect()),
        _ => None,
    }
}

fn any() -> String {
    "/(?s:.*)/".to_owned()
}

fn union(parts: impl Iterator<Item = String>) -> Option<String> {
    let parts: Vec<_> = parts.collect();
    (!parts.is_empty()).then(|| format!("({})", parts.join(" | ")))
}

/// Strings of the schema's lengths, where it has any.
fn of_length(schema: &Value) -> Result<Option<String>, String> {
    let length = |key: &str| match schema.get(key) {
        None => Ok(None),
        Some(length) => length
            .as_u64()
            .map(Some)
            .ok_or(format!("`{key}` is no length")),
    };
    let (least, most) = (length("minLength")?, length("maxLength")?);
    if least.is_none() && most.is_none() {
        return Ok(None);
    }
    let most = most.map_or(String::new(), |most| most.to_string());
    Ok(Some(format!("/(?s:.{{{},{most}}})/", least.unwrap_or(0))))
}

/// Strings with what `pattern`, `format` and the lengths say.
fn constrained(schema: &Value, has_other_types: bool) -> Result<String, String> {
    let mut parts = Vec::new();
    // Keywords of other types say nothing about strings.
    if !has_other_types {
        only(
            schema,
            &["type", "pattern", "format", "minLength", "maxLength"],
        )?;
    }
    parts.extend(of_length(schema)?);
    if let Some(pattern) = schema.get("pattern") {
        let pattern = pattern.as_str().ok_or("`pattern` is no string")?;
        parts.push(format!("/{}/", searched(pattern)?));
    }
    if let Some(format) = schema.get("format") {
        let name = format.as_str().ok_or("`format` is no string")?;
        let known = format_expression(name);
        let known = known.ok_or_else(|| {
            format!("the calls of this model have no grammar for the format {name:?}")
        })?;
        parts.push(format!("/{known}/"));
    }
    match parts.is_empty() {
        true => Ok(any()),
        false => Ok(format!("({})", parts.join(" & "))),
    }
}

/// A pattern, which may match anywhere in a string, as an expression of whole strings.
fn searched(pattern: &str) -> Result<String, String> {
    let inner = pattern.strip_prefix('^').unwrap_or(pattern);
    let ends = inner.ends_with('$') && !inner.ends_with("\\$");
    let inner = if ends {
        &inner[..inner.len() - 1]
    } else {
        inner
    };
    let is_anchored = ends || inner.len() < pattern.len();
    let (out, has_alternatives) = checked(inner)?;
    // An anchor belongs to its alternative alone.
    if is_anchored && has_alternatives {
        return Err(format!(
            "put the alternatives of the pattern {pattern:?} in parentheses"
        ));
    }
    let free = |is_bound: bool| if is_bound { "" } else { "(?s:.*)" };
    let (before, after) = (free(pattern.starts_with('^')), free(ends));
    Ok(format!("{before}(?:{out}){after}"))
}

/// What JSON schema means by a pattern, and whether it has alternatives outside of parentheses.
fn checked(pattern: &str) -> Result<(String, bool), String> {
    let refused = |what: &str| {
        Err(format!(
            "the pattern {pattern:?} has {what}, which no grammar can hold"
        ))
    };
    let (mut out, mut has_alternatives) = (String::new(), false);
    let (mut depth, mut in_class) = (0usize, false);
    let mut letters = pattern.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => match letters.next() {
                Some('d') => out.push_str("[0-9]"),
                Some('D') => out.push_str("[^0-9]"),
                Some('w') => out.push_str("[0-9a-zA-Z_]"),
                Some('W') => out.push_str("[^0-9a-zA-Z_]"),
                Some('b' | 'B' | 'A' | 'z' | 'Z') => return refused("a boundary"),
                Some('0'..='9' | 'k') => return refused("a reference to a group"),
                Some(escaped) => out.extend(['\\', escaped]),
                None => return refused("a backslash at its end"),
            },
            '^' | '$' if !in_class => return refused("an anchor within it"),
            '(' if !in_class => {
                depth += 1;
                out.push('(');
                if letters.next_if_eq(&'?').is_some() {
                    match letters.next() {
                        Some(':') => out.push_str("?:"),
                        _ => return refused("a look-around or a flag"),
                    }
                }
            }
            ')' if !in_class => {
                depth = depth.saturating_sub(1);
                out.push(')');
            }
            '[' if !in_class => {
                in_class = true;
                out.push('[');
                if letters.next_if_eq(&'^').is_some() {
                    out.push('^');
                }
            }
            ']' => {
                in_class = false;
                out.push(']');
            }
            '/' => out.push_str("\\/"),
            '\n' => out.push_str("\\n"),
            letter => {
                has_alternatives |= letter == '|' && depth == 0 && !in_class;
                out.push(letter);
            }
        }
    }
    Ok((out, has_alternatives))
}

fn format_expression(name: &str) -> Option<String> {
    let date = r"[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))";
    let time = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])";
    let byte = r"(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
    let host = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?(?:\.[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?)*";
    let path = r"(?:[a-zA-Z0-9._~!$&'()*+,;=:@\/\-]|%[0-9a-fA-F]{2})*";
    Some(match name {
        "date" => date.to_owned(),
        "time" => time.to_owned(),
        "date-time" => format!("(?:{date})T{time}"),
        "uuid" => r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}".to_owned(),
        "ipv4" => format!(r"{byte}(?:\.{byte}){{3}}"),
        "hostname" => host.to_owned(),
        "email" => format!(r"[a-zA-Z0-9_+\-]+(?:\.[a-zA-Z0-9_+\-]+)*@{host}"),
        "uri" => format!(
            r"[a-zA-Z][a-zA-Z0-9+.\-]*:\/\/{host}(?::[0-9]{{1,5}})?(?:\/{path})?(?:\?{path})?(?:#{path})?"
        ),
        _ => return None,
    })
}

/// Expressions of a text that are not this one.
pub(super) fn not_words(words: &[&str]) -> String {
    let words: Vec<_> = words.iter().map(|word| escaped(word)).collect();
    format!("~/(?:{})\\s*/", words.join("|"))
}
