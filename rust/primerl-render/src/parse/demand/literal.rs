//! Values that are written neither as JSON nor between markers: Python's literals, and Gemma's.

use super::form::Writer;
use super::grammar::{Sequence, delimited, literals, quoted};
use super::python::{python_string, python_text};
use super::schema::{Parameter, branches, definition, is_any, only, properties};
use super::strings::{listed, strings, types};
use crate::parse::parsers::gemma4;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Of which language the literals are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::parse) enum Style {
    /// `f(city='Paris', days=2, exact=True)`.
    Python,
    /// `{city:<|"|>Paris<|"|>,days:2,exact:true}`, keys in alphabetical order.
    Gemma,
}

/// Schemas deeper than this are refused, as the readers refuse such values.
const DEEPEST: usize = 32;
const NUMBERS: [&str; 6] = [
    "type",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];
/// Writes the rules of values.
pub(super) struct Values<'a, 'w> {
    writer: &'a mut Writer<'w>,
    style: Style,
    root: &'a Value,
    /// Rules by definition: one may refer to itself.
    definitions: HashMap<String, String>,
    /// The rule of all values.
    any: Option<String>,
}

impl<'a, 'w> Values<'a, 'w> {
    pub fn new(writer: &'a mut Writer<'w>, style: Style, root: &'a Value) -> Self {
        Self {
            writer,
            style,
            root,
            definitions: HashMap::new(),
            any: None,
        }
    }

    /// The rule of a tool's arguments, or the parameter that has none and why.
    pub fn arguments(&mut self, parameters: &[Parameter<'_>]) -> Result<String, (String, String)> {
        let mut members = Vec::new();
        for parameter in self.ordered(parameters) {
            let value = self.value(parameter.schema, 0);
            let value = value.map_err(|problem| (parameter.name.to_owned(), problem))?;
            let key = match self.style {
                Style::Python => format!("{}=", parameter.name),
                Style::Gemma => format!("{}:", parameter.name),
            };
            members.push((format!("{} {value}", quoted(&key)), parameter.is_required));
        }
        let body = self.members(&members);
        Ok(self.writer.rules.rule(&body))
    }

    /// In the order in which the family writes them.
    fn ordered<'p, 's>(&self, parameters: &'p [Parameter<'s>]) -> Vec<&'p Parameter<'s>> {
        let mut ordered: Vec<_> = parameters.iter().collect();
        if self.style == Style::Gemma {
            // As Jinja's `dictsort`.
            ordered.sort_by_key(|parameter| parameter.name.to_lowercase());
        }
        ordered
    }

