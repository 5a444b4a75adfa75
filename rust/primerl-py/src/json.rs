//! Python values as JSON. Unlike a general conversion it changes nothing silently, and nothing it is given overflows the
//! stack: what has no JSON (NaN, half a surrogate pair, other keys than texts, values within themselves) is refused by
//! its place.

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyMapping};
use pyo3::types::{PySequence, PyString, PyTuple};
use serde_json::{Map, Number, Value};

/// As deep as the gateway takes JSON text (serde_json's limit).
const MAX_DEPTH: usize = 127;

/// The JSON value of a Python object; the error begins with the value's place, as `messages[0].content`.
pub fn from_python(name: &str, value: &Bound<'_, PyAny>) -> Result<Value, String> {
    Reader {
        place: vec![Step::Name(name.to_owned())],
    }
    .value(value)
}

enum Step {
    Name(String),
    Key(String),
    Index(usize),
}

struct Reader {
    place: Vec<Step>,
}

impl Reader {
    fn value(&mut self, value: &Bound<'_, PyAny>) -> Result<Value, String> {
        if self.place.len() > MAX_DEPTH {
            return Err(self.refuse(&format!(
                "nested more than {MAX_DEPTH} deep, or holds itself"
            )));
        }
        if value.is_none() {
            Ok(Value::Null)
        } else if let Ok(text) = value.cast::<PyString>() {
            self.text(text).map(Value::String)
        } else if let Ok(flag) = value.cast::<PyBool>() {
            Ok(Value::Bool(flag.is_true()))
        } else if let Ok(integer) = value.cast::<PyInt>() {
            let number = integer.extract::<i64>().map(Number::from);
            let number = number.or_else(|_| integer.extract::<u64>().map(Number::from));
            number
                .map(Value::Number)
                .map_err(|_| self.refuse("an integer of more than 64 bits"))
        } else if let Ok(float) = value.cast::<PyFloat>() {
            let number = Number::from_f64(float.value());
            number
                .map(Value::Number)
                .ok_or_else(|| self.refuse(&format!("{} is not JSON", float.value())))
        } else if let Ok(list) = value.cast::<PyList>() {
            self.items(list.iter())
        } else if let Ok(tuple) = value.cast::<PyTuple>() {
            self.items(tuple.iter())
        } else if let Ok(dict) = value.cast::<PyDict>() {
            self.entries(dict.iter())
        } else {
            self.other(value)
        }
    }

    /// What Python calls a mapping or a sequence.
    fn other(&mut self, value: &Bound<'_, PyAny>) -> Result<Value, String> {
        let is_bytes = value.is_instance_of::<PyBytes>() || value.is_instance_of::<PyByteArray>();
        if let Ok(mapping) = value.cast::<PyMapping>() {
            let items = mapping.items().map_err(|error| self.failed(&error))?;
            let pairs = items
                .iter()
                .map(|pair| pair.extract())
                .collect::<PyResult<Vec<_>>>()
                .map_err(|error| self.failed(&error))?;
            self.entries(pairs.into_iter())
        } else if let (Ok(sequence), false) = (value.cast::<PySequence>(), is_bytes) {
            let items = sequence.to_list().map_err(|error| self.failed(&error))?;
            self.items(items.iter())
        } else {
            let kind = value.get_type().name();
            let kind = kind.map_or_else(|_| "unknown".to_owned(), |name| name.to_string());
            Err(self.refuse(&format!("a value of type {kind} is not JSON")))
        }
    }

    fn items<'py>(
        &mut self,
        items: impl Iterator<Item = Bound<'py, PyAny>>,
    ) -> Result<Value, String> {
        let mut list = Vec::with_capacity(items.size_hint().0);
        for (index, item) in items.enumerate() {
            self.place.push(Step::Index(index));
            list.push(self.value(&item)?);
            self.place.pop();
        }
        Ok(Value::Array(list))
    }

    fn entries<'py>(
        &mut self,
        entries: impl Iterator<Item = (Bound<'py, PyAny>, Bound<'py, PyAny>)>,
    ) -> Result<Value, String> {
        let mut map = Map::new();
        for (key, value) in entries {
            let key = match key.cast::<PyString>() {
                Ok(key) => self.text(key)?,
                Err(_) => return Err(self.refuse(&format!("the key {key} is not a string"))),
            };
            self.place.push(Step::Key(key.clone()));
            map.insert(key, self.value(&value)?);
            self.place.pop();
        }
        Ok(Value::Object(map))
    }

    fn text(&self, text: &Bound<'_, PyString>) -> Result<String, String> {
        let text = text.to_cow().map_err(|_| {
            self.refuse("holds half of a surrogate pair, which has no UTF-8; remove or replace it")
        })?;
        Ok(text.into_owned())
    }

    fn failed(&self, error: &PyErr) -> String {
        self.refuse(&error.to_string())
    }

    fn refuse(&self, why: &str) -> String {
        let mut place = String::new();
        // A deep place is not worth a long message.
        for step in self.place.iter().take(8) {
            match step {
                Step::Name(name) => place.push_str(name),
                Step::Key(key) => {
                    place.push('.');
                    place.push_str(key);
                }
                Step::Index(index) => place.push_str(&format!("[{index}]")),
            }
        }
        let more = if self.place.len() > 8 { ".." } else { "" };
        format!("{place}{more}: {why}")
    }
}
