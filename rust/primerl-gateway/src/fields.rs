//! Reads a request's fields one by one. A dialect takes the fields that it knows, and the rest are checked by name, so
//! that no field is silently ignored and each refusal names its field.

use primerl_service::http::ApiError;
use serde::de::{Deserialize, Deserializer, Error as _, MapAccess, Visitor};
use serde_json::{Map, Value};
use std::fmt;

/// Fields that have not been taken. An absent field and `null` are the same.
#[derive(Debug, Default)]
pub(crate) struct Fields(pub Map<String, Value>);

/// Refuses a field that is given twice: only one of them could count.
impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut fields = Fields::default();
        while let Some(name) = map.next_key::<String>()? {
            let value = map.next_value()?;
            fields.add(name, value).map_err(A::Error::custom)?;
        }
        Ok(fields)
    }
}

impl Fields {
    /// Fields of a body; `what` names its expected form in the error.
    pub(crate) fn read(body: &[u8], what: &str) -> Result<Fields, ApiError> {
        serde_json::from_slice(body)
            .map_err(|error| ApiError::invalid(format!("the body is not a {what}: {error}")))
    }

    /// The error for a field that is present already.
    pub(crate) fn add(&mut self, name: String, value: Value) -> Result<(), String> {
        let problem = format!("the field `{name}` is given twice");
        match self.0.insert(name, value) {
            None => Ok(()),
            Some(_) => Err(problem),
        }
    }

    pub(crate) fn of(value: Value) -> Result<Fields, ApiError> {
        match value {
            Value::Object(fields) => Ok(Fields(fields)),
            other => Err(ApiError::invalid(format!(
                "must be an object, not {}",
                shown(&other)
            ))),
        }
    }

    pub(crate) fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else {
            return Ok(None);
        };
        let read = read(&value).map(Some);
        read.ok_or_else(|| wrong_type(name, expected, &value))
    }

    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(crate) fn number(&mut self, name: &str) -> Result<Option<f64>, ApiError> {
        self.typed(name, "a number", Value::as_f64)
    }

    pub(crate) fn count(&mut self, name: &str) -> Result<Option<u32>, ApiError> {
        let whole = |value: &Value| value.as_u64().and_then(|n| u32::try_from(n).ok());
        self.typed(name, "a whole number of at least 0", whole)
    }

    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        let text = |value: &Value| value.as_str().map(str::to_owned);
        self.typed(name, "a text", text)
    }

    pub(crate) fn required_text(&mut self, name: &str) -> Result<String, ApiError> {
        self.text(name)?.ok_or_else(|| missing(name))
    }

    pub(crate) fn list(&mut self, name: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(wrong_type(name, "a list", &other)),
        }
    }

    pub(crate) fn map(&mut self, name: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(wrong_type(name, "an object", &other)),
        }
    }

    /// One string or a list of strings.
    pub(crate) fn texts(&mut self, name: &str) -> Result<Vec<String>, ApiError> {
        let texts = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(items) => items
                .iter()
                .map(|item| item.as_str().map(str::to_owned))
                .collect(),
            _ => None,
        };
        let texts = self.typed(name, "a text or a list of texts", texts)?;
        Ok(texts.unwrap_or_default())
    }

    /// Refuses every remaining field that could change the answer, according to `is_neutral(name, value)`.
    pub(crate) fn end(self, is_neutral: impl Fn(&str, &Value) -> bool) -> Result<(), ApiError> {
        let mut left = self.0.iter();
        match left.find(|(name, value)| !value.is_null() && !is_neutral(name, value)) {
            None => Ok(()),
            Some((name, value)) => Err(unsupported(name, value)),
        }
    }
}

fn wrong_type(name: &str, expected: &str, value: &Value) -> ApiError {
    ApiError::invalid(format!("{name} must be {expected}, not {}", shown(value))).param(name)
}

pub(crate) fn missing(name: &str) -> ApiError {
    ApiError::invalid(format!("{name} is missing")).param(name)
}

/// Adds the `path` of a part of the request to its error.
pub(crate) fn within(path: &str, error: ApiError) -> ApiError {
    let separator = match error.param {
        Some(_) => '.',
        None => ' ',
    };
    let param = match &error.param {
        Some(param) => format!("{path}.{param}"),
        None => path.to_owned(),
    };
    ApiError {
        message: format!("{path}{separator}{}", error.message),
        ..error
    }
    .param(param)
}

/// Adds the `path` of a part of the request to the error of reading it.
pub(crate) fn at<T>(path: &str, result: Result<T, ApiError>) -> Result<T, ApiError> {
    result.map_err(|error| within(path, error))
}

/// The refusal of a field that is not supported.
pub(crate) fn unsupported(name: &str, value: &Value) -> ApiError {
    let message = format!("{name} = {} is not supported here; omit it", shown(value));
    ApiError::invalid(message)
        .param(name)
        .code("unsupported_parameter")
}

/// The beginning of a value: a client may have sent a long one.
pub(crate) fn shown(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(80) {
        None => text,
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields(value.as_object().cloned().unwrap_or_default())
    }

    #[test]
    fn a_wrong_type_names_field_and_value() {
        let error = fields(json!({"stream": "yes"}))
            .flag("stream")
            .expect_err("is refused");
        assert_eq!(error.param.as_deref(), Some("stream"));
        assert!(error.message.contains("\"yes\""), "{}", error.message);
        assert!(fields(json!({"n": -1})).count("n").is_err());
        assert!(fields(json!({"n": 1.5})).count("n").is_err());
        assert!(fields(json!({"stop": [1]})).texts("stop").is_err());
    }

    #[test]
    fn what_is_left_is_refused_by_name() {
        let mut some = fields(json!({"user": "u", "n": null, "mystery": "é".repeat(200)}));
        assert_eq!(some.count("n").expect("null is absent"), None);
        let error = some.end(|name, _| name == "user").expect_err("is refused");
        assert_eq!(error.param.as_deref(), Some("mystery"));
        assert!(error.message.len() < 400);
    }
}
