//! Converts the input items of a response to messages.
//!
//! An assistant's turn is one message to the template and to the conversation, but several items here: its reasoning,
//! its text, and each of its calls. Items of one turn are joined again, by the ids that we gave them, or by their order
//! if a client omits the ids.

use super::items::origin;
use crate::fields::{Fields, at};
use primerl_render::{Content, FunctionCall, Message, ToolCall};
use primerl_service::http::ApiError;
use serde_json::{Map, Value};

/// `input`: a text, or items.
pub(super) fn read(input: Value) -> Result<Vec<Message>, ApiError> {
    let items = match input {
        Value::String(text) => return Ok(vec![Message::user(text)]),
        Value::Array(items) => items,
        _ => {
            return Err(ApiError::invalid("input must be a text or a list of items").param("input"));
        }
    };
    let mut messages = Messages::default();
    for (index, item) in items.into_iter().enumerate() {
        at(&format!("input[{index}]"), read_item(item)).map(|item| messages.push(item))?;
    }
    Ok(messages.finish())
}

enum Item {
    Whole(Message),
    /// A part of an assistant's turn, and the answer of ours that it comes from.
    Part(Part, Option<String>),
}

enum Part {
    Reasoning(String),
    Text(String),
    Call(ToolCall),
}

fn read_item(item: Value) -> Result<Item, ApiError> {
    let Value::Object(fields) = item else {
        return Err(ApiError::invalid("must be an object"));
    };
    let mut fields = Fields(fields);
    let kind = fields.text("type")?;
    let from = fields.text("id")?.as_deref().and_then(origin);
    fields.text("status")?;
    let item = match kind.as_deref().unwrap_or("message") {
        "message" => message(&mut fields, from)?,
        "reasoning" => Item::Part(Part::Reasoning(reasoning(&mut fields)?), from),
        "function_call" => Item::Part(Part::Call(call(&mut fields)?), from),
        "function_call_output" => Item::Whole(output(&mut fields)?),
        other => return Err(unknown_item(other)),
    };
    fields.end(|_, _| false)?;
    Ok(item)
}

fn unknown_item(kind: &str) -> ApiError {
    let message = format!(
        "items of type {kind} are not supported here: only message, reasoning, function_call and function_call_output"
    );
    ApiError::invalid(message)
        .param("type")
        .code("unsupported_parameter")
}

fn required<T>(name: &str, value: Option<T>) -> Result<T, ApiError> {
    value.ok_or_else(|| ApiError::invalid(format!("{name} is missing")).param(name))
}

fn message(fields: &mut Fields, from: Option<String>) -> Result<Item, ApiError> {
    let role = required("role", fields.text("role")?)?;
    let content = required("content", fields.take("content"))?;
    let text = texts("content", content, &["input_text", "output_text"])?;
    match role.as_str() {
        "assistant" => Ok(Item::Part(Part::Text(text), from)),
        "user" | "system" => Ok(Item::Whole(Message::text(&role, text))),
        // OpenAI's newer name for the same role; few templates know it, and some ignore unknown roles.
        "developer" => Ok(Item::Whole(Message::text("system", text))),
        other => {
            let message = format!("role is {other}, not user, assistant, system or developer");
            Err(ApiError::invalid(message).param("role"))
        }
    }
}

fn reasoning(fields: &mut Fields) -> Result<String, ApiError> {
    let content = fields.take("content");
    let content = content.map(|content| texts("content", content, &["reasoning_text"]));
    let summary = fields.take("summary");
    let summary = summary.map(|summary| texts("summary", summary, &["summary_text"]));
    let content = content.transpose()?.filter(|text| !text.is_empty());
    // Our items have none; in another model's, it is all that is known of its reasoning.
    Ok(content.or(summary.transpose()?).unwrap_or_default())
}

fn call(fields: &mut Fields) -> Result<ToolCall, ApiError> {
    let direct = |value: &Value| value.get("type").and_then(Value::as_str) == Some("direct");
    if fields.0.get("caller").is_some_and(direct) {
        fields.take("caller");
    }
    Ok(ToolCall {
        id: Some(required("call_id", fields.text("call_id")?)?),
        kind: Some("function".into()),
        function: FunctionCall {
            name: required("name", fields.text("name")?)?,
            arguments: Value::String(required("arguments", fields.text("arguments")?)?),
        },
        extra: Map::new(),
    })
}

