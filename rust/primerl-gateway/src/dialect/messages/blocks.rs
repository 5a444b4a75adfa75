//! Converts content blocks to chat messages, which templates know.
//!
//! | Anthropic | internal |
//! |---|---|
//! | `system` | a system message first |
//! | blocks of an assistant turn | one assistant message: its answer, however the client cut it |
//! | `tool_result` | a tool message, named by the call it answers |
//! | other text of a user turn | a user message, in its place among the tool messages |
//!
//! Texts of several blocks are joined by a line feed, as the chat dialect joins parts. Those of an answer are joined
//! without separator, because the answer was one text. Consecutive turns of one role are one turn, as in Anthropic's
//! API. Signatures and `redacted_thinking` are for Anthropic's servers: they hold no text for a template and are
//! ignored. The template gets `is_error` as a field of the tool message; the result's text stays as the tool wrote it.

use crate::fields::{Fields, missing, unsupported, within};
use primerl_render::{Content, FunctionCall, Message, ToolCall};
use primerl_service::http::ApiError;
use serde_json::{Map, Value, json};
use std::collections::HashMap;

/// Replaces the arguments of a call that are not a JSON object: `input` must be one.
const RAW_ARGUMENTS: &str = "raw_arguments";

/// The messages of a request.
pub(super) fn read(system: Option<Value>, messages: Vec<Value>) -> Result<Vec<Message>, ApiError> {
    let mut transcript = Transcript::default();
    if let Some(system) = system {
        let text = texts(system).map_err(|error| within("system", error))?;
        // An empty text counts as absent: some templates then add a default.
        if !text.is_empty() {
            transcript.say("system", text);
        }
    }
    for (index, message) in messages.into_iter().enumerate() {
        let path = || format!("messages.{index}");
        let read = transcript.message(message);
        read.map_err(|error| within(&path(), error))?;
    }
    Ok(transcript.messages)
}

#[derive(Default)]
struct Transcript {
    messages: Vec<Message>,
    /// Names of the calls so far, by their ids.
    calls: HashMap<String, String>,
}

impl Transcript {
    fn message(&mut self, message: Value) -> Result<(), ApiError> {
        let mut fields = Fields::of(message)?;
        let role = fields.required_text("role")?;
        let content = fields.take("content").ok_or_else(|| missing("content"))?;
        fields.end(|_, _| false)?;
        match role.as_str() {
            "user" => match content {
                Value::String(text) => self.say("user", text),
                Value::Array(blocks) if blocks.is_empty() => {
                    return Err(ApiError::invalid("content is empty").param("content"));
                }
                blocks => each_block(blocks, |kind, block| self.user_block(kind, block))?,
            },
            "assistant" => self.answer(content)?,
            "system" => {
                let text = texts(content).map_err(|error| within("content", error))?;
                self.say("system", text);
            }
            other => {
                let problem = format!("role is \"{other}\"; it must be user, assistant or system");
                return Err(ApiError::invalid(problem).param("role"));
            }
        }
        Ok(())
    }

    /// Text that the model did not write.
    fn say(&mut self, role: &str, text: String) {
        match self.messages.last_mut() {
            Some(last) if last.role == role => append_text(last, "\n", &text),
            _ => self.messages.push(Message::text(role, text)),
        }
    }

    fn user_block(&mut self, kind: &str, mut block: Fields) -> Result<(), ApiError> {
        match kind {
            "text" => self.say("user", text_of(block)?),
            "tool_result" => {
                let id = block.required_text("tool_use_id")?;
                let Some(name) = self.calls.get(&id) else {
                    let problem = format!("tool_use_id = \"{id}\" refers to no earlier tool_use");
                    return Err(ApiError::invalid(problem).param("tool_use_id"));
                };
                let content = block.take("content").map(texts).transpose();
                let content = content.map_err(|error| within("content", error))?;
                let mut message = Message::text("tool", content.unwrap_or_default());
                message.name = Some(name.clone());
                message.tool_call_id = Some(id);
                if block.flag("is_error")? == Some(true) {
                    message.extra.insert("is_error".into(), true.into());
                }
                block.end(|name, _| name == "cache_control")?;
                self.messages.push(message);
            }
            other => return Err(wrong_block(other, "user")),
        }
        Ok(())
    }

    fn answer(&mut self, content: Value) -> Result<(), ApiError> {
        let before = self.messages.pop_if(|last| last.is_assistant());
        let mut answer = before.unwrap_or_else(|| Message::assistant(""));
        if answer.content == Content::Null {
            answer.content = Content::Text(String::new());
        }
        match content {
            Value::String(text) => append_text(&mut answer, "", &text),
            blocks => each_block(blocks, |kind, block| {
                self.assistant_block(&mut answer, kind, block)
            })?,
        }
        // Like a new answer that consists of calls only.
        if answer.has_tool_calls() && answer.content == Content::Text(String::new()) {
            answer.content = Content::Null;
        }
        self.messages.push(answer);
        Ok(())
    }

