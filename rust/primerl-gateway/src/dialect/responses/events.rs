//! Writes the events of a streamed response.

use super::ResponseReply;
use super::items::{Body, OutputItem, Status};
use super::response::Response;
use crate::answer::{Answer, Events, Head, Tokens};
use crate::dialect::logprobs::{TokenLogprob, token_logprobs};
use crate::dialect::sse::append;
use crate::text::Delta;
use primerl_render::Tokenizer;
use primerl_service::http::ApiError;
use serde_json::{Value, json};
use std::io::Write;

/// At most one item is open, the last; it ends when something else begins.
pub(super) struct ResponseEvents {
    reply: ResponseReply,
    head: Option<Head>,
    sequence_number: u64,
    items: Vec<OutputItem>,
    /// Index of the open call among the answer's calls.
    call: usize,
    /// Log-probabilities of tokens whose text has not been shown yet.
    logprobs: Vec<TokenLogprob>,
}

impl ResponseEvents {
    pub(super) fn new(reply: ResponseReply) -> ResponseEvents {
        ResponseEvents {
            reply,
            head: None,
            sequence_number: 0,
            items: Vec::new(),
            call: 0,
            logprobs: Vec::new(),
        }
    }

    /// The beginning of an event, before its own fields.
    fn open_event(&mut self, kind: &str, out: &mut Vec<u8>) {
        let number = self.sequence_number;
        self.sequence_number += 1;
        // Writing to memory cannot fail.
        let _ = write!(
            out,
            "event: {kind}\ndata: {{\"type\":\"{kind}\",\"sequence_number\":{number}"
        );
    }

    fn event(&mut self, kind: &str, fields: &[(&str, Value)], out: &mut Vec<u8>) {
        self.open_event(kind, out);
        for (name, value) in fields {
            let _ = write!(out, ",\"{name}\":");
            append(out, value);
        }
        out.extend(b"}\n\n");
    }

    /// A piece of the open item's text. Written field by field, because most of a stream consists of these.
    fn delta(&mut self, kind: &str, text: &str, out: &mut Vec<u8>) {
        let index = self.items.len().saturating_sub(1);
        let Some(item) = self.items.last() else {
            return;
        };
        let has_parts = !matches!(item.body, Body::Call { .. });
        let is_text = matches!(item.body, Body::Text { .. });
        let place = format!(",\"item_id\":\"{}\",\"output_index\":{index}", item.id);
        self.open_event(kind, out);
        out.extend(place.as_bytes());
        if has_parts {
            out.extend(b",\"content_index\":0");
        }
        out.extend(b",\"delta\":");
        append(out, text);
        if is_text {
            out.extend(b",\"logprobs\":");
            append(out, &self.logprobs);
        }
        out.extend(b"}\n\n");
    }

    fn response_event(&mut self, kind: &str, response: Value, out: &mut Vec<u8>) {
        self.event(kind, &[("response", response)], out);
    }

    fn add(&mut self, delta: &Delta, out: &mut Vec<u8>) {
        if !self.goes_on(delta) {
            self.close(Status::Completed, out);
            self.open(delta, out);
        }
        match delta {
            Delta::Reasoning(text) => self.delta("response.reasoning_text.delta", text, out),
            Delta::Content(text) => self.delta("response.output_text.delta", text, out),
            Delta::ToolCall { arguments, .. } => {
                self.delta("response.function_call_arguments.delta", arguments, out);
            }
        }
        self.keep(delta);
    }

    /// Adds the delta to the open item. Log-probabilities that are not of its text wait for the next text.
    fn keep(&mut self, delta: &Delta) {
        let pending = std::mem::take(&mut self.logprobs);
        match (self.items.last_mut().map(|item| &mut item.body), delta) {
            (Some(Body::Reasoning(text)), Delta::Reasoning(more)) => {
                text.push_str(more);
                self.logprobs = pending;
            }
            (Some(Body::Text { text, logprobs }), Delta::Content(more)) => {
                text.push_str(more);
                logprobs
                    .iter_mut()
                    .for_each(|all| all.extend_from_slice(&pending));
            }
            (
                Some(Body::Call { arguments, .. }),
                Delta::ToolCall {
                    arguments: more, ..
                },
            ) => {
                arguments.push_str(more);
                self.logprobs = pending;
            }
            _ => self.logprobs = pending,
        }
    }

    /// Whether the delta belongs to the open item.
    fn goes_on(&self, delta: &Delta) -> bool {
        let open = self.items.last();
        let open = open.filter(|item| item.status == Status::InProgress);
        match (open.map(|item| &item.body), delta) {
            (Some(Body::Reasoning(_)), Delta::Reasoning(_)) => true,
            (Some(Body::Text { .. }), Delta::Content(_)) => true,
            (Some(Body::Call { .. }), Delta::ToolCall { index, .. }) => *index == self.call,
            _ => false,
        }
    }

