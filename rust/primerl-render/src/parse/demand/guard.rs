//! Schemas whose strings do not hold what ends a call: most parsers look for the end before they read the JSON.

use super::schema::is_any;
use serde_json::{Map, Value, json};

/// What takes the place of a schema that allows everything.
const ANYTHING: &str = "primerl_anything";
/// Keywords by which other schemas say more about a value.
const COMPOSED: [&str; 4] = ["allOf", "anyOf", "oneOf", "$ref"];

/// `schema` without the values of which a string, or a key that is not declared, holds one of `markers`. Each of them
/// begins with the only `<` in it. Keys other than the declared ones are not allowed, unless the schema says what their
/// values are.
///
/// Also whether the schema became one that not every library enforces: a pattern with a length or a format, a recursion.
pub(super) fn guarded(schema: &Value, markers: &[&str]) -> (Value, bool) {
    let mut guarded = schema.clone();
    if markers.is_empty() {
        return (guarded, false);
    }
    let mut guard = Guard {
        pattern: format!("^{}$", free_of(markers)),
        uses_anything: false,
        combines: false,
    };
    guard.visit(&mut guarded, false);
    if guard.uses_anything {
        let anything = guard.anything();
        let definitions = guarded.as_object_mut().map(|schema| {
            let definitions = schema.entry("$defs").or_insert_with(|| json!({}));
            definitions.as_object_mut()
        });
        if let Some(Some(definitions)) = definitions {
            definitions.insert(ANYTHING.to_owned(), anything);
        }
    }
    (guarded, guard.uses_anything || guard.combines)
}

struct Guard {
    /// Of strings that hold no marker.
    pattern: String,
    uses_anything: bool,
    /// A string has a pattern and more.
    combines: bool,
}

impl Guard {
    /// The schemas within a schema; `is_part` as in [`Guard::visit`].
    fn visit_members(&mut self, members: &mut Map<String, Value>, is_part: bool) {
        let says_more = members.contains_key("type") || members.contains_key("properties");
        for (key, value) in members.iter_mut() {
            let are_parts = match key.as_str() {
                "anyOf" | "oneOf" => is_part || says_more,
                key => key == "allOf",
            };
            let mut visit = |schema: &mut Value| self.visit(schema, are_parts);
            match (key.as_str(), value) {
                (
                    "properties" | "patternProperties" | "$defs" | "definitions",
                    Value::Object(schemas),
                ) => schemas.values_mut().for_each(visit),
                ("anyOf" | "oneOf" | "allOf" | "prefixItems", Value::Array(schemas)) => {
                    schemas.iter_mut().for_each(visit);
                }
                ("items" | "additionalProperties", value) => visit(value),
                _ => {}
            }
        }
    }

    /// `is_part`: other schemas say more about the same value, so this one's objects stay open.
    fn visit(&mut self, schema: &mut Value, is_part: bool) {
        if is_any(schema) && !is_part {
            self.replace(schema);
            return;
        }
        let Some(members) = schema.as_object_mut() else {
            return;
        };
        let is_composed = COMPOSED.iter().any(|key| members.contains_key(*key));
        members.retain(|key, value| key != "additionalProperties" || !is_any(value));
        self.visit_members(members, is_part);
        if members.contains_key("enum") || members.contains_key("const") {
            return;
        }
        if has_type(members, "string") {
            self.guard_string(members);
        }
        if !is_part && !is_composed {
            self.close(members);
        }
    }

    fn close(&mut self, members: &mut Map<String, Value>) {
        if has_type(members, "array") && !members.contains_key("items") {
            members.insert("items".to_owned(), self.reference());
        }
        if has_type(members, "object") {
            self.close_object(members);
        }
    }

    fn guard_string(&mut self, members: &mut Map<String, Value>) {
        let more = ["minLength", "maxLength", "format", "pattern"];
        self.combines |= more.iter().any(|key| members.contains_key(*key));
        let pattern = Value::from(self.pattern.as_str());
        if !members.contains_key("pattern") {
            members.insert("pattern".to_owned(), pattern);
            return;
        }
        let types = members["type"].clone();
        let all = members.entry("allOf").or_insert_with(|| json!([]));
        if let Some(all) = all.as_array_mut() {
            all.push(json!({"type": types, "pattern": pattern}));
        }
    }

