//! Calls whose arguments are keys and values between markers, as XML has them.

use super::CallProblem;
use super::arguments::{Arguments, ToolTypes};
use super::protocol::Call;

/// What is around each part of a call, within the markers of the call.
pub(super) struct Pairs {
    /// Around name and arguments.
    pub function: [&'static str; 2],
    /// What ends the name; empty where the first key does.
    pub name_end: &'static str,
    pub key: [&'static str; 2],
    /// The first is empty where the value follows the key's marker.
    pub value: [&'static str; 2],
    /// Quotes around names and keys are not part of them.
    pub are_quoted: bool,
    /// The newline at each end of a value is not part of it.
    pub have_line_breaks: bool,
}

impl Pairs {
    /// Reads a call without the markers around it.
    pub fn read(&self, call: &str, types: &ToolTypes) -> Result<Call, CallProblem> {
        let call = call
            .trim()
            .strip_prefix(self.function[0])
            .and_then(|rest| rest.strip_suffix(self.function[1]))
            .ok_or(CallProblem::Structure("no function within the call"))?;
        let (name, rest) = self.name(call)?;
        let mut arguments = Arguments::default();
        each_argument(rest, self.key[0], |pair| {
            let (key, after_key) = split(pair, self.key[1])?;
            let value = match self.value[0] {
                "" => after_key,
                open => after_key
                    .trim_start()
                    .strip_prefix(open)
                    .ok_or(CallProblem::Structure("a key without a value"))?,
            };
            let (value, after_value) = split(value, self.value[1])?;
            let value = match self.have_line_breaks {
                true => without_line_breaks(value),
                false => value,
            };
            arguments.add(types, name, self.unquoted(key), value);
            Ok(after_value)
        })?;
        Call::new(name, arguments.into_json())
    }

    /// The name, and the text after it.
    fn name<'a>(&self, call: &'a str) -> Result<(&'a str, &'a str), CallProblem> {
        if !self.name_end.is_empty() {
            let (name, rest) = split(call, self.name_end)?;
            return Ok((self.unquoted(name), rest));
        }
        let (name, rest) = call.split_at(call.find(self.key[0]).unwrap_or(call.len()));
        let name = self.unquoted(name);
        match name.contains(['<', '\n']) {
            true => Err(CallProblem::Structure("text between name and arguments")),
            false => Ok((name, rest)),
        }
    }

    fn unquoted<'a>(&self, text: &'a str) -> &'a str {
        match self.are_quoted {
            true => text.trim().trim_matches(['"', '\'']),
            false => text.trim(),
        }
    }
}

/// Reads arguments to the end of `rest`. Each begins with `open`; `read` takes what follows, and returns the text after it.
pub(super) fn each_argument<'a>(
    mut rest: &'a str,
    open: &str,
    mut read: impl FnMut(&'a str) -> Result<&'a str, CallProblem>,
) -> Result<(), CallProblem> {
    loop {
        rest = rest.trim_start();
        if rest.is_empty() {
            return Ok(());
        }
        let argument = rest
            .strip_prefix(open)
            .ok_or(CallProblem::Structure("text between the arguments"))?;
        rest = read(argument)?;
    }
}

/// Splits `text` at the first `marker`.
pub(super) fn split<'a>(text: &'a str, marker: &str) -> Result<(&'a str, &'a str), CallProblem> {
    text.split_once(marker).ok_or(CallProblem::Structure(
        "a marker within the call is missing",
    ))
}

/// `text` without the newline that templates write at each end of a value.
fn without_line_breaks(text: &str) -> &str {
    let text = text.strip_prefix('\n').unwrap_or(text);
    text.strip_suffix('\n').unwrap_or(text)
}
