//! Items of a response's output, and of the list of its inputs.

use crate::dialect::logprobs::TokenLogprob;
use primerl_render::{Message, ToolCall};
use serde_json::{Value, json};

/// One item of an answer.
#[derive(Clone, Debug)]
pub(crate) struct OutputItem {
    pub id: String,
    pub status: Status,
    pub body: Body,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

#[derive(Clone, Debug)]
pub(crate) enum Body {
    Reasoning(String),
    Text {
        text: String,
        /// Log-probabilities of all tokens of the answer, if the client asked for them.
        logprobs: Option<Vec<TokenLogprob>>,
    },
    Call {
        call_id: String,
        name: String,
        /// JSON text.
        arguments: String,
    },
}

impl Status {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Status::InProgress => "in_progress",
            Status::Completed => "completed",
            Status::Incomplete => "incomplete",
            Status::Failed => "failed",
        }
    }
}

impl Body {
    fn of_call(call: &ToolCall) -> Body {
        let arguments = match &call.function.arguments {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        Body::Call {
            call_id: call.id.clone().unwrap_or_default(),
            name: call.function.name.clone(),
            arguments,
        }
    }
    fn prefix(&self) -> &'static str {
        match self {
            Body::Reasoning(_) => "rs",
            Body::Text { .. } => "msg",
            Body::Call { .. } => "fc",
        }
    }

    /// The item's content part, as far as it is known.
    pub(crate) fn part(&self) -> Option<Value> {
        match self {
            Body::Reasoning(text) => Some(json!({"type": "reasoning_text", "text": text})),
            Body::Text { text, logprobs } => Some(json!({
                "type": "output_text", "text": text, "annotations": [],
                "logprobs": logprobs.as_deref().unwrap_or_default(),
            })),
            Body::Call { .. } => None,
        }
    }
}

impl OutputItem {
    /// The item at this index of the answer `origin`.
    pub(crate) fn new(origin: &str, index: usize, status: Status, body: Body) -> OutputItem {
        OutputItem {
            id: format!("{}_{origin}_{index}", body.prefix()),
            status,
            body,
        }
    }

    /// An item in progress is announced without its content.
    pub(crate) fn json(&self) -> Value {
        let (id, status) = (&self.id, self.status.name());
        let begun = self.status == Status::InProgress;
        let content: Vec<Value> = self.body.part().into_iter().filter(|_| !begun).collect();
        match &self.body {
            Body::Reasoning(_) => {
                json!({"id": id, "type": "reasoning", "summary": [], "content": content,
                "status": status})
            }
            Body::Text { .. } => {
                json!({"id": id, "type": "message", "role": "assistant", "content": content,
                "status": status})
            }
            Body::Call {
                call_id,
                name,
                arguments,
            } => json!({"id": id, "type": "function_call", "call_id": call_id,
                "name": name, "arguments": if begun { "" } else { arguments }, "status": status}),
        }
    }
}

/// The answer to which an item with this id belongs, if it is one of ours.
pub(super) fn origin(id: &str) -> Option<String> {
    let (prefix, rest) = id.split_once('_')?;
    let (origin, index) = rest.rsplit_once('_')?;
    let ours = matches!(prefix, "rs" | "msg" | "fc") && index.parse::<usize>().is_ok();
    ours.then(|| origin.to_owned())
}

/// An assistant's message as items.
pub(super) fn items_of(
    message: &Message,
    origin: &str,
    logprobs: Option<Vec<TokenLogprob>>,
) -> Vec<OutputItem> {
    let mut bodies = Vec::new();
    if let Some(reasoning) = &message.reasoning_content {
        bodies.push(Body::Reasoning(reasoning.clone()));
    }
    let text = message.content.joined().unwrap_or_default().into_owned();
    if !text.is_empty() || (bodies.is_empty() && !message.has_tool_calls()) {
        bodies.push(Body::Text { text, logprobs });
    }
    bodies.extend(message.tool_calls.iter().flatten().map(Body::of_call));
    let item = |(index, body)| OutputItem::new(origin, index, Status::Completed, body);
    bodies.into_iter().enumerate().map(item).collect()
}

/// A message of a request as items; `origin` names it.
pub(super) fn input_items(message: &Message, origin: &str) -> Vec<Value> {
    let text = || message.content.joined().unwrap_or_default();
    match message.role.as_str() {
        "assistant" => {
            let items = items_of(message, origin, None);
            items.iter().map(OutputItem::json).collect()
        }
        "tool" => vec![
            json!({"id": format!("fco_{origin}"), "type": "function_call_output",
            "call_id": message.tool_call_id, "output": text(), "status": "completed"}),
        ],
        role => vec![
            json!({"id": format!("msg_{origin}"), "type": "message", "role": role, "status": "completed",
            "content": [{"type": "input_text", "text": text()}]}),
        ],
    }
}
