//! Defaults and bounds of all keys, from the one place that has them: `schema.json` is what `primerl config schema --of
//! orchestrator` makes of the classes in `python/primerl/config/schema`, and `make reference` writes it.

use primerl_service::config_error::{ConfigError, field};
use regex::Regex;
use serde::Deserialize;
use serde_json::Value as Json;
use std::collections::BTreeMap;
use std::sync::LazyLock;
use toml::{Table, Value};

static ROOT: LazyLock<Node> = LazyLock::new(|| {
    serde_json::from_str(include_str!("schema.json")).expect("a test reads the same text")
});

/// The longest time of any key, seconds.
pub(super) const YEAR_S: f64 = 365.0 * 86_400.0;

/// The part of JSON Schema that the classes need. What is not here is refused: a bound that no one checks.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default, rename_all = "camelCase")]
struct Node {
    #[serde(rename = "$schema")]
    _language: String,
    #[serde(rename = "title")]
    _title: String,
    #[serde(rename = "description")]
    _description: String,
    #[serde(rename = "$defs")]
    definitions: BTreeMap<String, Node>,
    #[serde(rename = "$ref")]
    reference: Option<String>,
    any_of: Vec<Node>,
    r#type: String,
    #[serde(rename = "enum")]
    choices: Vec<String>,
    /// True for a table whose keys are an environment's or a template's.
    #[serde(rename = "additionalProperties")]
    others: bool,
    properties: BTreeMap<String, Node>,
    required: Vec<String>,
    items: Option<Box<Node>>,
    default: Option<Json>,
    minimum: Option<f64>,
    exclusive_minimum: Option<f64>,
    maximum: Option<f64>,
    exclusive_maximum: Option<f64>,
    min_length: Option<usize>,
    max_length: Option<usize>,
    min_items: Option<usize>,
    pattern: Option<String>,
}

/// Inserts the default of each key that is not given, and checks what each key alone has to fulfil.
///
/// # Errors
/// An unknown key, one without a default that is not given, or one out of its bounds, with its place in the table.
pub(super) fn complete(table: &mut Table) -> Result<(), ConfigError> {
    ROOT.complete(table, "")
}

/// Whether a key has another value than where it is not given; `class` is empty for the keys at the top.
pub(super) fn is_given(class: &str, key: &str, value: impl Into<Json>) -> bool {
    let node = match class {
        "" => Some(&*ROOT),
        _ => definition(class),
    };
    let key = node.and_then(|node| node.properties.get(key));
    let usual = key.and_then(|key| key.default.clone());
    usual.unwrap_or_default() != value.into()
}

/// Whether an environment may be given this name.
pub(super) fn is_name(name: &str) -> bool {
    let class = definition("ServedTrainSource");
    let key = class.and_then(|class| class.properties.get("name"));
    let value = Value::String(name.to_owned());
    let node = key.and_then(|key| key.of(&value));
    node.is_some_and(|node| node.holds(&value))
}

impl Node {
    fn complete(&self, table: &mut Table, place: &str) -> Result<(), ConfigError> {
        self.refuse_unknown(table, place)?;
        for (name, node) in &self.properties {
            let key = place_of(place, name);
            if let (None, Some(default)) =
                (table.get(name), node.default.as_ref().and_then(as_toml))
            {
                table.insert(name.clone(), default);
            }
            let is_required = self.required.contains(name);
            match table.get_mut(name) {
                Some(value) => node.check(value, &key, is_required)?,
                None if is_required => {
                    let hint = "write it into the file, or make the file with `primerl rl @ FILE --dry-run`";
                    return Err(field(&key, "is missing, and has no default", hint));
                }
                None => {}
            }
        }
        Ok(())
    }

    fn refuse_unknown(&self, table: &Table, place: &str) -> Result<(), ConfigError> {
        let mut names = table.keys();
        let is_unknown = |name: &str| !self.others && !self.properties.contains_key(name);
        let Some(name) = names.find(|name| is_unknown(name)) else {
            return Ok(());
        };
        let known = self.properties.keys();
        let known: Vec<String> = known.map(|name| format!("`{name}`")).collect();
        Err(field(
            &place_of(place, name),
            format!(
                "unknown field `{name}`, expected one of {}",
                known.join(", ")
            ),
            "omit it, or correct its name",
        ))
    }

    fn check(&self, value: &mut Value, key: &str, is_required: bool) -> Result<(), ConfigError> {
        let omit = if is_required { "" } else { ", or omit it" };
        let Some(node) = self.of(value) else {
            let problem = format!("is {}, an invalid type", word_of(value.type_str()));
            return Err(field(
                key,
                problem,
                format!("give {}{omit}", self.types().join(" or ")),
            ));
        };
        match value {
            Value::Table(table) => return node.complete(table, key),
            Value::Array(values) => node.check_entries(values, key)?,
            _ => {}
        }
        if node.holds(value) {
            return Ok(());
        }
        let problem = out_of_bounds(value);
        Err(field(key, problem, format!("give {}{omit}", node.bounds())))
    }

    fn check_entries(&self, values: &mut [Value], key: &str) -> Result<(), ConfigError> {
        let Some(items) = &self.items else {
            return Ok(());
        };
        for (index, inner) in values.iter_mut().enumerate() {
            let place = entry_of(key, index, inner);
            items.check(inner, &place, true)?;
        }
        Ok(())
    }

