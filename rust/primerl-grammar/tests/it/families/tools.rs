//! The tools of these tests, and whether arguments obey their schemas.

use serde_json::{Value, json};

pub fn function(name: &str, properties: Value, required: &[&str]) -> Value {
    json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties,
        "required": required, "additionalProperties": false, "$defs": {"mode": {"enum": ["fast", "slow"]},
            "tree": {"type": "object", "properties": {"leaf": {"type": "boolean"}, "next": {"$ref": "#/$defs/tree"}},
                "required": ["leaf"], "additionalProperties": false}}}}})
}

pub fn tools() -> Vec<Value> {
    let closed = json!({"type": "object", "properties": {"x": {"type": "boolean"}, "a": {"type": "string", "maxLength": 3}},
        "required": ["x"], "additionalProperties": false});
    let weather = json!({"city": {"type": "string", "maxLength": 6, "description": "Where"},
        "days": {"type": "integer", "minimum": 0, "maximum": 9}, "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}], "default": null},
        "kind": {"enum": ["a b", "c"]}, "area": closed});
    let other = json!({"mode": {"$ref": "#/$defs/mode"}, "Tree": {"$ref": "#/$defs/tree"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 2}, "minItems": 1, "maxItems": 3},
        "any": {"anyOf": [{"type": "boolean"}, {"type": "number", "maximum": 5}, {"type": "string", "maxLength": 3},
            {"type": "array", "items": {"type": "null"}, "maxItems": 2}]},
        "fixed": {"const": 7}, "code": {"type": "string", "pattern": "^[a-c]{2}/\\d$"},
        "least": {"type": ["string", "integer"], "minLength": 2, "maxLength": 3, "minimum": 10, "maximum": 99},
        "either": {"enum": [true, null, "x", 3]}});
    vec![
        function("get_weather", weather, &["city", "exact", "area"]),
        function("clock", json!({}), &[]),
        function("f.other-2", other, &["Tree", "code"]),
    ]
}

/// That a value obeys the schemas of these tests.
pub fn obeys(value: &Value, schema: &Value, root: &Value) -> bool {
    if let Some(name) = schema["$ref"].as_str() {
        return obeys(value, root.pointer(&name[1..]).expect("is there"), root);
    }
    if let Some(list) = schema["anyOf"].as_array() {
        return list.iter().any(|branch| obeys(value, branch, root));
    }
    if let Some(list) = schema["enum"].as_array() {
        return list.contains(value);
    }
    if schema["const"].is_number() {
        return schema["const"] == *value;
    }
    let is_type = |name: &str| match name {
        "string" => value.is_string(),
        "integer" => value.is_i64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        _ => value.is_object(),
    };
    let has_type = match &schema["type"] {
        Value::Array(names) => names.iter().filter_map(Value::as_str).any(is_type),
        name => name.as_str().is_none_or(is_type),
    };
    let within = |number: f64, least: &str, most: &str| {
        schema[least].as_f64().is_none_or(|least| number >= least)
            && schema[most].as_f64().is_none_or(|most| number <= most)
    };
    let fits = match value {
        Value::Number(number) => within(number.as_f64().expect("a float"), "minimum", "maximum"),
        Value::String(text) => {
            let letters: Vec<char> = text.chars().collect();
            let matches = |[a, b, slash, digit]: [char; 4]| {
                ('a'..='c').contains(&a)
                    && ('a'..='c').contains(&b)
                    && slash == '/'
                    && digit.is_ascii_digit()
            };
            let is_code = <[char; 4]>::try_from(letters.clone()).is_ok_and(matches);
            within(letters.len() as f64, "minLength", "maxLength")
                && (schema["pattern"].is_null() || is_code)
        }
        Value::Array(items) => {
            within(items.len() as f64, "minItems", "maxItems")
                && items.iter().all(|item| obeys(item, &schema["items"], root))
        }
        Value::Object(members) => {
            let properties = &schema["properties"];
            let declared = |(name, value): (&String, &Value)| match properties.get(name) {
                Some(schema) => obeys(value, schema, root),
                None => properties.is_null(),
            };
            let required = schema["required"].as_array();
            let is_there = |name: &Value| members.contains_key(name.as_str().expect("a name"));
            members.iter().all(declared) && required.is_none_or(|names| names.iter().all(is_there))
        }
        _ => true,
    };
    has_type && fits
}