    fn assistant_block(
        &mut self,
        answer: &mut Message,
        kind: &str,
        mut block: Fields,
    ) -> Result<(), ApiError> {
        match kind {
            "text" => append_text(answer, "", &text_of(block)?),
            "thinking" => append_thinking(answer, block)?,
            "redacted_thinking" => {
                block.required_text("data")?;
                block.end(|name, _| name == "cache_control")?;
            }
            "tool_use" => {
                let call = tool_call(block)?;
                let id = call.id.clone().unwrap_or_default();
                self.calls.insert(id, call.function.name.clone());
                answer.tool_calls.get_or_insert_default().push(call);
            }
            other => return Err(wrong_block(other, "assistant")),
        }
        Ok(())
    }
}

fn append_thinking(answer: &mut Message, mut block: Fields) -> Result<(), ApiError> {
    let thinking = block.required_text("thinking")?;
    block.text("signature")?;
    block.end(|name, _| name == "cache_control")?;
    if !thinking.is_empty() {
        let reasoning = answer.reasoning_content.get_or_insert_default();
        reasoning.push_str(&thinking);
    }
    Ok(())
}

fn tool_call(mut block: Fields) -> Result<ToolCall, ApiError> {
    let id = block.required_text("id")?;
    let name = block.required_text("name")?;
    let input = block.map("input")?.ok_or_else(|| missing("input"))?;
    block.end(|name, value| match name {
        "cache_control" => true,
        "caller" => value == &json!({"type": "direct"}),
        _ => false,
    })?;
    Ok(ToolCall {
        id: Some(id),
        kind: Some("function".into()),
        function: FunctionCall {
            name,
            arguments: arguments_of(input),
        },
        extra: Map::new(),
    })
}

/// `input` of a `tool_use` block for a call's arguments. Always an object, since clients require one; anything else
/// that the model wrote is wrapped in one, and [`arguments_of`] unwraps it.
pub(super) fn input_of(arguments: &Value) -> Value {
    let parsed = match arguments {
        Value::String(text) => serde_json::from_str(text).ok(),
        value => Some(value.clone()),
    };
    match parsed {
        Some(object @ Value::Object(_)) => object,
        _ => json!({RAW_ARGUMENTS: arguments}),
    }
}

fn arguments_of(mut input: Map<String, Value>) -> Value {
    let is_raw = input.len() == 1;
    match input.get_mut(RAW_ARGUMENTS) {
        Some(raw) if is_raw => raw.take(),
        _ => Value::Object(input),
    }
}

fn append_text(message: &mut Message, separator: &str, text: &str) {
    match &mut message.content {
        Content::Text(before) => {
            if !before.is_empty() && !text.is_empty() {
                before.push_str(separator);
            }
            before.push_str(text);
        }
        content => *content = Content::Text(text.to_owned()),
    }
}

/// A text, or a list of text blocks.
fn texts(content: Value) -> Result<String, ApiError> {
    let blocks = match content {
        Value::String(text) => return Ok(text),
        Value::Array(blocks) => blocks,
        other => return Err(unsupported_shape(&other)),
    };
    let read = |(index, block): (usize, Value)| {
        let text =
            Fields::of(block).and_then(|mut block| match block.required_text("type")?.as_str() {
                "text" => text_of(block),
                other => Err(unsupported("type", &other.into())),
            });
        text.map_err(|error| within(&index.to_string(), error))
    };
    let texts: Result<Vec<String>, ApiError> = blocks.into_iter().enumerate().map(read).collect();
    let mut texts = texts?;
    texts.retain(|text| !text.is_empty());
    Ok(texts.join("\n"))
}

/// The text of a text block.
fn text_of(mut block: Fields) -> Result<String, ApiError> {
    let text = block.required_text("text")?;
    block.end(|name, value| match name {
        "cache_control" => true,
        "citations" => value.as_array().is_some_and(Vec::is_empty),
        _ => false,
    })?;
    Ok(text)
}

fn each_block(
    blocks: Value,
    mut read: impl FnMut(&str, Fields) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    let Value::Array(blocks) = blocks else {
        return Err(within("content", unsupported_shape(&blocks)));
    };
    for (index, block) in blocks.into_iter().enumerate() {
        let one = || {
            let mut block = Fields::of(block)?;
            let kind = block.required_text("type")?;
            read(&kind, block)
        };
        one().map_err(|error| within(&format!("content.{index}"), error))?;
    }
    Ok(())
}

fn unsupported_shape(value: &Value) -> ApiError {
    let kind = match value {
        Value::Object(_) => "an object",
        Value::Number(_) => "a number",
        _ => "neither",
    };
    ApiError::invalid(format!(
        "must be a text or a list of content blocks, not {kind}"
    ))
}

fn wrong_block(kind: &str, role: &str) -> ApiError {
    let problem = format!("type = \"{kind}\" is not supported in {role} messages here");
    ApiError::invalid(problem)
        .param("type")
        .code("unsupported_parameter")
}