    /// Keys that are not declared have to be free of markers, too.
    fn close_object(&mut self, members: &mut Map<String, Value>) {
        let is_declared = |key: &str| {
            let declared = members.get(key).and_then(Value::as_object);
            declared.is_some_and(|declared| !declared.is_empty())
        };
        let has_keys = is_declared("properties") || is_declared("patternProperties");
        let values = members.get("additionalProperties");
        if values.is_some_and(|values| *values == false || has_keys) {
            return;
        }
        if !has_keys {
            let values = values.cloned().unwrap_or_else(|| self.reference());
            let pattern = self.pattern.clone();
            members.insert("patternProperties".to_owned(), json!({pattern: values}));
        }
        members.insert("additionalProperties".to_owned(), Value::Bool(false));
    }

    fn replace(&mut self, schema: &mut Value) {
        let reference = self.reference();
        match schema {
            Value::Object(members) => {
                members.extend(reference.as_object().cloned().unwrap_or_default())
            }
            schema => *schema = reference,
        }
    }

    fn reference(&mut self) -> Value {
        self.uses_anything = true;
        json!({"$ref": format!("#/$defs/{ANYTHING}")})
    }

    fn anything(&self) -> Value {
        let anything = json!({"$ref": format!("#/$defs/{ANYTHING}")});
        let pattern = self.pattern.clone();
        json!({"anyOf": [
            {"type": ["number", "boolean", "null"]},
            {"type": "string", "pattern": pattern.clone()},
            {"type": "array", "items": anything.clone()},
            {"type": "object", "patternProperties": {pattern: anything}, "additionalProperties": false},
        ]})
    }
}

fn has_type(members: &Map<String, Value>, name: &str) -> bool {
    match members.get("type") {
        Some(Value::String(only)) => only == name,
        Some(Value::Array(names)) => names.iter().any(|found| found == name),
        _ => false,
    }
}

/// A regular expression of the texts that hold none of these.
pub(super) fn free_of(markers: &[&str]) -> String {
    let rests: Vec<&str> = markers
        .iter()
        .filter_map(|marker| marker.strip_prefix('<'))
        .collect();
    // A `<`, and how far a marker continues: to the next `<` or the end, or to another letter than the marker's.
    let (stops, leaves) = (stops(&rests), leaves(&rests));
    format!("[^<]*(?:(?:<{stops})*<{leaves}[^<]*)*(?:<{stops})*")
}

/// By their first letters, what remains of the markers.
fn branches<'a>(rests: &[&'a str]) -> Vec<(char, Vec<&'a str>)> {
    let mut branches: Vec<(char, Vec<&str>)> = Vec::new();
    for rest in rests {
        let Some(first) = rest.chars().next() else {
            continue;
        };
        let after = &rest[first.len_utf8()..];
        match branches.iter_mut().find(|(letter, _)| *letter == first) {
            Some((_, rests)) => rests.push(after),
            None => branches.push((first, vec![after])),
        }
    }
    branches
}

fn is_end(rests: &[&str]) -> bool {
    rests.iter().any(|rest| rest.is_empty())
}

fn stops(rests: &[&str]) -> String {
    let branches = branches(rests);
    let open = branches.iter().filter(|(_, rests)| !is_end(rests));
    let open: Vec<_> = open
        .map(|(letter, rests)| format!("{}{}", class(*letter), stops(rests)))
        .collect();
    match open.is_empty() {
        true => String::new(),
        false => format!("(?:{})?", open.join("|")),
    }
}

fn leaves(rests: &[&str]) -> String {
    let branches = branches(rests);
    let letters: String = branches
        .iter()
        .map(|(letter, _)| in_class(*letter))
        .collect();
    let open = branches.iter().filter(|(_, rests)| !is_end(rests));
    let open = open.map(|(letter, rests)| format!("{}{}", class(*letter), leaves(rests)));
    let ways: Vec<_> = std::iter::once(format!("[^<{letters}]"))
        .chain(open)
        .collect();
    format!("(?:{})", ways.join("|"))
}

fn class(letter: char) -> String {
    match letter.is_alphanumeric() || "_/".contains(letter) {
        true => letter.to_string(),
        false => format!("[{}]", in_class(letter)),
    }
}

fn in_class(letter: char) -> String {
    match letter {
        '\\' | ']' | '[' | '^' | '-' | '&' | '~' => format!("\\{letter}"),
        letter => letter.to_string(),
    }
}
