//! Chat messages in OpenAI's shape, and the bytes by which two of them are the same.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value};

/// One chat message. Fields this crate does not know are kept in `extra` and handed to the template.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub role: String,
    #[serde(default, skip_serializing_if = "Content::is_absent")]
    pub content: Content,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_calls: Option<Vec<ToolCall>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

/// The content of a message. `Absent` and `Null` differ to templates that ask `content is defined`.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Content {
    #[default]
    Absent,
    Null,
    Text(String),
    /// OpenAI content parts, `{"type": "text", "text": ...}`.
    Parts(Vec<Value>),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    pub function: FunctionCall,
    /// Left-overs of streaming, such as `index`.
    #[serde(flatten)]
    pub extra: Map<String, Value>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FunctionCall {
    pub name: String,
    /// JSON text (OpenAI's wire) or the parsed mapping (what most templates want).
    #[serde(default)]
    pub arguments: Value,
}

impl Message {
    pub fn text(role: &str, content: impl Into<String>) -> Self {
        Self {
            role: role.to_owned(),
            content: Content::Text(content.into()),
            ..Self::default()
        }
    }

    pub fn user(content: impl Into<String>) -> Self {
        Self::text("user", content)
    }

    pub fn assistant(content: impl Into<String>) -> Self {
        Self::text("assistant", content)
    }

    pub fn is_assistant(&self) -> bool {
        self.role == "assistant"
    }

    pub fn has_tool_calls(&self) -> bool {
        self.tool_calls
            .as_ref()
            .is_some_and(|calls| !calls.is_empty())
    }
}

impl Content {
    pub fn is_absent(&self) -> bool {
        matches!(self, Content::Absent)
    }

    /// The text of this content: empty when absent or null, text parts joined by newlines (as vLLM's chat
    /// endpoint joins them). `Err` is the type of the first part that is not text.
    pub fn joined(&self) -> Result<std::borrow::Cow<'_, str>, String> {
        match self {
            Content::Absent | Content::Null => Ok("".into()),
            Content::Text(text) => Ok(text.as_str().into()),
            Content::Parts(parts) => {
                let texts = parts.iter().map(part_text).collect::<Result<Vec<_>, _>>()?;
                Ok(texts.join("\n").into())
            }
        }
    }
}

fn part_text(part: &Value) -> Result<&str, String> {
    let kind = match part {
        Value::String(text) => return Ok(text),
        part => part
            .get("type")
            .and_then(Value::as_str)
            .unwrap_or("unknown"),
    };
    match part.get("text").and_then(Value::as_str) {
        Some(text) if matches!(kind, "text" | "input_text" | "output_text") => Ok(text),
        _ => Err(kind.to_owned()),
    }
}

impl Serialize for Content {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Content::Absent | Content::Null => serializer.serialize_none(),
            Content::Text(text) => serializer.serialize_str(text),
            Content::Parts(parts) => parts.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Wire {
            Text(String),
            Parts(Vec<Value>),
        }
        Ok(
            match Option::<Wire>::deserialize(deserializer).map_err(|_| {
                serde::de::Error::custom(
                    "content must be a string, null, or a list of content parts",
                )
            })? {
                None => Content::Null,
                Some(Wire::Text(text)) => Content::Text(text),
                Some(Wire::Parts(parts)) => Content::Parts(parts),
            },
        )
    }
}

/// Bytes that are equal exactly when two messages mean the same to a conversation:
/// absent, null and empty content are equal, text parts equal their joined text, tool arguments compare as
/// JSON values (not as text), and `tool_calls[].index` does not count. Unknown fields count, except on an
/// assistant message: SDKs add theirs to our answers when they send them back.
pub fn canonical(message: &Message) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    field(&mut out, b'r', message.role.as_bytes());
    match message.content.joined() {
        Ok(text) if text.is_empty() => {}
        Ok(text) => field(&mut out, b'c', text.as_bytes()),
        Err(_) => {
            let content = canonical_json(&serde_json::json!(message.content));
            field(&mut out, b'C', content.as_bytes());
        }
    }
    let reasoning = message.reasoning_content.as_deref();
    optional(&mut out, b't', reasoning.filter(|text| !text.is_empty()));
    for call in message.tool_calls.iter().flatten() {
        let arguments = canonical_arguments(&call.function.arguments);
        optional(&mut out, b'i', call.id.as_deref());
        field(&mut out, b'f', call.function.name.as_bytes());
        field(&mut out, b'a', arguments.as_bytes());
    }
    optional(&mut out, b'I', message.tool_call_id.as_deref());
    optional(&mut out, b'n', message.name.as_deref());
    if let Some(extra) = canonical_extra(message) {
        field(&mut out, b'x', extra.as_bytes());
    }
    out
}

/// Unknown fields of a message that we did not write.
fn canonical_extra(message: &Message) -> Option<String> {
    if message.is_assistant() {
        return None;
    }
    let extra = message.extra.iter();
    let given: Map<_, _> = extra
        .filter(|(_, value)| !value.is_null())
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    (!given.is_empty()).then(|| canonical_json(&Value::Object(given)))
}

