//! `json.dumps`, byte for byte: chat templates were written and trained against Python's output.

use super::python_value::{as_float, float_text, is_container};
use minijinja::value::{Value, ValueKind};
use minijinja::{Error, ErrorKind};
use std::fmt::Write as _;

/// The arguments of `json.dumps` that templates may pass to `tojson`.
#[derive(Clone, Debug)]
pub struct DumpOptions {
    pub ensure_ascii: bool,
    /// Text of one indentation level; `None` writes everything on one line.
    pub indent: Option<String>,
    /// Between items, and between key and value. `None` takes Python's defaults.
    pub separators: Option<(String, String)>,
    pub sort_keys: bool,
}

struct Writer<'a> {
    options: &'a DumpOptions,
    item_separator: &'a str,
    key_separator: &'a str,
    out: String,
}

/// `json.dumps(value, ensure_ascii=.., indent=.., separators=.., sort_keys=..)`. Fails on what is no JSON: undefined
/// values, functions, namespaces.
pub fn dumps(value: &Value, options: &DumpOptions) -> Result<String, Error> {
    let (item_separator, key_separator) = match &options.separators {
        Some((item, key)) => (item.as_str(), key.as_str()),
        None if options.indent.is_some() => (",", ": "),
        None => (", ", ": "),
    };
    let mut writer = Writer {
        options,
        item_separator,
        key_separator,
        out: String::new(),
    };
    writer.value(value, 0)?;
    Ok(writer.out)
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Plain if as_float(value).is_some() => self.number(value),
            ValueKind::Map => self.map(value, depth)?,
            _ if is_container(value) => self.list(value, depth)?,
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("a value of type {kind} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut count = 0;
        for item in value.try_iter()? {
            self.separate(count, depth + 1);
            self.value(&item, depth + 1)?;
            count += 1;
        }
        self.close(']', count, depth);
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut keys: Vec<Value> = value.try_iter()?.collect();
        if self.options.sort_keys {
            keys.sort();
        }
        self.out.push('{');
        for (index, key) in keys.iter().enumerate() {
            self.separate(index, depth + 1);
            match key.as_str() {
                Some(text) => self.string(text),
                // Python writes the keys 1, None and True as the texts "1", "null" and "true".
                None => {
                    self.out.push('"');
                    self.value(key, depth)?;
                    self.out.push('"');
                }
            }
            self.out.push_str(self.key_separator);
            self.value(&value.get_item(key)?, depth + 1)?;
        }
        self.close('}', keys.len(), depth);
        Ok(())
    }

    fn separate(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(self.item_separator);
        }
        self.new_line(depth);
    }

    fn close(&mut self, bracket: char, items: usize, depth: usize) {
        if items > 0 {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.options.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn number(&mut self, value: &Value) {
        match float_text(value) {
            Some(text) => self.out.push_str(&text),
            // Writing to a string cannot fail.
            None => _ = write!(self.out, "{value}"),
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        // Runs of plain characters are copied whole.
        let mut plain = 0;
        for (at, char) in text.char_indices() {
            let escaped = match char {
                '"' => "\\\"",
                '\\' => "\\\\",
                '\n' => "\\n",
                '\r' => "\\r",
                '\t' => "\\t",
                '\u{8}' => "\\b",
                '\u{c}' => "\\f",
                '\0'..'\u{20}' => "",
                '\u{7f}'.. if self.options.ensure_ascii => "",
                _ => continue,
            };
            self.out.push_str(&text[plain..at]);
            plain = at + char.len_utf8();
            if escaped.is_empty() {
                self.escape(char);
            } else {
                self.out.push_str(escaped);
            }
        }
        self.out.push_str(&text[plain..]);
        self.out.push('"');
    }

    fn escape(&mut self, char: char) {
        for unit in char.encode_utf16(&mut [0; 2]) {
            // Writing to a string cannot fail.
            _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

/// Python's `repr(float)`: shortest digits, exponents with a sign and at least two digits.
pub(super) fn python_float(float: f64) -> String {
    let text = format!("{float:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::python_value::from_json;
    use serde_json::{Value as Json, json};

    const PLAIN: DumpOptions = DumpOptions {
        ensure_ascii: false,
        indent: None,
        separators: None,
        sort_keys: false,
    };

    fn text(value: &Json, options: &DumpOptions) -> String {
        dumps(&from_json(value), options).expect("is JSON")
    }

    // Expected strings were printed by Python's json.dumps.
    #[test]
    fn writes_what_python_writes() {
        let value = json!({"b": [1, 2.5, 1e-7, 1e16, 1.5e300, -0.0, 100000.0], "a": "é\u{7f}\u{1}\u{1f600}\"\\/\n", "c": {}, "d": []});
        assert_eq!(
            text(&value, &PLAIN),
            "{\"b\": [1, 2.5, 1e-07, 1e+16, 1.5e+300, -0.0, 100000.0], \"a\": \"é\u{7f}\\u0001\u{1f600}\\\"\\\\/\\n\", \"c\": {}, \"d\": []}"
        );
        let ascii = DumpOptions {
            ensure_ascii: true,
            sort_keys: true,
            ..PLAIN
        };
        assert_eq!(
            text(&json!({"b": "é\u{7f}\u{1f600}", "a": 1}), &ascii),
            r#"{"a": 1, "b": "\u00e9\u007f\ud83d\ude00"}"#
        );
    }

    #[test]
    fn indents_and_separates_as_asked() {
        let value = json!({"a": [1, {"b": null}], "c": [], "d": {}});
        let indented = DumpOptions {
            indent: Some("  ".to_owned()),
            ..PLAIN
        };
        assert_eq!(
            text(&value, &indented),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": null\n    }\n  ],\n  \"c\": [],\n  \"d\": {}\n}"
        );
        let tight = DumpOptions {
            separators: Some((",".to_owned(), ":".to_owned())),
            ..PLAIN
        };
        assert_eq!(
            text(&value, &tight),
            r#"{"a":[1,{"b":null}],"c":[],"d":{}}"#
        );
    }
}
