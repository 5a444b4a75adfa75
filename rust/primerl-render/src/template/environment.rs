//! minijinja set up to behave as the Jinja environment of `transformers` (`chat_template_utils.py`):
//! the same white-space rules, filters and functions, so that templates give the same bytes.

use super::python_json::{DumpOptions, dumps, python_float};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State};
use std::fmt::Write as _;

/// Name under which a rewritten `{% generation %}` block reaches [`generation_span`].
pub(super) const GENERATION_FILTER: &str = "__primerl_generation";
/// Around the text of a generation block, when the caller asked for them (variable [`MARK_GENERATION`]).
pub(crate) const SPAN_START: &str = "\u{f0001}\u{f0a11}\u{f0002}";
pub(crate) const SPAN_END: &str = "\u{f0001}\u{f0b22}\u{f0002}";
pub(super) const MARK_GENERATION: &str = "__primerl_mark_generation";

pub(super) fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, state, value| match as_float(value) {
        Some(float) => Ok(out.write_str(&python_float(float))?),
        None => minijinja::escape_formatter(out, state, value),
    });
    environment.add_filter("string", |value: &Value| {
        as_float(value).map_or_else(|| value.to_string(), python_float)
    });
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_filter(GENERATION_FILTER, generation_span);
    // minijinja calls none iterable; Python does not, and templates guard `tools | length` with this test.
    environment.add_test("iterable", |value: &Value| {
        value.kind() != ValueKind::None && value.try_iter().is_ok()
    });
    environment
}

// minijinja writes 1e-07 as 0.0000001.
fn as_float(value: &Value) -> Option<f64> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    is_float
        .then(|| f64::try_from(value.clone()).ok())
        .flatten()
}

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as `transformers` defines it.
fn tojson(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let value = match positional.get(index) {
            Some(value) => Some(value.clone()),
            None => named.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let options = DumpOptions {
        ensure_ascii: argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true()),
        indent: argument(1, "indent")?.map(indentation).transpose()?,
        separators: argument(2, "separators")?.map(separators).transpose()?,
        sort_keys: argument(3, "sort_keys")?.is_some_and(|value| value.is_true()),
    };
    named.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "an undefined value is not JSON serializable",
        ));
    }
    let value = serde_json::to_value(value).map_err(|error| {
        Error::new(
            ErrorKind::InvalidOperation,
            "the value is not JSON serializable",
        )
        .with_source(error)
    })?;
    Ok(Value::from(dumps(&value, &options)))
}

fn indentation(value: Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => Ok(" ".repeat(usize::try_from(value)?)),
    }
}

fn separators(value: Value) -> Result<(String, String), Error> {
    let pair: Vec<String> = value.try_iter()?.map(|item| item.to_string()).collect();
    <[String; 2]>::try_from(pair)
        .map(|[item, key]| (item, key))
        .map_err(|_| {
            Error::new(
                ErrorKind::InvalidOperation,
                "separators must be two strings",
            )
        })
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let mut text = String::new();
    // `to_string` would panic on a directive that chrono does not know.
    write!(text, "{}", chrono::Local::now().format(format)).map_err(|_| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now cannot format {format:?}"),
        )
    })?;
    Ok(text)
}

fn generation_span(state: &State, body: String) -> String {
    match state.lookup(MARK_GENERATION) {
        Some(mark) if mark.is_true() => format!("{SPAN_START}{body}{SPAN_END}"),
        _ => body,
    }
}