    /// What it may be, in words.
    fn types(&self) -> Vec<&str> {
        match &self.reference {
            Some(reference) => definition(reference).map_or(Vec::new(), Node::types),
            None if self.any_of.is_empty() => vec![word_of(&self.r#type)],
            // Unset is no value.
            None => {
                let nodes = self.any_of.iter().filter(|node| node.r#type != "null");
                nodes.flat_map(|node| node.types()).collect()
            }
        }
    }

    /// The node for the value's type; `None` where there is none.
    fn of(&self, value: &Value) -> Option<&Node> {
        if let Some(reference) = &self.reference {
            return definition(reference)?.of(value);
        }
        if !self.any_of.is_empty() {
            return self.any_of.iter().find_map(|node| node.of(value));
        }
        let fits = match self.r#type.as_str() {
            "integer" => value.is_integer(),
            "number" => value.is_integer() || value.is_float(),
            "string" => value.is_str(),
            "boolean" => value.is_bool(),
            "array" => value.is_array(),
            "object" => value.is_table(),
            _ => false,
        };
        fits.then_some(self)
    }

    fn holds(&self, value: &Value) -> bool {
        let number = match value {
            Value::Integer(number) => *number as f64,
            Value::Float(number) => *number,
            Value::String(text) => {
                let length = text.chars().count();
                let pattern = self.pattern.as_deref().map(Regex::new);
                let matches =
                    pattern.is_none_or(|found| found.is_ok_and(|found| found.is_match(text)));
                let is_one = self.choices.is_empty() || self.choices.contains(text);
                return is_one
                    && matches
                    && self.min_length.is_none_or(|least| length >= least)
                    && self.max_length.is_none_or(|most| length <= most);
            }
            Value::Array(values) => {
                return self.min_items.is_none_or(|least| values.len() >= least);
            }
            _ => return true,
        };
        number.is_finite()
            && self.minimum.is_none_or(|least| number >= least)
            && self.exclusive_minimum.is_none_or(|least| number > least)
            && self.maximum.is_none_or(|most| number <= most)
            && self.exclusive_maximum.is_none_or(|most| number < most)
    }

    /// The bounds of a number, in words.
    fn range(&self) -> Vec<String> {
        let number = |bound: f64| match bound == YEAR_S {
            true => "a year".to_owned(),
            false => bound.to_string(),
        };
        let above = |bound| format!("more than {}", number(bound));
        let below = |bound| format!("less than {}", number(bound));
        let mut parts = Vec::new();
        match (self.minimum, self.maximum) {
            (Some(least), Some(most)) => {
                parts.push(format!("{} to {}", number(least), number(most)))
            }
            (least, most) => {
                parts.extend(least.map(|least| format!("at least {}", number(least))));
                parts.extend(self.exclusive_minimum.map(above));
                parts.extend(most.map(|most| format!("at most {}", number(most))));
            }
        }
        parts.extend(self.exclusive_maximum.map(below));
        parts
    }

    /// What the value may be, in words.
    fn bounds(&self) -> String {
        let mut parts = self.range();
        let (shortest, longest) = (self.min_length, self.max_length);
        parts.extend(shortest.map(|least| format!("at least {least} characters")));
        parts.extend(longest.map(|most| format!("at most {most} characters")));
        parts.extend(self.min_items.map(|least| format!("at least {least}")));
        let pattern = self.pattern.as_ref();
        parts.extend(pattern.map(|pattern| format!("text that matches {pattern}")));
        if !self.choices.is_empty() {
            parts.push(format!("one of {}", self.choices.join(", ")));
        }
        match parts.is_empty() {
            true => "a finite number".to_owned(),
            false => parts.join(" and "),
        }
    }
}

fn place_of(place: &str, name: &str) -> String {
    match place {
        "" => name.to_owned(),
        _ => format!("{place}.{name}"),
    }
}

fn out_of_bounds(value: &Value) -> String {
    match value {
        Value::Integer(number) => format!("is {number}"),
        Value::Float(number) => format!("is {number}"),
        Value::Array(values) => format!("has {} entries", values.len()),
        // A key may have been written in its place.
        _ => "is not what it may be".to_owned(),
    }
}

fn definition(reference: &str) -> Option<&'static Node> {
    ROOT.definitions.get(reference.rsplit('/').next()?)
}

/// A type of TOML, or of JSON Schema.
fn word_of(kind: &str) -> &str {
    match kind {
        "integer" => "a whole number",
        "number" | "float" => "a number",
        "string" => "text",
        "boolean" => "true or false",
        "array" => "a list",
        "object" | "table" => "a table",
        // TOML's dates.
        _ => "a date",
    }
}

/// An environment is called by its name.
fn entry_of(key: &str, index: usize, value: &Value) -> String {
    let name = value.get("name").or_else(|| value.get("id"));
    match name.and_then(Value::as_str) {
        Some(name) => format!("{key}.{name}"),
        None => format!("{key}[{index}]"),
    }
}

/// Without nulls, for which TOML has no word: such keys are not given.
fn as_toml(value: &Json) -> Option<Value> {
    match value {
        Json::Null => None,
        Json::Bool(value) => Some(Value::Boolean(*value)),
        Json::Number(number) => match number.as_i64() {
            Some(number) => Some(Value::Integer(number)),
            None => number.as_f64().map(Value::Float),
        },
        Json::String(text) => Some(Value::String(text.clone())),
        Json::Array(values) => Some(Value::Array(values.iter().filter_map(as_toml).collect())),
        Json::Object(map) => {
            let keys = map.iter();
            let keys = keys.filter_map(|(name, value)| Some((name.clone(), as_toml(value)?)));
            Some(Value::Table(keys.collect()))
        }
    }
}

#[cfg(test)]
mod tests;
