//! Methods of Python's `str` that minijinja's Python compatibility lacks or answers differently: white space as Python
//! counts it, positions in characters, arguments by name.

use super::arguments::{Arguments, invalid};
use super::python_value::{list, python_str};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, State};

/// Methods of templates on values: these first, then minijinja's.
pub(super) fn call_method(
    state: &State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if method == REVERSED {
        return reversed(value);
    }
    if let (ValueKind::String, Some(text)) = (value.kind(), value.as_str())
        && let Some(result) = text_method(text, method, args)?
    {
        return Ok(result);
    }
    match (value.kind(), method) {
        (ValueKind::Map | ValueKind::Seq, "copy") if args.is_empty() => Ok(value.clone()),
        (ValueKind::Seq, "index") => list_index(value, args),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// Method that `[::-1]` is rewritten to: minijinja's own panics on what is empty.
pub(super) const REVERSED: &str = "__primerl_reversed";

fn reversed(value: &Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        return Ok(Value::from(text.chars().rev().collect::<String>()));
    }
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => {
            let mut items: Vec<Value> = value.try_iter()?.collect();
            items.reverse();
            Ok(list(items))
        }
        kind => Err(invalid(format!("a value of type {kind} cannot be sliced"))),
    }
}

/// `str.isspace` of one character.
pub(super) fn is_space(char: char) -> bool {
    char.is_whitespace() || matches!(char, '\u{1c}'..='\u{1f}')
}

