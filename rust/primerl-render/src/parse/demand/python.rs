//! Strings as Python writes them.

use super::grammar::quoted;
use super::schema::only;
use super::strings::strings;
use serde_json::Value;

/// The quotes, and what a letter between them is. Half of a surrogate pair is no letter.
const PYTHON: [(char, &str); 2] = [('"', r#"[^"\\\n\r]"#), ('\'', r#"[^'\\\n\r]"#)];
const ESCAPE: &str = r#"\\(?:["'\\nrt]|x[0-9a-fA-F]{2}|u(?:[0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}))"#;

/// A terminal of the Python literals of a schema's strings.
pub(super) fn python_string(schema: &Value, root: &Value) -> Result<String, String> {
    let is_plain = only(schema, &["type", "minLength", "maxLength"]).is_ok();
    let inner = match is_plain {
        true => {
            let least = schema["minLength"].as_u64().unwrap_or(0);
            let most = schema["maxLength"]
                .as_u64()
                .map_or(String::new(), |most| most.to_string());
            PYTHON.map(|(_, letter)| format!("/(?:{letter}|{ESCAPE}){{{least},{most}}}/"))
        }
        // Only strings that need no escapes: of others the expression would have to know the escaped text.
        false => {
            let text = strings(schema, root)?.ok_or("it allows no string")?;
            PYTHON.map(|(quote, _)| format!("({text} & /[^{quote}\\\\\\n\\r]*/)"))
        }
    };
    let [double, single] = inner;
    Ok(format!("\"\\\"\" {double} \"\\\"\" | \"'\" {single} \"'\""))
}

/// A Python literal of this text, in either quotes.
pub(super) fn python_text(text: &str) -> String {
    let spelled = PYTHON.map(|(quote, _)| {
        let mut out = String::from(quote);
        for letter in text.chars() {
            match letter {
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\\' => out.push_str("\\\\"),
                letter if letter == quote => out.extend(['\\', letter]),
                letter => out.push(letter),
            }
        }
        out.push(quote);
        quoted(&out)
    });
    format!("({})", spelled.join(" | "))
}