    fn open(&mut self, delta: &Delta, out: &mut Vec<u8>) {
        if let Delta::ToolCall { index, .. } = delta {
            self.call = *index;
        }
        let body = self.empty_body(delta);
        let origin = self
            .head
            .as_ref()
            .map(|head| head.id.clone())
            .unwrap_or_default();
        let index = self.items.len();
        let item = OutputItem::new(&origin, index, Status::InProgress, body);
        let (id, json, part) = (item.id.clone(), item.json(), item.body.part());
        self.items.push(item);
        let added = [("output_index", json!(index)), ("item", json)];
        self.event("response.output_item.added", &added, out);
        if let Some(part) = part {
            let fields = part_fields(&id, index, ("part", part));
            self.event("response.content_part.added", &fields, out);
        }
    }

    /// Body of an item that begins with the delta, still without its text.
    fn empty_body(&self, delta: &Delta) -> Body {
        match delta {
            Delta::Reasoning(_) => Body::Reasoning(String::new()),
            Delta::Content(_) => Body::Text {
                text: String::new(),
                logprobs: self.reply.form.logprobs.then(Vec::new),
            },
            Delta::ToolCall { id, name, .. } => Body::Call {
                call_id: id.clone(),
                name: name.clone(),
                arguments: String::new(),
            },
        }
    }

    /// Ends the open item, if there is one.
    fn close(&mut self, status: Status, out: &mut Vec<u8>) {
        let index = self.items.len().saturating_sub(1);
        let pending = std::mem::take(&mut self.logprobs);
        let open = self.items.last_mut();
        let Some(item) = open.filter(|item| item.status == Status::InProgress) else {
            self.logprobs = pending;
            return;
        };
        match &mut item.body {
            Body::Text {
                logprobs: Some(all),
                ..
            } => all.extend(pending),
            _ => self.logprobs = pending,
        }
        item.status = status;
        let item = item.clone();
        self.done(&item, index, out);
        let done = [("output_index", json!(index)), ("item", item.json())];
        self.event("response.output_item.done", &done, out);
    }

    /// The events with an item's content.
    fn done(&mut self, item: &OutputItem, index: usize, out: &mut Vec<u8>) {
        match &item.body {
            Body::Reasoning(text) => {
                let fields = part_fields(&item.id, index, ("text", json!(text)));
                self.event("response.reasoning_text.done", &fields, out);
            }
            Body::Text { text, logprobs } => {
                let mut fields = part_fields(&item.id, index, ("text", json!(text))).to_vec();
                fields.push(("logprobs", json!(logprobs.as_deref().unwrap_or_default())));
                self.event("response.output_text.done", &fields, out);
            }
            Body::Call {
                name, arguments, ..
            } => {
                let fields = call_fields(&item.id, index, name, arguments);
                self.event("response.function_call_arguments.done", &fields, out);
            }
        }
        if let Some(part) = item.body.part() {
            let fields = part_fields(&item.id, index, ("part", part));
            self.event("response.content_part.done", &fields, out);
        }
    }
}

fn call_fields(id: &str, index: usize, name: &str, arguments: &str) -> [(&'static str, Value); 4] {
    [
        ("item_id", json!(id)),
        ("output_index", json!(index)),
        ("name", json!(name)),
        ("arguments", json!(arguments)),
    ]
}

fn part_fields<'a>(id: &str, index: usize, last: (&'a str, Value)) -> [(&'a str, Value); 4] {
    [
        ("item_id", json!(id)),
        ("output_index", json!(index)),
        ("content_index", json!(0)),
        last,
    ]
}

impl Events for ResponseEvents {
    fn begin(&mut self, head: &Head, out: &mut Vec<u8>) {
        self.head = Some(head.clone());
        let begun = Response::begun(head).json(&self.reply.form);
        self.response_event("response.created", begun.clone(), out);
        self.response_event("response.in_progress", begun, out);
    }

    fn progress(
        &mut self,
        _choice: usize,
        deltas: &[Delta],
        tokens: Tokens<'_>,
        tokenizer: &Tokenizer,
        out: &mut Vec<u8>,
    ) {
        if self.reply.form.logprobs {
            self.logprobs
                .extend(token_logprobs(tokens, false, tokenizer));
        }
        for delta in deltas {
            self.add(delta, out);
        }
    }

    fn end(&mut self, answer: &Answer, out: &mut Vec<u8>) {
        let Some(choice) = answer.choices.first() else {
            return;
        };
        if self.items.is_empty() {
            self.open(&Delta::Content(String::new()), out);
        }
        // The status of an answer is that of its last item.
        let ended = Response::ended(&answer.head, choice.finish, Vec::new(), 0).status;
        self.close(ended, out);
        let items = std::mem::take(&mut self.items);
        let response = self.reply.finish(&answer.head, choice, items);
        let kind = match ended {
            Status::Incomplete => "response.incomplete",
            _ => "response.completed",
        };
        self.response_event(kind, response, out);
    }

    fn error(&mut self, error: &ApiError, out: &mut Vec<u8>) {
        self.close(Status::Incomplete, out);
        let fields = [
            ("code", json!(error.code)),
            ("message", json!(error.message)),
            ("param", json!(error.param)),
        ];
        self.event("error", &fields, out);
        if let Some(head) = self.head.take() {
            let items = std::mem::take(&mut self.items);
            let failed = Response::failed(&head, items, error).json(&self.reply.form);
            self.response_event("response.failed", failed, out);
        }
    }
}