/// What an assistant message says and does, in bytes that survive the ways in which clients send our answers back: white
/// space of the content does not count, nor do reasoning (see [`reasoning_words`]), call ids and the spelling of tool
/// arguments; a number there counts by its value (2 is 2.0), since languages without whole numbers write all alike.
pub fn answer_words(message: &Message) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    match message.content.joined() {
        Ok(text) => field(&mut out, b'c', words(split_thinking(&text).1).as_bytes()),
        Err(_) => field(
            &mut out,
            b'C',
            canonical_json(&serde_json::json!(message.content)).as_bytes(),
        ),
    }
    for call in message.tool_calls.iter().flatten() {
        field(&mut out, b'f', call.function.name.as_bytes());
        let arguments = arguments_by_value(&call.function.arguments);
        field(&mut out, b'a', arguments.as_bytes());
    }
    out
}

/// The reasoning of an assistant message, white space evened out; `None` where it has none. It is looked for in
/// `reasoning_content`, in `reasoning` and `reasoning_details` (other servers' names, which SDKs send back), and in
/// `<think>` at the beginning of the content.
pub fn reasoning_words(message: &Message) -> Option<String> {
    let named = |name: &str| message.extra.get(name)?.as_str().map(str::to_owned);
    let details = || {
        let details = message.extra.get("reasoning_details")?.as_array()?;
        let texts = details
            .iter()
            .filter_map(|detail| detail.get("text")?.as_str());
        Some(texts.collect::<Vec<_>>().join(" "))
    };
    let inline = || {
        let text = message.content.joined().ok()?;
        split_thinking(&text).0.map(str::to_owned)
    };
    let reasoning = message
        .reasoning_content
        .clone()
        .filter(|text| !text.is_empty())
        .or_else(|| named("reasoning"))
        .or_else(details)
        .or_else(inline)?;
    Some(words(&reasoning)).filter(|text| !text.is_empty())
}

/// Thinking written into the content, and what follows it. The opening mark may have been part of the prompt.
fn split_thinking(text: &str) -> (Option<&str>, &str) {
    match text.split_once("</think>") {
        Some((before, after)) => {
            let opened = before.trim_start().strip_prefix("<think>");
            (Some(opened.unwrap_or(before)), after)
        }
        None => (None, text),
    }
}

fn words(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split(is_white_space).filter(|word| !word.is_empty()) {
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

/// What clients strip: Unicode's white space, Python's (`str.strip` takes the information separators too) and
/// JavaScript's (`trim` takes the byte order mark too).
fn is_white_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\u{1c}'..='\u{1f}' | '\u{feff}')
}

/// Canonical bytes of a list of tools or of template arguments (any JSON): keys sorted, no white space.
pub fn canonical_json(value: &Value) -> String {
    let mut out = String::new();
    write_canonical(value, &mut out);
    out
}

fn canonical_arguments(arguments: &Value) -> String {
    match arguments {
        Value::String(text) => match serde_json::from_str::<Value>(text) {
            Ok(value) => canonical_json(&value),
            Err(_) => format!("raw {text}"),
        },
        value => canonical_json(value),
    }
}

fn arguments_by_value(arguments: &Value) -> String {
    let read = match arguments {
        Value::String(text) => serde_json::from_str(text),
        value => Ok(value.clone()),
    };
    match read {
        Ok(mut value) => {
            write_whole_numbers_alike(&mut value);
            canonical_json(&value)
        }
        Err(_) => canonical_arguments(arguments),
    }
}

/// As clients hold them whose numbers are all floating-point (JavaScript's).
fn write_whole_numbers_alike(value: &mut Value) {
    /// Below, every whole number is one floating-point number; above, several are the same one.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    match value {
        Value::Array(items) => items.iter_mut().for_each(write_whole_numbers_alike),
        Value::Object(map) => map.values_mut().for_each(write_whole_numbers_alike),
        Value::Number(number) if number.is_f64() => {
            let whole = |number: &f64| number.fract() == 0.0 && number.abs() < EXACT;
            if let Some(whole) = number.as_f64().filter(whole) {
                *value = (whole as i64).into();
            }
        }
        Value::Number(number) => {
            if let Some(rounded) = number.as_f64().filter(|number| number.abs() >= EXACT) {
                *value = rounded.into();
            }
        }
        _ => {}
    }
}

// Length-prefixed, so that no content can imitate another field.
fn field(out: &mut Vec<u8>, tag: u8, bytes: &[u8]) {
    out.push(tag);
    out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn optional(out: &mut Vec<u8>, tag: u8, text: Option<&str>) {
    if let Some(text) = text {
        field(out, tag, text.as_bytes());
    }
}

fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                if index > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        Value::Object(map) => write_sorted(map, out),
        scalar => out.push_str(&scalar.to_string()),
    }
}

fn write_sorted(map: &Map<String, Value>, out: &mut String) {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_unstable_by_key(|(key, _)| *key);
    out.push('{');
    for (index, (key, item)) in entries.into_iter().enumerate() {
        if index > 0 {
            out.push(',');
        }
        out.push_str(&Value::String(key.clone()).to_string());
        out.push(':');
        write_canonical(item, out);
    }
    out.push('}');
}
