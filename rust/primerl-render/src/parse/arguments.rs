//! Arguments that a model writes as bare text (XML-like families), turned into JSON by the types of the tool's schema.

use super::{json, python_literal};
use serde_json::Value;
use std::collections::HashMap;

/// The JSON types that a parameter may have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Types {
    pub string: bool,
    pub number: bool,
    pub boolean: bool,
    pub null: bool,
    pub container: bool,
}

impl Types {
    pub const ALL: Self = Self {
        string: true,
        number: true,
        boolean: true,
        null: true,
        container: true,
    };

    /// The types by which a value of this schema is read; `None`: the schema names none.
    pub fn of(schema: &Value) -> Option<Self> {
        types(schema, 0)
    }

    /// The type of this name in a schema.
    pub fn named(name: &str) -> Option<Self> {
        named(name)
    }

    pub fn of_value(value: &Value) -> Self {
        type_of(value)
    }

    pub fn add(&mut self, other: Self) {
        self.string |= other.string;
        self.number |= other.number;
        self.boolean |= other.boolean;
        self.null |= other.null;
        self.container |= other.container;
    }

    pub fn includes(self, other: Self) -> bool {
        let mut both = self;
        both.add(other);
        both == self
    }

    pub fn is_only_string(self) -> bool {
        let string = Self {
            string: true,
            ..Self::default()
        };
        self == string
    }
}

/// The types of every parameter of a request's tools.
#[derive(Clone, Debug, Default)]
pub(super) struct ToolTypes(Vec<(String, Vec<(String, Types)>)>);

impl ToolTypes {
    pub fn new(tools: &[Value]) -> Self {
        let one = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            let properties = function.get("parameters")?.get("properties")?;
            let typed = |(name, schema): (&String, &Value)| Some((name.clone(), types(schema, 0)?));
            Some((
                function.get("name")?.as_str()?.to_owned(),
                properties.as_object()?.iter().filter_map(typed).collect(),
            ))
        };
        Self(tools.iter().filter_map(one).collect())
    }

    fn of(&self, tool: &str, parameter: &str) -> Option<Types> {
        let (_, parameters) = self.0.iter().find(|(name, _)| name == tool)?;
        let found = parameters.iter().find(|(name, _)| name == parameter);
        found.map(|(_, types)| *types)
    }
}

/// The text of a JSON object with an entry for each parameter, in order. Of two with a name the last one counts.
#[derive(Default)]
pub(super) struct Arguments {
    entries: Vec<(String, String)>,
    places: HashMap<String, usize>,
}

impl Arguments {
    /// Adds a parameter by the text the model wrote.
    pub fn add(&mut self, types: &ToolTypes, tool: &str, parameter: &str, text: &str) {
        self.add_json(parameter, to_json(text, types.of(tool, parameter)));
    }

    /// Adds a parameter by its JSON text.
    pub fn add_json(&mut self, parameter: &str, value: String) {
        match self.places.get(parameter) {
            Some(&place) => self.entries[place].1 = value,
            None => {
                self.places.insert(parameter.to_owned(), self.entries.len());
                self.entries.push((parameter.to_owned(), value));
            }
        }
    }

    pub fn into_json(self) -> String {
        let mut text = String::from("{");
        for (index, (name, value)) in self.entries.iter().enumerate() {
            if index > 0 {
                text.push_str(", ");
            }
            text.push_str(&quoted(name));
            text.push_str(": ");
            text.push_str(value);
        }
        text.push('}');
        text
    }
}

/// `text` as a JSON string.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// The types a schema allows; none where it does not say.
fn types(schema: &Value, depth: usize) -> Option<Types> {
    let mut allowed = Types::default();
    let mut says = false;
    let mut add = |types: Option<Types>| {
        if let Some(types) = types {
            allowed.add(types);
            says = true;
        }
    };
    match schema.get("type") {
        Some(Value::String(name)) => add(named(name)),
        Some(Value::Array(names)) => names
            .iter()
            .for_each(|name| add(name.as_str().and_then(named))),
        _ => {
            for value in schema
                .get("enum")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
            {
                add(Some(type_of(value)));
            }
            let branches = ["anyOf", "oneOf", "allOf"].map(|key| schema.get(key));
            for branch in branches
                .into_iter()
                .flatten()
                .filter_map(Value::as_array)
                .flatten()
            {
                // A schema this deep is no tool's.
                if depth < 8 {
                    add(types(branch, depth + 1));
                }
            }
        }
    }
    says.then_some(allowed)
}

fn named(name: &str) -> Option<Types> {
    let mut types = Types::default();
    match name {
        "string" => types.string = true,
        "number" | "integer" => types.number = true,
        "boolean" => types.boolean = true,
        "null" => types.null = true,
        "object" | "array" => types.container = true,
        _ => return None,
    }
    Some(types)
}

fn type_of(value: &Value) -> Types {
    let mut types = Types::default();
    match value {
        Value::String(_) => types.string = true,
        Value::Number(_) => types.number = true,
        Value::Bool(_) => types.boolean = true,
        Value::Null => types.null = true,
        Value::Array(_) | Value::Object(_) => types.container = true,
    }
    types
}

/// The JSON text of a bare value. A string is taken as it is, white space included.
fn to_json(text: &str, types: Option<Types>) -> String {
    let literal = text.trim();
    let Some(types) = types else {
        return match json::check(literal) {
            Ok(()) => literal.to_owned(),
            Err(_) => quoted(text),
        };
    };
    if types.is_only_string() {
        return quoted(text);
    }
    // Templates write values as Python prints them.
    match literal {
        "True" | "true" if types.boolean => return "true".to_owned(),
        "False" | "false" if types.boolean => return "false".to_owned(),
        "None" | "null" if types.null || !types.string => return "null".to_owned(),
        _ => {}
    }
    let allowed = match literal.as_bytes().first() {
        Some(b'{' | b'[') => types.container,
        Some(b'-' | b'0'..=b'9') => types.number,
        Some(b'"') => types.string,
        _ => false,
    };
    let is_json = json::check(literal).is_ok();
    if is_json && (allowed || !types.string) {
        return literal.to_owned();
    }
    if types.container
        && literal.starts_with(['{', '['])
        && let Ok(value) = python_literal::to_json(literal)
    {
        return value;
    }
    quoted(text)
}
