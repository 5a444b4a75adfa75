//! Filters and tests whose results in minijinja are not those of Jinja2 on Python's values.

use super::arguments::{Arguments, invalid};
use super::python_json::{DumpOptions, dumps};
use super::python_text::{is_lower, is_space, is_upper, lines, replaced, title_words};
use super::python_value::{as_float, is_container, python_str};
use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Environment, Error};

pub(super) fn add(environment: &mut Environment<'static>) {
    environment.add_filter("string", python_str);
    environment.add_filter("tojson", tojson);
    environment.add_filter("join", join);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("trim", trim);
    environment.add_filter("title", |value: &Value| title_words(&python_str(value)));
    environment.add_filter("replace", replace);
    environment.add_filter("indent", indent);
    for name in ["escape", "e", "forceescape"] {
        environment.add_filter(name, escape);
    }
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("round", round);
    // Python's bool is a number, its texts and dictionaries have `__getitem__`, and `None` cannot be iterated.
    // Templates guard `tools | length` and `content[0]` with these tests.
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || as_float(value).is_some()
    });
    environment.add_test("float", |value: &Value| as_float(value).is_some());
    environment.add_test("iterable", |value: &Value| {
        value.kind() != ValueKind::None && value.try_iter().is_ok()
    });
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::String | ValueKind::Undefined) || is_container(value)
    });
    environment.add_test("callable", |value: &Value| {
        value.kind() == ValueKind::Plain && as_float(value).is_none()
    });
    environment.add_test("lower", |value: &Value| is_lower(&python_str(value)));
    environment.add_test("upper", |value: &Value| is_upper(&python_str(value)));
    for unknown_to_jinja in ["startingwith", "endingwith"] {
        environment.remove_test(unknown_to_jinja);
    }
}

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`, as `transformers` defines it.
fn tojson(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let arguments = Arguments::new(positional, named);
    let options = DumpOptions {
        ensure_ascii: arguments.flag(0, "ensure_ascii")?,
        indent: arguments.get(1, "indent")?.map(indentation).transpose()?,
        separators: arguments
            .get(2, "separators")?
            .map(separators)
            .transpose()?,
        sort_keys: arguments.flag(3, "sort_keys")?,
    };
    arguments.at_most(4)?;
    dumps(value, &options)
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
        .map_err(|_| invalid("separators must be two strings"))
}

fn join(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let arguments = Arguments::new(positional, named);
    let separator = arguments.text(0, "d")?.unwrap_or_default();
    let attribute = arguments.text(1, "attribute")?;
    arguments.at_most(2)?;
    let item_text = |item: Value| match &attribute {
        Some(name) => item.get_attr(name).map(|value| python_str(&value)),
        None => Ok(python_str(&item)),
    };
    let texts = value
        .try_iter()?
        .map(item_text)
        .collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join(&separator))
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.len() {
        Some(length) => Ok(length),
        None if value.is_undefined() => Ok(0),
        None => Err(invalid(format!(
            "a value of type {} has no length",
            value.kind()
        ))),
    }
}

fn trim(value: &Value, chars: Option<&str>) -> String {
    let text = python_str(value);
    match chars {
        Some(chars) => text.trim_matches(|char| chars.contains(char)).to_owned(),
        None => text.trim_matches(is_space).to_owned(),
    }
}

fn replace(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    replaced(&python_str(value), &Arguments::new(positional, named))
}

/// `indent(width=4, first=False, blank=False)`.
fn indent(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let arguments = Arguments::new(positional, named);
    let width = arguments.get(0, "width")?.map(indentation).transpose()?;
    let width = width.unwrap_or_else(|| " ".repeat(4));
    let (first, blank) = (arguments.flag(1, "first")?, arguments.flag(2, "blank")?);
    arguments.at_most(3)?;
    // A last line that is empty counts.
    let text = python_str(value) + "\n";
    let mut out = String::with_capacity(text.len() * 2);
    for (index, line) in lines(&text, false).into_iter().enumerate() {
        if index > 0 {
            out.push('\n');
        }
        if (index == 0 && first) || (index > 0 && (blank || !line.is_empty())) {
            out.push_str(&width);
        }
        out.push_str(line);
    }
    Ok(out)
}

// As markupsafe escapes.
fn escape(value: &Value) -> String {
    let mut out = String::new();
    for char in python_str(value).chars() {
        match char {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            char => out.push(char),
        }
    }
    out
}

/// `int(default=0, base=10)`: what is no number becomes the default.
fn int(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let arguments = Arguments::new(positional, named);
    let default = arguments
        .get(0, "default")?
        .unwrap_or_else(|| Value::from(0));
    let base = arguments.integer(1, "base")?.unwrap_or(10);
    arguments.at_most(2)?;
    let base = u32::try_from(base).unwrap_or(10).clamp(2, 36);
    let number = match value.as_str() {
        Some(text) => i128::from_str_radix(text.trim_matches(is_space), base)
            .ok()
            .map(Value::from)
            .or_else(|| truncated(parse_float(text)?)),
        None => match as_float(value) {
            Some(float) => truncated(float),
            None if value.kind() == ValueKind::Bool => {
                Some(Value::from(i64::from(value.is_true())))
            }
            None => value.is_integer().then(|| value.clone()),
        },
    };
    Ok(number.unwrap_or(default))
}

fn truncated(float: f64) -> Option<Value> {
    float.is_finite().then(|| Value::from(float as i128))
}

fn parse_float(text: &str) -> Option<f64> {
    text.trim_matches(is_space).parse().ok()
}

/// `float(default=0.0)`: what is no number becomes the default.
fn float(value: &Value, default: Option<f64>) -> f64 {
    let number = match value.as_str() {
        Some(text) => parse_float(text),
        None if value.kind() == ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        None => as_float(value).or_else(|| f64::try_from(value.clone()).ok()),
    };
    number.unwrap_or(default.unwrap_or(0.0))
}

/// `round(precision=0, method='common')`. Python rounds the exact binary value, halves to the even neighbour.
fn round(value: &Value, positional: Rest<Value>, named: Kwargs) -> Result<Value, Error> {
    let arguments = Arguments::new(positional, named);
    let precision = arguments.integer(0, "precision")?.unwrap_or(0);
    let method = arguments.text(1, "method")?;
    arguments.at_most(2)?;
    let precision = i32::try_from(precision)
        .ok()
        .filter(|precision| precision.abs() <= 300)
        .ok_or_else(|| invalid("round cannot take so large a precision"))?;
    let number = f64::try_from(value.clone())?;
    let scale = 10f64.powi(precision);
    let rounded = match method.as_deref() {
        None | Some("common") if precision < 0 => (number * scale).round_ties_even() / scale,
        None | Some("common") => {
            let digits = usize::try_from(precision).unwrap_or_default();
            format!("{number:.digits$}").parse().unwrap_or(number)
        }
        Some("ceil") => (number * scale).ceil() / scale,
        Some("floor") => (number * scale).floor() / scale,
        Some(_) => return Err(invalid("method must be common, ceil or floor")),
    };
    // Python's round keeps integers.
    if value.is_integer() && !matches!(method.as_deref(), Some("ceil" | "floor")) {
        return Ok(Value::from(rounded as i64));
    }
    Ok(Value::from(rounded))
}
