//! Values as Python has them: dictionaries and lists that print as `repr` prints them, wherever a template puts them
//! into text (`{{ x }}`, `~`, `| string`, `| join`).

use super::python_json::python_float;
use minijinja::value::{Enumerator, Object, ObjectExt, ObjectRepr, Value, ValueKind};
use serde_json::Value as Json;
use std::fmt::{self, Write};
use std::sync::Arc;

/// A `dict` with text keys, in the order given.
#[derive(Debug)]
pub(super) struct PythonDict(pub Vec<(Arc<str>, Value)>);

/// A `list`.
#[derive(Debug)]
struct PythonList(Vec<Value>);

impl Object for PythonDict {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    // Linear: messages and schemas have a handful of keys.
    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        let found = self.0.iter().find(|(name, _)| **name == *key);
        found.map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        self.mapped_key_value_enumerator(|this| {
            let pair = |(key, value): &(Arc<str>, Value)| (Value::from(key.clone()), value.clone());
            Box::new(this.0.iter().map(pair))
        })
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        Some(self.0.len())
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_repr(&Value::from_dyn_object(self.clone()), out)
    }
}

impl Object for PythonList {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get(key.as_usize()?).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.0.len())
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_repr(&Value::from_dyn_object(self.clone()), out)
    }
}

/// A float that minijinja would print differently (1e-07 as 0.0000001). It cannot be calculated with.
#[derive(Debug)]
struct PythonFloat {
    value: f64,
    text: String,
}

impl Object for PythonFloat {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(&self.text)
    }
}

fn float(float: f64) -> Value {
    written_float(float, &python_float(float))
}

/// A float that prints as `text`.
pub(super) fn written_float(float: f64, text: &str) -> Value {
    let value = Value::from(float);
    if value.to_string() == text && python_float(float) == text {
        return value;
    }
    Value::from_object(PythonFloat {
        value: float,
        text: text.to_owned(),
    })
}

pub(super) fn dict(entries: Vec<(Arc<str>, Value)>) -> Value {
    Value::from_object(PythonDict(entries))
}

pub(super) fn list(items: Vec<Value>) -> Value {
    Value::from_object(PythonList(items))
}

/// What `json.loads` would give.
pub(super) fn from_json(json: &Json) -> Value {
    match json {
        Json::Null => Value::from(()),
        Json::Bool(flag) => Value::from(*flag),
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(integer), _) => Value::from(integer),
            (None, Some(integer)) => Value::from(integer),
            (None, None) => number.as_f64().map_or_else(|| Value::from(()), float),
        },
        Json::String(text) => Value::from(text.as_str()),
        Json::Array(items) => list(items.iter().map(from_json).collect()),
        Json::Object(map) => dict(
            map.iter()
                .map(|(key, value)| (Arc::from(key.as_str()), from_json(value)))
                .collect(),
        ),
    }
}

pub(super) fn as_float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => f64::try_from(value.clone()).ok(),
        ValueKind::Plain => Some(value.downcast_object_ref::<PythonFloat>()?.value),
        _ => None,
    }
}

/// How a float prints: as Python prints it, or as it was written.
pub(super) fn float_text(value: &Value) -> Option<String> {
    match value.downcast_object_ref::<PythonFloat>() {
        Some(written) => Some(written.text.clone()),
        None => as_float(value).map(python_float),
    }
}

/// Whether the value is a dictionary or a list, or something that stands for one and has a length.
pub(super) fn is_container(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map => true,
        // Slices and sums of lists.
        ValueKind::Iterable => value.len().is_some(),
        _ => false,
    }
}

/// `str(value)`.
pub(super) fn python_str(value: &Value) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = match float_text(value) {
        Some(text) => out.write_str(&text),
        None if is_container(value) => write_repr(value, &mut out),
        None => write!(out, "{value}"),
    };
    out
}

/// `repr(value)`.
pub(super) fn write_repr(value: &Value, out: &mut dyn Write) -> fmt::Result {
    let items = || value.try_iter().into_iter().flatten();
    match value.kind() {
        ValueKind::String => write_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Undefined => out.write_str("Undefined"),
        ValueKind::Map => {
            out.write_char('{')?;
            for (index, key) in items().enumerate() {
                separate(index, out)?;
                write_repr(&key, out)?;
                out.write_str(": ")?;
                write_repr(&value.get_item(&key).unwrap_or_default(), out)?;
            }
            out.write_char('}')
        }
        _ if is_container(value) => {
            out.write_char('[')?;
            for (index, item) in items().enumerate() {
                separate(index, out)?;
                write_repr(&item, out)?;
            }
            out.write_char(']')
        }
        _ => out.write_str(&python_str(value)),
    }
}

fn separate(index: usize, out: &mut dyn Write) -> fmt::Result {
    out.write_str(if index == 0 { "" } else { ", " })
}

fn write_text(text: &str, out: &mut dyn Write) -> fmt::Result {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.write_char(quote)?;
    for char in text.chars() {
        match char {
            '\\' => out.write_str("\\\\")?,
            '\n' => out.write_str("\\n")?,
            '\r' => out.write_str("\\r")?,
            '\t' => out.write_str("\\t")?,
            char if char == quote => write!(out, "\\{char}")?,
            char if is_printable(char) => out.write_char(char)?,
            char => match u32::from(char) {
                code @ ..=0xff => write!(out, "\\x{code:02x}")?,
                code @ ..=0xffff => write!(out, "\\u{code:04x}")?,
                code => write!(out, "\\U{code:08x}")?,
            },
        }
    }
    out.write_char(quote)
}

// Rust escapes, in the middle of a text, what Python calls not printable.
fn is_printable(char: char) -> bool {
    if char.is_ascii() {
        return !char.is_ascii_control();
    }
    let mut buffer = *b"a\0\0\0\0";
    let length = char.encode_utf8(&mut buffer[1..]).len();
    std::str::from_utf8(&buffer[..=length]).is_ok_and(|text| text.escape_debug().count() == 2)
}
