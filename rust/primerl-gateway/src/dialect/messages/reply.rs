//! Answers, events and errors in Anthropic's format.

use super::blocks::input_of;
use crate::answer::{Answer, Choice, Events, Head, Reply, Tokens};
use crate::dialect::sse::{append, event};
use crate::text::Delta;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use primerl_core::conversation::message_hash;
use primerl_core::turn::FinishReason;
use primerl_render::{Tokenizer, ToolCall};
use primerl_service::http::{ApiError, JSON};
use serde::Serialize;
use serde_json::{Value, json};

/// The format of the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Form {
    pub stream: bool,
    /// Thinking blocks have their signature only.
    pub omit_thinking: bool,
}

#[derive(Serialize)]
struct Message<'a> {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: &'a str,
    content: Vec<Block<'a>>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<&'a str>,
    usage: Usage,
}

#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Block<'a> {
    Thinking {
        thinking: &'a str,
        signature: &'a str,
    },
    Text {
        text: &'a str,
    },
    ToolUse {
        id: &'a str,
        name: &'a str,
        input: Value,
    },
}

/// Cached tokens are not reported: what the engine reuses is not billed here.
#[derive(Serialize)]
struct Usage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl Usage {
    fn of(head: &Head, output_tokens: usize) -> Usage {
        Usage {
            input_tokens: head.prompt_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: 0,
            output_tokens,
        }
    }
}

fn message<'a>(head: &'a Head, content: Vec<Block<'a>>, choice: Option<&'a Choice>) -> Message<'a> {
    Message {
        id: format!("msg_{}", head.id),
        kind: "message",
        role: "assistant",
        model: &head.model,
        content,
        stop_reason: choice.map(stop_reason),
        stop_sequence: choice.and_then(|choice| choice.stop.as_deref()),
        usage: Usage::of(head, choice.map_or(0, Choice::n_tokens)),
    }
}

fn stop_reason(choice: &Choice) -> &'static str {
    match choice.finish {
        FinishReason::Stop if choice.message.has_tool_calls() => "tool_use",
        FinishReason::Stop => "end_turn",
        FinishReason::StopSequence => "stop_sequence",
        FinishReason::Length | FinishReason::Abort => "max_tokens",
    }
}

/// The signature of a thinking block. It is not checked when it comes back, but clients require one.
fn signature(thinking: &str) -> String {
    format!("{:032x}", message_hash(thinking.as_bytes()))
}

fn blocks<'a>(
    choice: &'a Choice,
    thinking: &'a str,
    signature: &'a str,
    text: &'a str,
) -> Vec<Block<'a>> {
    let thinking = (!signature.is_empty()).then_some(Block::Thinking {
        thinking,
        signature,
    });
    let text = (!text.is_empty()).then_some(Block::Text { text });
    let call = |call: &'a ToolCall| Block::ToolUse {
        id: call.id.as_deref().unwrap_or_default(),
        name: &call.function.name,
        input: input_of(&call.function.arguments),
    };
    let calls = choice.message.tool_calls.iter().flatten().map(call);
    thinking.into_iter().chain(text).chain(calls).collect()
}

impl Reply for Form {
    fn streams(&self) -> bool {
        self.stream
    }

    fn whole(&self, answer: &Answer, _: &Tokenizer) -> Vec<u8> {
        let mut out = Vec::new();
        // Requests ask for one answer.
        let Some(choice) = answer.choices.first() else {
            return out;
        };
        let reasoning = choice.message.reasoning_content.as_deref();
        let reasoning = reasoning.unwrap_or_default();
        let signed = match reasoning.is_empty() {
            true => String::new(),
            false => signature(reasoning),
        };
        let thinking = match self.omit_thinking {
            true => "",
            false => reasoning,
        };
        // Answers are text; parsers never produce parts.
        let text = choice.message.content.joined().unwrap_or_default();
        let content = blocks(choice, thinking, &signed, &text);
        append(&mut out, &message(&answer.head, content, Some(choice)));
        out
    }

    fn events(&self) -> Box<dyn Events> {
        Box::new(BlockEvents {
            form: *self,
            index: 0,
            open: None,
        })
    }
}

/// The block to which deltas are added.
enum Open {
    /// The block's text so far, which will be signed.
    Thinking(String),
    Text,
}

/// Writes the events of one message: its blocks one after the other.
struct BlockEvents {
    form: Form,
    /// Index of the next block, or of the open one.
    index: usize,
    open: Option<Open>,
}

impl BlockEvents {
    fn start(&self, block: &Value, out: &mut Vec<u8>) {
        let data =
            json!({"type": "content_block_start", "index": self.index, "content_block": block});
        event(out, "content_block_start", &data);
    }