fn output(fields: &mut Fields) -> Result<Message, ApiError> {
    let output = required("output", fields.take("output"))?;
    Ok(Message {
        tool_call_id: Some(required("call_id", fields.text("call_id")?)?),
        ..Message::text("tool", texts("output", output, &["input_text"])?)
    })
}

/// A text, or parts of these kinds, joined by line feeds as chat's are.
fn texts(name: &str, value: Value, kinds: &[&str]) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        _ => {
            let message = format!("{name} must be a text or a list of parts");
            return Err(ApiError::invalid(message).param(name));
        }
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.into_iter().enumerate() {
        texts.push(at(&format!("{name}[{index}]"), part_text(part, kinds))?);
    }
    Ok(texts.join("\n"))
}

fn part_text(part: Value, kinds: &[&str]) -> Result<String, ApiError> {
    let Value::Object(fields) = part else {
        return Err(ApiError::invalid("must be an object"));
    };
    let mut fields = Fields(fields);
    let kind = required("type", fields.text("type")?)?;
    if !kinds.contains(&kind.as_str()) {
        let known = kinds.join(" or ");
        let message = format!("parts of type {kind} are not supported here: only {known}");
        return Err(ApiError::invalid(message)
            .param("type")
            .code("unsupported_parameter"));
    }
    let text = required("text", fields.text("text")?)?;
    // The extra fields of our own answers add nothing to the text.
    fields.end(|name, value| match name {
        "logprobs" => true,
        "annotations" => value.as_array().is_some_and(Vec::is_empty),
        _ => false,
    })?;
    Ok(text)
}

#[derive(Default)]
struct Messages {
    done: Vec<Message>,
    turn: Option<Turn>,
}

/// An assistant's turn, as far as its items have been read.
struct Turn {
    from: Option<String>,
    message: Message,
}

impl Messages {
    fn push(&mut self, item: Item) {
        match item {
            Item::Whole(message) => {
                self.close();
                self.done.push(message);
            }
            Item::Part(part, from) => {
                if !self
                    .turn
                    .as_ref()
                    .is_some_and(|turn| turn.goes_on(&part, &from))
                {
                    self.close();
                }
                let turn = self.turn.get_or_insert_with(|| Turn {
                    from: from.clone(),
                    message: Message::assistant(""),
                });
                turn.from = turn.from.take().or(from);
                turn.add(part);
            }
        }
    }

    fn close(&mut self) {
        self.done.extend(self.turn.take().map(Turn::finish));
    }

    fn finish(mut self) -> Vec<Message> {
        self.close();
        self.done
    }
}

impl Turn {
    /// Whether the part belongs to this turn. Reasoning comes first, and text comes once: before the calls in our own
    /// responses, after them if a client lists the calls first. No text can follow a call's output within a turn.
    fn goes_on(&self, part: &Part, from: &Option<String>) -> bool {
        if let (Some(ours), Some(its)) = (&self.from, from) {
            return ours == its;
        }
        let spoke = self.message.content != Content::Text(String::new());
        let called = self.message.has_tool_calls();
        match part {
            Part::Call(_) => true,
            Part::Text(_) => !spoke,
            Part::Reasoning(_) => !spoke && !called,
        }
    }

    fn add(&mut self, part: Part) {
        let message = &mut self.message;
        match (part, &mut message.content) {
            (Part::Reasoning(text), _) => match &mut message.reasoning_content {
                Some(before) => *before = format!("{before}\n{text}"),
                none => *none = Some(text).filter(|text| !text.is_empty()),
            },
            (Part::Text(text), Content::Text(before)) => before.push_str(&text),
            (Part::Text(text), content) => *content = Content::Text(text),
            (Part::Call(call), _) => message.tool_calls.get_or_insert_default().push(call),
        }
    }

    /// As in our answers, a message with only calls has no content.
    fn finish(mut self) -> Message {
        if self.message.has_tool_calls() && self.message.content == Content::Text(String::new()) {
            self.message.content = Content::Null;
        }
        self.message
    }
}