pub(super) fn is_lower(text: &str) -> bool {
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

pub(super) fn is_upper(text: &str) -> bool {
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

/// Jinja's `title` filter: words begin after white space, hyphens and opening brackets.
pub(super) fn title_words(text: &str) -> String {
    capitalised(text, |before| {
        is_space(before) || matches!(before, '-' | '(' | '{' | '[' | '<')
    })
}

// Upper case after a character that `starts` a word and at the start, lower case elsewhere.
fn capitalised(text: &str, starts: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    let mut before = None;
    for char in text.chars() {
        if before.is_none_or(&starts) {
            out.extend(char.to_uppercase());
        } else {
            out.extend(char.to_lowercase());
        }
        before = Some(char);
    }
    out
}

fn text_method(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let arguments = || Arguments::of_method(args);
    let known = match method {
        "strip" | "lstrip" | "rstrip" => strip(text, method, &arguments()?)?,
        "split" | "rsplit" => split(text, method == "rsplit", &arguments()?)?,
        "splitlines" => split_lines(text, &arguments()?)?,
        "partition" | "rpartition" => partition(text, method == "rpartition", &arguments()?)?,
        "find" | "rfind" | "index" | "rindex" => find(text, method, &arguments()?)?,
        "removeprefix" | "removesuffix" => without_affix(text, method, &arguments()?)?,
        "join" => {
            let items = arguments()?.get(0, "iterable")?.unwrap_or_default();
            Value::from(joined(text, &items)?)
        }
        "replace" => replaced(text, &arguments()?)?,
        "ljust" | "rjust" | "center" => justified(text, method, &arguments()?)?,
        "zfill" => {
            let width = arguments()?.integer(0, "width")?.unwrap_or_default();
            zero_filled(text, width)
        }
        "title" => Value::from(capitalised(text, |before| !before.is_alphabetic())),
        "swapcase" => Value::from(swapped_case(text)),
        // minijinja's own never ends on the empty text.
        "count" => {
            let part = required(&arguments()?, 0, "sub")?;
            Value::from(text.matches(&part).count())
        }
        "islower" => Value::from(is_lower(text)),
        "isupper" => Value::from(is_upper(text)),
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        // Python answers false for the empty text.
        "isdigit" | "isnumeric" | "isalnum" | "isalpha" if text.is_empty() => Value::from(false),
        _ => return Ok(None),
    };
    Ok(Some(known))
}

fn required(arguments: &Arguments, index: usize, name: &str) -> Result<String, Error> {
    let text = arguments.text(index, name)?;
    text.ok_or_else(|| invalid(format!("{name} must be a text")))
}

fn without_affix(text: &str, method: &str, arguments: &Arguments) -> Result<Value, Error> {
    let affix = required(arguments, 0, "affix")?;
    let rest = match method {
        "removeprefix" => text.strip_prefix(&affix),
        _ => text.strip_suffix(&affix),
    };
    Ok(Value::from(rest.unwrap_or(text)))
}

fn swapped_case(text: &str) -> String {
    let swap = |char: char| match char.is_uppercase() {
        true => char.to_lowercase().collect::<String>(),
        false => char.to_uppercase().collect(),
    };
    text.chars().map(swap).collect()
}

fn strip(text: &str, method: &str, arguments: &Arguments) -> Result<Value, Error> {
    let chars = arguments.text(0, "chars")?;
    let stripped = |char: char| match &chars {
        Some(chars) => chars.contains(char),
        None => is_space(char),
    };
    arguments.at_most(1)?;
    Ok(Value::from(match method {
        "strip" => text.trim_matches(stripped),
        "lstrip" => text.trim_start_matches(stripped),
        _ => text.trim_end_matches(stripped),
    }))
}

fn texts<'a>(items: impl IntoIterator<Item = &'a str>) -> Value {
    list(items.into_iter().map(Value::from).collect())
}

fn split(text: &str, from_right: bool, arguments: &Arguments) -> Result<Value, Error> {
    let separator = arguments.text(0, "sep")?;
    let most = arguments.integer(1, "maxsplit")?.unwrap_or(-1);
    arguments.at_most(2)?;
    // A negative number: as many as there are.
    let pieces = usize::try_from(most).map_or(usize::MAX, |most| most.saturating_add(1));
    let mut found: Vec<&str> = match separator.as_deref() {
        Some("") => return Err(invalid("empty separator")),
        Some(separator) if from_right => text.rsplitn(pieces, separator).collect(),
        Some(separator) => text.splitn(pieces, separator).collect(),
        None => split_space(text, from_right, pieces),
    };
    if from_right {
        found.reverse();
    }
    Ok(texts(found))
}

// Runs of white space separate; the remainder is trimmed.
fn split_space(text: &str, from_right: bool, pieces: usize) -> Vec<&str> {
    let mut rest = text.trim_matches(is_space);
    let mut found = Vec::new();
    while !rest.is_empty() {
        let cut = if found.len() + 1 >= pieces {
            None
        } else if from_right {
            rest.rfind(is_space)
        } else {
            rest.find(is_space)
        };
        let Some(at) = cut else {
            found.push(rest);
            break;
        };
        let width = rest[at..].chars().next().map_or(1, char::len_utf8);
        if from_right {
            found.push(&rest[at + width..]);
            rest = rest[..at].trim_end_matches(is_space);
        } else {
            found.push(&rest[..at]);
            rest = rest[at + width..].trim_start_matches(is_space);
        }
    }
    found
}

fn split_lines(text: &str, arguments: &Arguments) -> Result<Value, Error> {
    let keep_ends = arguments.flag(0, "keepends")?;
    arguments.at_most(1)?;
    Ok(texts(lines(text, keep_ends)))
}

/// `str.splitlines(keepends)`.
pub(super) fn lines(text: &str, keep_ends: bool) -> Vec<&str> {
    let ends = |char: char| {
        matches!(
            char,
            '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'
                ..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}'
        )
    };
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let at = rest.find(ends).unwrap_or(rest.len());
        let after = match rest[at..].chars().next() {
            Some('\r') if rest[at..].starts_with("\r\n") => at + 2,
            Some(char) => at + char.len_utf8(),
            None => at,
        };
        lines.push(&rest[..if keep_ends { after } else { at }]);
        rest = &rest[after..];
    }
    lines
}

fn partition(text: &str, from_right: bool, arguments: &Arguments) -> Result<Value, Error> {
    let separator = required(arguments, 0, "sep")?;
    let parts = if from_right {
        text.rsplit_once(&separator)
    } else {
        text.split_once(&separator)
    };
    Ok(match parts {
        Some((before, after)) => texts([before, &separator, after]),
        None if from_right => texts(["", "", text]),
        None => texts([text, "", ""]),
    })
}

