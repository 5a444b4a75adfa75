//! JSON written by a model, and the text of its members.

use super::CallProblem;
use super::protocol::Call;
use serde::de::IgnoredAny;

/// Deeper values are refused here, as the programs that read them do (serde_json: 127, Python: about 1,000).
const MAX_DEPTH: usize = 100;

/// How deep the containers of valid JSON are nested.
fn depth(text: &str) -> usize {
    let (mut depth, mut deepest) = (0usize, 0);
    let (mut in_string, mut is_escaped) = (false, false);
    for byte in text.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Whether `text` is JSON.
pub(super) fn check(text: &str) -> Result<(), CallProblem> {
    match serde_json::from_str::<IgnoredAny>(text) {
        Ok(_) if depth(text) > MAX_DEPTH => Err(CallProblem::InvalidJson(format!(
            "nested more than {MAX_DEPTH} deep"
        ))),
        Ok(_) => Ok(()),
        Err(error) => Err(CallProblem::InvalidJson(error.to_string())),
    }
}

/// `text` without white space around it, if it is a JSON object.
pub(super) fn object<'a>(text: &'a str, what: &'static str) -> Result<&'a str, CallProblem> {
    let text = text.trim();
    check(text)?;
    if text.starts_with('{') {
        Ok(text)
    } else {
        Err(CallProblem::NotAnObject(what))
    }
}

/// The members of the object that is a call.
#[derive(Clone, Copy)]
pub(super) struct Keys {
    pub name: &'static str,
    pub arguments: &'static [&'static str],
}

impl Keys {
    /// Some families call the arguments parameters.
    pub const USUAL: Self = Self {
        name: "name",
        arguments: &["arguments", "parameters"],
    };

    /// `{"name": .., "arguments": {..}}`, in any order and with an `id`. The arguments stay as they are written; a call
    /// may have none.
    pub fn call(&self, text: &str) -> Result<Call, CallProblem> {
        let (name, id, arguments) = self.members(text)?;
        let arguments = arguments.unwrap_or("{}");
        if !arguments.starts_with('{') {
            return Err(CallProblem::NotAnObject("value of the arguments"));
        }
        let name = name.ok_or(CallProblem::NoName)?;
        Ok(Call {
            id,
            ..Call::new(&name, arguments.to_owned())?
        })
    }

    /// Whether a JSON object that no marker announces is meant as a call.
    pub fn looks_like_call(&self, text: &str) -> bool {
        self.members(text)
            .is_ok_and(|(name, _, arguments)| name.is_some() && arguments.is_some())
    }

    /// Name, id and the text of the arguments.
    fn members<'a>(&self, text: &'a str) -> Result<CallMembers<'a>, CallProblem> {
        let text = object(text, "call")?;
        let (mut name, mut id, mut arguments) = (None, None, None);
        for (key, value) in members(text) {
            match key.trim_matches('"') {
                key if key == self.name => name = serde_json::from_str::<String>(value).ok(),
                "id" => id = serde_json::from_str::<String>(value).ok(),
                key if self.arguments.contains(&key) => arguments = Some(value),
                _ => {}
            }
        }
        Ok((name, id, arguments))
    }
}

type CallMembers<'a> = (Option<String>, Option<String>, Option<&'a str>);

/// A call whose name is not in the JSON.
pub(super) fn named_call(name: &str, arguments: &str) -> Result<Call, CallProblem> {
    let arguments = object(arguments, "value of the arguments")?;
    Call::new(name, arguments.to_owned())
}

/// Keys (in quotes) and values of a valid JSON object, as they are written.
fn members(object: &str) -> impl Iterator<Item = (&str, &str)> {
    elements(object).filter_map(|member| {
        let key_end = string_end(member)?;
        let value = member[key_end..].trim_start().strip_prefix(':')?;
        Some((&member[..key_end], value.trim()))
    })
}

/// The texts between the commas of a valid JSON object or list, without white space around them.
pub(super) fn elements(container: &str) -> impl Iterator<Item = &str> {
    let inner = container.get(1..container.len().saturating_sub(1));
    let mut rest = inner.unwrap_or_default();
    std::iter::from_fn(move || {
        let end = comma(rest);
        let element = rest[..end].trim();
        rest = rest.get(end + 1..).unwrap_or_default();
        (!element.is_empty()).then_some(element)
    })
}

/// The first comma of `text` outside of brackets and strings, else its length.
fn comma(text: &str) -> usize {
    let (mut depth, mut in_string, mut is_escaped) = (0usize, false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.saturating_sub(1),
            b',' if depth == 0 => return at,
            _ => {}
        }
    }
    text.len()
}

/// The place after the string that `text` begins with.
fn string_end(text: &str) -> Option<usize> {
    let mut is_escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' => is_escaped = true,
            b'"' => return Some(at + 1),
            _ => {}
        }
    }
    None
}