    fn comma(&self) -> &'static str {
        match self.style {
            Style::Python => "\",\" (\" \")?",
            Style::Gemma => "\",\"",
        }
    }

    /// Members in this order, of which some may be missing, with commas between those that are there.
    fn members(&mut self, members: &[(String, bool)]) -> String {
        let comma = self.comma();
        // What may follow when no member is written yet, and when one is; from the last one to the first.
        let (mut first, mut later) = ("\"\"".to_owned(), "\"\"".to_owned());
        for (member, is_required) in members.iter().rev() {
            let member = self.writer.rules.rule(member);
            let without = |rest: &str| match is_required {
                true => String::new(),
                false => format!(" | {rest}"),
            };
            let begins = format!("{member} {later}{}", without(&first));
            let follows = format!("{comma} {member} {later}{}", without(&later));
            first = self.writer.rules.rule(&begins);
            later = self.writer.rules.rule(&follows);
        }
        first
    }

    /// An expression of the values of a schema.
    fn value(&mut self, schema: &Value, depth: usize) -> Result<String, String> {
        if depth > DEEPEST {
            return Err("it is nested too deep".to_owned());
        }
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            return self.definition(reference, depth);
        }
        if is_any(schema) {
            return self.any();
        }
        if let Some(values) = listed(schema) {
            let values = values.iter().map(|value| self.literal(value));
            let values: Vec<_> = values.collect::<Result<_, _>>()?;
            return Ok(format!("({})", values.join(" | ")));
        }
        if let Some(list) = branches(schema) {
            only(schema, &["anyOf", "oneOf", "allOf", "type"])?;
            check_disjoint(schema)?;
            let values = list.iter().map(|branch| self.value(branch, depth + 1));
            let values: Vec<_> = values.collect::<Result<_, _>>()?;
            return Ok(format!("({})", values.join(" | ")));
        }
        let Some(names) = types(schema) else {
            return Err("it has no `type`".to_owned());
        };
        if let [name] = names[..] {
            return self.typed(schema, name, depth);
        }
        let one = |name: &&str| {
            let mut schema = schema.clone();
            schema["type"] = json!(name);
            of_type(&mut schema, name);
            self.typed(&schema, name, depth)
        };
        let values: Vec<_> = names.iter().map(one).collect::<Result<_, _>>()?;
        Ok(format!("({})", values.join(" | ")))
    }

    fn typed(&mut self, schema: &Value, name: &str, depth: usize) -> Result<String, String> {
        match name {
            "string" => self.string(schema),
            "integer" | "number" => {
                only(schema, &NUMBERS)?;
                Ok(format!("%json {schema}"))
            }
            "boolean" => {
                only(schema, &["type"])?;
                Ok(format!(
                    "({} | {})",
                    self.word(&Value::Bool(true)),
                    self.word(&Value::Bool(false))
                ))
            }
            "null" => {
                only(schema, &["type"])?;
                Ok(self.word(&Value::Null))
            }
            "array" => self.array(schema, depth),
            "object" => self.object(schema, depth),
            other => Err(format!("there is no type {other:?}")),
        }
    }

    fn word(&self, value: &Value) -> String {
        let python = match value {
            Value::Bool(true) => "True",
            Value::Bool(false) => "False",
            _ => "None",
        };
        let json = quoted(&value.to_string());
        match self.style {
            // Templates write JSON's words within lists and dictionaries.
            Style::Python => format!("({} | {json})", quoted(python)),
            Style::Gemma => json,
        }
    }

    fn definition(&mut self, reference: &str, depth: usize) -> Result<String, String> {
        if let Some(rule) = self.definitions.get(reference) {
            return Ok(rule.clone());
        }
        let schema = definition(reference, self.root)?;
        let name = self.writer.rules.new_name("definition");
        self.definitions.insert(reference.to_owned(), name.clone());
        let body = self.value(schema, depth + 1)?;
        if body == name {
            return Err(format!("{reference:?} refers to itself"));
        }
        self.writer.rules.add(&name, &body);
        Ok(name)
    }

    fn any(&mut self) -> Result<String, String> {
        if let Some(rule) = &self.any {
            return Ok(rule.clone());
        }
        let name = self.writer.rules.new_name("any");
        self.any = Some(name.clone());
        let kinds = ["string", "number", "boolean", "null", "array", "object"];
        let values = kinds.map(|kind| self.typed(&json!({"type": kind}), kind, 0));
        let values: Vec<_> = values.into_iter().collect::<Result<_, _>>()?;
        self.writer.rules.add(&name, &values.join(" | "));
        Ok(name)
    }

    fn array(&mut self, schema: &Value, depth: usize) -> Result<String, String> {
        only(schema, &["type", "items", "minItems", "maxItems"])?;
        let item = self.value(schema.get("items").unwrap_or(&Value::Bool(true)), depth + 1)?;
        let item = self.writer.rules.rule(&item);
        let least = bound(schema, "minItems")?.unwrap_or(0);
        let most = bound(schema, "maxItems")?;
        let comma = self.comma();
        let more = match (least.saturating_sub(1), most) {
            (_, Some(most)) if most < least => {
                return Err("`maxItems` is below `minItems`".to_owned());
            }
            (_, Some(0 | 1)) => String::new(),
            (least, Some(most)) => format!("({comma} {item}){{{least},{}}}", most - 1),
            (least, None) => format!("({comma} {item}){{{least},}}"),
        };
        let items = match (least, most) {
            (_, Some(0)) => String::new(),
            (0, _) => format!("({item} {more})?"),
            _ => format!("{item} {more}"),
        };
        Ok(format!("(\"[\" {items} \"]\")"))
    }

    fn object(&mut self, schema: &Value, depth: usize) -> Result<String, String> {
        let parameters = properties(schema)?;
        let mut members = Vec::new();
        for parameter in self.ordered(&parameters) {
            let value = self.value(parameter.schema, depth + 1)?;
            members.push((
                format!("{} {value}", self.key(parameter.name)?),
                parameter.is_required,
            ));
        }
        let members = match (schema.get("properties"), schema.get("additionalProperties")) {
            (None, None | Some(Value::Bool(true))) => self.map(&Value::Bool(true), depth)?,
            (None, Some(values @ Value::Object(_))) => self.map(values, depth)?,
            _ => self.members(&members),
        };
        Ok(format!("(\"{{\" {members} \"}}\")"))
    }

    /// Members of any names.
    fn map(&mut self, values: &Value, depth: usize) -> Result<String, String> {
        let value = self.value(values, depth + 1)?;
        let key = match self.style {
            Style::Python => format!(
                "{} \":\" (\" \")?",
                self.string(&json!({"type": "string"}))?
            ),
            Style::Gemma => "/[a-zA-Z_][a-zA-Z0-9_]*/ \":\"".to_owned(),
        };
        let member = self.writer.rules.rule(&format!("{key} {value}"));
        Ok(format!("({member} ({} {member})*)?", self.comma()))
    }

    /// The name of a member of an object, and what is between it and its value.
    fn key(&self, name: &str) -> Result<String, String> {
        match self.style {
            Style::Python => Ok(format!("{} \":\" (\" \")?", python_text(name))),
            Style::Gemma
                if name.trim() == name
                    && !name.contains([':', ',', '{', '}', '[', ']', '<', '|', '"']) =>
            {
                Ok(quoted(&format!("{name}:")))
            }
            Style::Gemma => Err(format!(
                "the calls of this model cannot hold the key {name:?}"
            )),
        }
    }

    fn string(&mut self, schema: &Value) -> Result<String, String> {
        match self.style {
            Style::Python => {
                let text = python_string(schema, self.root)?;
                Ok(self.writer.rules.terminal(&text))
            }
            Style::Gemma => {
                let text = strings(schema, self.root)?.ok_or("it allows no string")?;
                Ok(self.gemma_text(&text))
            }
        }
    }

    fn gemma_text(&mut self, text: &str) -> String {
        let special = &self.writer.special;
        let open = literals(gemma4::QUOTE, special);
        let without = [gemma4::QUOTE, gemma4::CLOSE];
        let text = delimited(
            &mut self.writer.rules,
            special,
            text,
            &without,
            gemma4::QUOTE,
        );
        format!("({open} {text})")
    }

    /// One value.
    fn literal(&mut self, value: &Value) -> Result<String, String> {
        Ok(match value {
            Value::Null | Value::Bool(_) => self.word(value),
            Value::Number(number) => quoted(&number.to_string()),
            Value::String(text) if self.style == Style::Python => python_text(text),
            Value::String(text) => self.gemma_text(&quoted(text)),
            Value::Array(items) => {
                let items = items.iter().map(|item| self.literal(item));
                let items: Vec<_> = items.collect::<Result<_, _>>()?;
                let items = items.join(&format!(" {} ", self.comma()));
                format!("(\"[\" {items} \"]\")")
            }
            Value::Object(members) => {
                let members = self.literal_members(members)?;
                format!("(\"{{\" {members} \"}}\")")
            }
        })
    }

    fn literal_members(&mut self, members: &Map<String, Value>) -> Result<String, String> {
        let members = members.iter().map(|(name, value)| {
            let mut sequence = Sequence::new(&[]);
            sequence.item(self.key(name)?);
            sequence.item(self.literal(value)?);
            Ok(sequence.finish())
        });
        let members: Vec<String> = members.collect::<Result<_, String>>()?;
        Ok(members.join(&format!(" {} ", self.comma())))
    }
}