fn byte_at(text: &str, chars: usize) -> usize {
    let at = text.char_indices().nth(chars);
    at.map_or(text.len(), |(at, _)| at)
}

/// Positions count characters, and so do the optional bounds.
fn find(text: &str, method: &str, arguments: &Arguments) -> Result<Value, Error> {
    let part = required(arguments, 0, "sub")?;
    let length = text.chars().count();
    let bound = |index: Option<i64>, default: usize| match index {
        Some(index @ ..0) => length.saturating_sub(index.unsigned_abs() as usize),
        Some(index) => usize::try_from(index).unwrap_or(length),
        None => default,
    };
    let start = bound(arguments.integer(1, "start")?, 0);
    let end = bound(arguments.integer(2, "end")?, length).min(length);
    arguments.at_most(3)?;
    let found = (start <= end).then(|| {
        let inside = &text[byte_at(text, start)..byte_at(text, end)];
        let at = match method.starts_with('r') {
            true => inside.rfind(&part),
            false => inside.find(&part),
        };
        at.map(|at| start + inside[..at].chars().count())
    });
    match found.flatten() {
        Some(at) => Ok(Value::from(at)),
        None if method.ends_with("index") => Err(invalid("substring not found")),
        None => Ok(Value::from(-1)),
    }
}

fn joined(separator: &str, items: &Value) -> Result<String, Error> {
    let texts = items
        .try_iter()?
        .map(|item| match item.as_str() {
            Some(text) => Ok(text.to_owned()),
            None => Err(invalid(format!(
                "join expects texts, found a value of type {}",
                item.kind()
            ))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join(separator))
}

pub(super) fn replaced(text: &str, arguments: &Arguments) -> Result<Value, Error> {
    let (old, new) = (
        required(arguments, 0, "old")?,
        required(arguments, 1, "new")?,
    );
    let count = arguments.integer(2, "count")?.unwrap_or(-1);
    arguments.at_most(3)?;
    Ok(Value::from(match usize::try_from(count) {
        Ok(count) => text.replacen(&old, &new, count),
        Err(_) => text.replace(&old, &new),
    }))
}

fn justified(text: &str, method: &str, arguments: &Arguments) -> Result<Value, Error> {
    let width = arguments.integer(0, "width")?.unwrap_or_default();
    let fill = arguments
        .text(1, "fillchar")?
        .unwrap_or_else(|| " ".to_owned());
    arguments.at_most(2)?;
    let missing = missing(text, width)?;
    let left = match method {
        "ljust" => 0,
        "rjust" => missing,
        // Where it does not come out even, CPython puts the odd one to the left of an even text.
        _ => missing / 2 + (missing & usize::try_from(width).unwrap_or_default() & 1),
    };
    Ok(Value::from(
        fill.repeat(left) + text + &fill.repeat(missing - left),
    ))
}

fn missing(text: &str, width: i64) -> Result<usize, Error> {
    const WIDEST: usize = 1 << 20;
    let width = usize::try_from(width).unwrap_or_default();
    if width > WIDEST {
        return Err(invalid("the width is too large"));
    }
    Ok(width.saturating_sub(text.chars().count()))
}

fn zero_filled(text: &str, width: i64) -> Value {
    let zeros = "0".repeat(missing(text, width).unwrap_or_default());
    Value::from(match text.strip_prefix(['+', '-']) {
        Some(digits) => format!("{}{zeros}{digits}", &text[..1]),
        None => zeros + text,
    })
}

fn list_index(value: &Value, args: &[Value]) -> Result<Value, Error> {
    let wanted = args.first().cloned().unwrap_or_default();
    match value.try_iter()?.position(|item| item == wanted) {
        Some(at) => Ok(Value::from(at)),
        None => Err(invalid(format!("{} is not in list", python_str(&wanted)))),
    }
}
