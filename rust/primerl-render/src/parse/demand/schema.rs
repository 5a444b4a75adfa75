//! Schemas of tools, as far as the syntax of calls has to know them.

use super::{DemandError, Tool};
use serde_json::{Map, Value, json};

/// Keywords that constrain nothing.
const ANNOTATIONS: [&str; 12] = [
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "$id",
    "$schema",
    "$defs",
];
/// Where definitions may be.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];
/// References are followed so far.
const LONGEST_CHAIN: usize = 16;

/// One parameter of a tool.
pub(super) struct Parameter<'a> {
    pub name: &'a str,
    pub schema: &'a Value,
    pub is_required: bool,
}

/// The parameters of a tool in the order of its schema.
pub(super) struct Parameters;

impl Parameters {
    /// # Errors
    /// The schema says more about the arguments than which there are.
    pub fn of<'a>(tool: &'a Tool<'_>) -> Result<Vec<Parameter<'a>>, DemandError> {
        properties(&tool.parameters).map_err(|problem| tool.unwritable(None, problem))
    }
}

/// The properties of an object's schema.
pub(super) fn properties(schema: &Value) -> Result<Vec<Parameter<'_>>, String> {
    let known = ["type", "properties", "required", "additionalProperties"];
    only(schema, &known)?;
    if schema["type"] != "object" {
        return Err("its arguments are not of type \"object\"".to_owned());
    }
    let required: Vec<&str> = strings(schema.get("required"));
    let properties = match schema.get("properties") {
        Some(Value::Object(properties)) => properties,
        Some(_) => return Err("`properties` is no object".to_owned()),
        None => return no_properties(&required),
    };
    if let Some(name) = required
        .iter()
        .find(|name| matches!(properties.get(**name), None | Some(Value::Bool(false))))
    {
        return Err(undeclared(name));
    }
    let allowed = properties.iter().filter(|(_, schema)| **schema != false);
    let parameters = allowed.map(|(name, schema)| Parameter {
        name,
        schema,
        is_required: required.contains(&name.as_str()),
    });
    Ok(parameters.collect())
}

fn no_properties(required: &[&str]) -> Result<Vec<Parameter<'static>>, String> {
    match required.first() {
        Some(name) => Err(undeclared(name)),
        None => Ok(Vec::new()),
    }
}

fn undeclared(name: &str) -> String {
    format!("it requires {name:?}, which is not in `properties`")
}

/// The texts of a list.
fn strings(list: Option<&Value>) -> Vec<&str> {
    let values = list.and_then(Value::as_array);
    values
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// That a schema has no other keywords than these.
pub(super) fn only(schema: &Value, known: &[&str]) -> Result<(), String> {
    let keys = schema.as_object().into_iter().flat_map(Map::keys);
    let mut unknown = keys.filter(|key| {
        let key = key.as_str();
        let is_annotation = ANNOTATIONS.contains(&key) || key.starts_with("x-");
        !known.contains(&key) && !is_annotation && !DEFINITIONS.contains(&key)
    });
    match unknown.next() {
        Some(key) => Err(format!(
            "the calls of this model have no grammar for the keyword {key:?}"
        )),
        None => Ok(()),
    }
}

/// Whether a schema allows every value.
pub(super) fn is_any(schema: &Value) -> bool {
    *schema == true || schema.is_object() && only(schema, &[]).is_ok()
}

/// `schema` as a document of its own, with the definitions of `root`.
///
/// # Errors
/// It refers to another place of `root`.
pub(super) fn standalone(schema: &Value, root: &Value) -> Result<Value, String> {
    check_references(schema)?;
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        _ => json!({}),
    };
    for place in DEFINITIONS {
        if let Some(definitions) = root.get(place)
            && holds_reference(&schema)
        {
            check_references(definitions)?;
            schema[place] = definitions.clone();
        }
    }
    Ok(schema)
}

fn holds_reference(value: &Value) -> bool {
    match value {
        Value::Object(members) => members
            .iter()
            .any(|(key, value)| key == "$ref" || holds_reference(value)),
        Value::Array(items) => items.iter().any(holds_reference),
        _ => false,
    }
}

fn check_references(value: &Value) -> Result<(), String> {
    match value {
        Value::Object(members) => members.iter().try_for_each(|(key, value)| match value {
            Value::String(reference) if key == "$ref" => definition_name(reference).map(|_| ()),
            value => check_references(value),
        }),
        Value::Array(items) => items.iter().try_for_each(check_references),
        _ => Ok(()),
    }
}

fn definition_name(reference: &str) -> Result<(&'static str, &str), String> {
    let in_place = |place: &'static str| {
        let name = reference
            .strip_prefix("#/")?
            .strip_prefix(place)?
            .strip_prefix('/')?;
        (!name.contains(['/', '~', '%'])).then_some((place, name))
    };
    let found = DEFINITIONS.into_iter().find_map(in_place);
    found.ok_or_else(|| format!("it refers to {reference:?}; only \"#/$defs/NAME\" is followed"))
}

/// The definition that a schema with `$ref` stands for.
pub(super) fn definition<'a>(reference: &str, root: &'a Value) -> Result<&'a Value, String> {
    let (place, name) = definition_name(reference)?;
    let found = root
        .get(place)
        .and_then(|definitions| definitions.get(name));
    found.ok_or_else(|| format!("it refers to {reference:?}, which is not there"))
}

/// The schema itself, or what it refers to.
pub(super) fn resolved<'a>(mut schema: &'a Value, root: &'a Value) -> Result<&'a Value, String> {
    for _ in 0..LONGEST_CHAIN {
        match schema.get("$ref").and_then(Value::as_str) {
            None => return Ok(schema),
            Some(reference) => schema = definition(reference, root)?,
        }
    }
    Err("its references have no end".to_owned())
}

/// The schemas of which a value must obey one. `None`: it is a schema of its own.
pub(super) fn branches(schema: &Value) -> Option<&Vec<Value>> {
    let lists =
        ["anyOf", "oneOf", "allOf"].map(|key| (key, schema.get(key).and_then(Value::as_array)));
    let found = lists.into_iter().find_map(|(key, list)| Some((key, list?)));
    found.and_then(|(key, list)| (key != "allOf" || list.len() == 1).then_some(list))
}
