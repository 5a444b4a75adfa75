//! Arguments of a call as a mapping whose numbers print as they were written: 1.10 stays 1.10, where `json.loads` and
//! `json.dumps` make it 1.1. The model wrote them so, and a history that is rendered again should say what it said.

use super::python_value::{dict, from_json, list, written_float};
use minijinja::value::Value;
use serde_json::{Number, Value as Json};
use std::sync::Arc;

/// What `json.loads` would give for the text of an object, but for how its numbers print; `None` where it is none.
pub(super) fn mapping(text: &str) -> Option<Value> {
    let parsed: Json = serde_json::from_str(text).ok()?;
    let Json::Object(_) = &parsed else {
        return None;
    };
    let mut numbers = numbers(text);
    match value(&parsed, &mut numbers) {
        Some(value) if numbers.next().is_none() => Some(value),
        // A key that is there twice: its numbers are not those of the mapping, in order.
        _ => Some(from_json(&parsed)),
    }
}

fn value<'a>(json: &Json, numbers: &mut impl Iterator<Item = &'a str>) -> Option<Value> {
    Some(match json {
        Json::Number(number) => written(number, numbers.next()?)?,
        Json::Array(items) => {
            let items = items.iter().map(|item| value(item, numbers));
            list(items.collect::<Option<_>>()?)
        }
        Json::Object(map) => {
            let entries = map
                .iter()
                .map(|(key, item)| Some((Arc::from(key.as_str()), value(item, numbers)?)));
            dict(entries.collect::<Option<_>>()?)
        }
        other => from_json(other),
    })
}

fn written(number: &Number, text: &str) -> Option<Value> {
    // Both are read by the same parser.
    let same = serde_json::from_str::<Number>(text).is_ok_and(|read| read == *number);
    let float = number.as_f64()?;
    match same {
        true if number.to_string() == text && !number.is_f64() => {
            Some(from_json(&Json::Number(number.clone())))
        }
        true => Some(written_float(float, text)),
        false => None,
    }
}

/// The numbers of a JSON text, in order.
fn numbers(text: &str) -> impl Iterator<Item = &str> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let bytes = text.as_bytes();
        while let Some(byte) = bytes.get(at) {
            let begin = at;
            match byte {
                b'"' => at = string_end(bytes, at),
                b'-' | b'0'..=b'9' => {
                    let is_part =
                        |byte: &&u8| matches!(byte, b'0'..=b'9' | b'-' | b'+' | b'.' | b'e' | b'E');
                    at += bytes[at..].iter().take_while(is_part).count();
                    return text.get(begin..at);
                }
                _ => at += 1,
            }
        }
        None
    })
}

/// Behind the string that begins at `at`.
fn string_end(bytes: &[u8], mut at: usize) -> usize {
    at += 1;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::python_json::{DumpOptions, dumps};

    fn dumped(text: &str) -> Option<String> {
        let plain = DumpOptions {
            ensure_ascii: false,
            indent: None,
            separators: None,
            sort_keys: false,
        };
        Some(dumps(&mapping(text)?, &plain).expect("is JSON"))
    }

    #[test]
    fn numbers_stay_as_they_were_written() {
        for text in [
            r#"{"a": 1.10, "b": [1e3, {"c": -0}, 1E+2, 0.5], "d": "2.50 \" 3.0", "e": 7}"#,
            r#"{"big": 123456789012345678901234567890, "small": 1e-07, "é": 1.0}"#,
            r#"{"a\"1.0": 2.00}"#,
            "{}",
        ] {
            assert_eq!(dumped(text).as_deref(), Some(text));
        }
        assert_eq!(
            dumped("{\"a\":1.10,\n \"b\":[ 2 ]}").as_deref(),
            Some(r#"{"a": 1.10, "b": [2]}"#),
            "white space is the template's"
        );
    }

    #[test]
    fn a_key_that_is_there_twice_is_read_as_json_reads_it() {
        let twice = r#"{"a": 1.10, "b": 2.0, "a": 3.50}"#;
        assert_eq!(dumped(twice).as_deref(), Some(r#"{"a": 3.5, "b": 2.0}"#));
    }

    #[test]
    fn what_is_no_object_is_none() {
        for text in ["[1.10]", "1.10", "", "{\"a\": 1.10", "nan"] {
            assert!(mapping(text).is_none(), "{text}");
        }
    }
}