    /// Most of a stream is deltas, so their kind and text are written without an intermediate value.
    fn delta(&self, kind: &str, field: &str, text: &str, out: &mut Vec<u8>) {
        out.extend(
            b"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"index\":",
        );
        append(out, &self.index);
        out.extend(format!(",\"delta\":{{\"type\":\"{kind}\",\"{field}\":").as_bytes());
        append(out, text);
        out.extend(b"}}\n\n");
    }

    fn stop(&mut self, out: &mut Vec<u8>) {
        let data = json!({"type": "content_block_stop", "index": self.index});
        event(out, "content_block_stop", &data);
        self.index += 1;
    }

    /// Ends the open block, if there is one.
    fn close(&mut self, out: &mut Vec<u8>) {
        match self.open.take() {
            None => return,
            Some(Open::Text) => {}
            Some(Open::Thinking(thinking)) => {
                self.delta("signature_delta", "signature", &signature(&thinking), out);
            }
        }
        self.stop(out);
    }

    fn thinking(&mut self, text: &str, out: &mut Vec<u8>) {
        if !matches!(self.open, Some(Open::Thinking(_))) {
            self.close(out);
            self.start(
                &json!({"type": "thinking", "thinking": "", "signature": ""}),
                out,
            );
            self.open = Some(Open::Thinking(String::new()));
        }
        if let Some(Open::Thinking(thinking)) = &mut self.open {
            thinking.push_str(text);
        }
        if !self.form.omit_thinking {
            self.delta("thinking_delta", "thinking", text, out);
        }
    }

    fn text(&mut self, text: &str, out: &mut Vec<u8>) {
        if !matches!(self.open, Some(Open::Text)) {
            self.close(out);
            self.start(&json!({"type": "text", "text": ""}), out);
            self.open = Some(Open::Text);
        }
        self.delta("text_delta", "text", text, out);
    }

    fn tool_use(&mut self, id: &str, name: &str, arguments: &str, out: &mut Vec<u8>) {
        self.close(out);
        let block = json!({"type": "tool_use", "id": id, "name": name, "input": {}});
        self.start(&block, out);
        let input = input_of(&Value::String(arguments.to_owned()));
        self.delta("input_json_delta", "partial_json", &input.to_string(), out);
        self.stop(out);
    }
}

impl Events for BlockEvents {
    fn begin(&mut self, head: &Head, out: &mut Vec<u8>) {
        let start = json!({"type": "message_start", "message": message(head, Vec::new(), None)});
        event(out, "message_start", &start);
        event(out, "ping", &json!({"type": "ping"}));
    }

    fn progress(
        &mut self,
        _: usize,
        deltas: &[Delta],
        _: Tokens<'_>,
        _: &Tokenizer,
        out: &mut Vec<u8>,
    ) {
        for delta in deltas {
            match delta {
                Delta::Reasoning(text) => self.thinking(text, out),
                Delta::Content(text) => self.text(text, out),
                Delta::ToolCall {
                    id,
                    name,
                    arguments,
                    ..
                } => self.tool_use(id, name, arguments, out),
            }
        }
    }

    fn end(&mut self, answer: &Answer, out: &mut Vec<u8>) {
        self.close(out);
        let choice = answer.choices.first();
        let stop = choice.and_then(|choice| choice.stop.as_deref());
        let last = json!({
            "type": "message_delta",
            "delta": {"stop_reason": choice.map(stop_reason), "stop_sequence": stop},
            "usage": Usage::of(&answer.head, answer.completion_tokens()),
        });
        event(out, "message_delta", &last);
        event(out, "message_stop", &json!({"type": "message_stop"}));
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        event(out, "error", &envelope(error));
    }
}

/// Anthropic's code for a request that cannot use a thread.
pub(super) const NO_THREADS: &str = "thread_unsupported_request";

/// `code` and `param` are our additions: in Anthropic's format, only the message distinguishes a prompt that is too
/// long from other mistakes. `details` holds the codes that its SDKs act on.
pub(super) fn envelope(error: &ApiError) -> Value {
    let mut details = json!({"type": kind(error), "message": error.message});
    if let Some(code) = error.code {
        details["code"] = code.into();
        if code == NO_THREADS {
            details["details"] = json!({"error_code": code});
        }
    }
    if let Some(param) = &error.param {
        details["param"] = param.as_str().into();
    }
    json!({"type": "error", "error": details})
}

fn kind(error: &ApiError) -> &'static str {
    match error.status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        503 => "overloaded_error",
        500.. => "api_error",
        _ => "invalid_request_error",
    }
}

/// The response from which Anthropic's SDKs make an exception.
pub(crate) fn refusal(error: &ApiError) -> Response {
    let body = envelope(error).to_string();
    (error.status, [(header::CONTENT_TYPE, JSON)], body).into_response()
}