/// Removes the keywords of other types.
fn of_type(schema: &mut Value, name: &str) {
    let of = |key: &str| match key {
        "minLength" | "maxLength" | "pattern" | "format" => Some("string"),
        "items" | "minItems" | "maxItems" => Some("array"),
        "properties" | "required" | "additionalProperties" => Some("object"),
        "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
            Some("number")
        }
        _ => None,
    };
    let name = if name == "integer" { "number" } else { name };
    if let Some(members) = schema.as_object_mut() {
        members.retain(|key, _| of(key).is_none_or(|kind| kind == name));
    }
}

fn may_overlap() -> String {
    "the branches of `oneOf` may overlap; write `anyOf`".to_owned()
}

fn bound(schema: &Value, key: &str) -> Result<Option<u64>, String> {
    match schema.get(key) {
        None => Ok(None),
        Some(bound) => bound
            .as_u64()
            .map(Some)
            .ok_or(format!("`{key}` is no number")),
    }
}

/// Of the branches of `oneOf` only one may match.
fn check_disjoint(schema: &Value) -> Result<(), String> {
    let Some(branches) = schema.get("oneOf").and_then(Value::as_array) else {
        return Ok(());
    };
    let mut seen: Vec<Value> = Vec::new();
    for branch in branches {
        let kinds: Vec<Value> = match (listed(branch), types(branch)) {
            (Some(values), _) => values,
            (None, Some(names)) => names.into_iter().map(Value::from).collect(),
            (None, None) => return Err(may_overlap()),
        };
        let is_seen = |kind: &Value| seen.contains(kind);
        let is_other_number = |kind: &Value| {
            kind == "number" && is_seen(&json!("integer"))
                || kind == "integer" && is_seen(&json!("number"))
        };
        if kinds.iter().any(is_seen)
            || listed(branch).is_none() && kinds.iter().any(is_other_number)
        {
            return Err(may_overlap());
        }
        seen.extend(kinds);
    }
    Ok(())
}
