//! `json.dumps`, byte for byte: chat templates were written and trained against Python's output.

use serde_json::Value;

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

/// `json.dumps(value, ensure_ascii=.., indent=.., separators=.., sort_keys=..)`.
pub fn dumps(value: &Value, options: &DumpOptions) -> String {
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
    writer.value(value, 0);
    writer.out
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) {
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(flag) => self.out.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => self.number(number),
            Value::String(text) => self.string(text),
            Value::Array(items) if items.is_empty() => self.out.push_str("[]"),
            Value::Array(items) => {
                self.out.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.separate(index, depth + 1);
                    self.value(item, depth + 1);
                }
                self.new_line(depth);
                self.out.push(']');
            }
            Value::Object(map) if map.is_empty() => self.out.push_str("{}"),
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.options.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.out.push('{');
                for (index, (key, item)) in entries.into_iter().enumerate() {
                    self.separate(index, depth + 1);
                    self.string(key);
                    self.out.push_str(self.key_separator);
                    self.value(item, depth + 1);
                }
                self.new_line(depth);
                self.out.push('}');
            }
        }
    }

    fn separate(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(self.item_separator);
        }
        self.new_line(depth);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.options.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn number(&mut self, number: &serde_json::Number) {
        match number.as_f64() {
            Some(float) if number.is_f64() => self.out.push_str(&python_float(float)),
            _ => self.out.push_str(&number.to_string()),
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for char in text.chars() {
            match char {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                '\0'..'\u{20}' => self.escape(char),
                '\u{7f}'.. if self.options.ensure_ascii => self.escape(char),
                char => self.out.push(char),
            }
        }
        self.out.push('"');
    }

    fn escape(&mut self, char: char) {
        for unit in char.encode_utf16(&mut [0; 2]) {
            self.out.push_str(&format!("\\u{unit:04x}"));
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
    use serde_json::json;

    const PLAIN: DumpOptions = DumpOptions {
        ensure_ascii: false,
        indent: None,
        separators: None,
        sort_keys: false,
    };

    // Expected strings were printed by Python's json.dumps.
    #[test]
    fn writes_what_python_writes() {
        let value = json!({"b": [1, 2.5, 1e-7, 1e16, 1.5e300, -0.0, 100000.0], "a": "é\u{7f}\u{1}\u{1f600}\"\\/\n", "c": {}, "d": []});
        assert_eq!(
            dumps(&value, &PLAIN),
            "{\"b\": [1, 2.5, 1e-07, 1e+16, 1.5e+300, -0.0, 100000.0], \"a\": \"é\u{7f}\\u0001\u{1f600}\\\"\\\\/\\n\", \"c\": {}, \"d\": []}"
        );
        let ascii = DumpOptions {
            ensure_ascii: true,
            sort_keys: true,
            ..PLAIN
        };
        assert_eq!(
            dumps(&json!({"b": "é\u{7f}\u{1f600}", "a": 1}), &ascii),
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
            dumps(&value, &indented),
            "{\n  \"a\": [\n    1,\n    {\n      \"b\": null\n    }\n  ],\n  \"c\": [],\n  \"d\": {}\n}"
        );
        let tight = DumpOptions {
            separators: Some((",".to_owned(), ":".to_owned())),
            ..PLAIN
        };
        assert_eq!(
            dumps(&value, &tight),
            r#"{"a":[1,{"b":null}],"c":[],"d":{}}"#
        );
    }
}
