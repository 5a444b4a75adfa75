//! Python literals as JSON.

use super::arguments::quoted;
use super::{CallProblem, json};

const BAD: CallProblem = CallProblem::Structure("the arguments are not Python literals");
/// Deeper values are refused, so that no answer can overflow the stack.
const MAX_DEPTH: usize = 64;

/// The JSON text of one Python literal (JSON's `true`, `false` and `null` are taken too).
pub(super) fn to_json(text: &str) -> Result<String, CallProblem> {
    let mut reader = Reader::new(text);
    let mut out = String::new();
    reader.value(&mut out, 0)?;
    reader.blank();
    if reader.rest().is_empty() {
        Ok(out)
    } else {
        Err(BAD)
    }
}

/// Reads a text from left to right.
pub(super) struct Reader<'a> {
    text: &'a str,
    pub at: usize,
}

impl<'a> Reader<'a> {
    pub fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    pub fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    pub fn blank(&mut self) {
        self.at += self.rest().len() - self.rest().trim_start().len();
    }

    /// Takes `token` after white space, if it is there.
    pub fn take(&mut self, token: &str) -> bool {
        self.blank();
        let is_there = self.rest().starts_with(token);
        if is_there {
            self.at += token.len();
        }
        is_there
    }

    /// Takes an identifier, possibly with dots; empty where there is none.
    pub fn name(&mut self) -> &'a str {
        self.blank();
        let rest = self.rest();
        let is_part = |letter: char| letter.is_alphanumeric() || matches!(letter, '_' | '.' | '-');
        let length = rest.find(|letter| !is_part(letter)).unwrap_or(rest.len());
        if rest.starts_with(|letter: char| letter.is_numeric() || letter == '-') {
            return "";
        }
        self.at += length;
        &rest[..length]
    }

    pub fn value(&mut self, out: &mut String, depth: usize) -> Result<(), CallProblem> {
        if depth > MAX_DEPTH {
            return Err(BAD);
        }
        self.blank();
        match self.rest().as_bytes().first() {
            Some(b'"' | b'\'') => self.string(out),
            Some(b'[') => self.sequence("]", out, depth),
            Some(b'(') => self.sequence(")", out, depth),
            Some(b'{') => self.mapping(out, depth),
            _ => self.scalar(out),
        }
    }

    fn sequence(&mut self, close: &str, out: &mut String, depth: usize) -> Result<(), CallProblem> {
        self.at += 1;
        out.push('[');
        let mut is_first = true;
        while !self.take(close) {
            if !is_first {
                out.push_str(", ");
            }
            self.value(out, depth + 1)?;
            is_first = false;
            self.separator(close)?;
        }
        out.push(']');
        Ok(())
    }

    fn mapping(&mut self, out: &mut String, depth: usize) -> Result<(), CallProblem> {
        self.at += 1;
        out.push('{');
        let mut is_first = true;
        while !self.take("}") {
            if !is_first {
                out.push_str(", ");
            }
            self.blank();
            if !self.rest().starts_with(['"', '\'']) {
                return Err(BAD);
            }
            self.string(out)?;
            if !self.take(":") {
                return Err(BAD);
            }
            out.push_str(": ");
            self.value(out, depth + 1)?;
            is_first = false;
            self.separator("}")?;
        }
        out.push('}');
        Ok(())
    }

    /// A comma, unless `close` comes next.
    pub fn separator(&mut self, close: &str) -> Result<(), CallProblem> {
        self.blank();
        if self.take(",") || self.rest().starts_with(close) {
            Ok(())
        } else {
            Err(BAD)
        }
    }

    fn scalar(&mut self, out: &mut String) -> Result<(), CallProblem> {
        let rest = self.rest();
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '-' | '.' | '_');
        let length = rest.find(|letter| !is_part(letter)).unwrap_or(rest.len());
        let word = &rest[..length];
        let value = match word {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            word => {
                json::check(word).map_err(|_| BAD)?;
                word
            }
        };
        out.push_str(value);
        self.at += length;
        Ok(())
    }

    fn string(&mut self, out: &mut String) -> Result<(), CallProblem> {
        let rest = self.rest();
        let quote = if rest.starts_with('"') { '"' } else { '\'' };
        let mut value = String::new();
        let mut letters = rest.char_indices().skip(1);
        while let Some((at, letter)) = letters.next() {
            match letter {
                letter if letter == quote => {
                    self.at += at + 1;
                    out.push_str(&quoted(&value));
                    return Ok(());
                }
                '\\' => unescape(&mut letters, &mut value)?,
                letter => value.push(letter),
            }
        }
        Err(BAD)
    }
}

/// Adds what an escape stands for, whose backslash was read.
fn unescape(
    letters: &mut impl Iterator<Item = (usize, char)>,
    value: &mut String,
) -> Result<(), CallProblem> {
    let (_, escape) = letters.next().ok_or(BAD)?;
    match escape {
        'n' => value.push('\n'),
        't' => value.push('\t'),
        'r' => value.push('\r'),
        'x' => value.push(hexadecimal(letters, 2)?),
        'u' => value.push(hexadecimal(letters, 4)?),
        'U' => value.push(hexadecimal(letters, 8)?),
        '\n' => {}
        '\\' | '\'' | '"' => value.push(escape),
        // Python keeps the backslash of an unknown escape.
        other => value.extend(['\\', other]),
    }
    Ok(())
}

fn hexadecimal(
    letters: &mut impl Iterator<Item = (usize, char)>,
    digits: usize,
) -> Result<char, CallProblem> {
    let mut code = 0u32;
    for _ in 0..digits {
        let digit = letters.next().and_then(|(_, letter)| letter.to_digit(16));
        code = code.wrapping_mul(16).wrapping_add(digit.ok_or(BAD)?);
    }
    // Half of a surrogate pair is no character.
    Ok(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER))
}
