//! The newlines that a chat template writes between the parts of an answer. They are no content: the template writes them
//! again when the message comes back.

use super::protocol::{ThinkMarkers, ToolParser};
use crate::message::{FunctionCall, Message, ToolCall};
use crate::template::RenderOptions;
use serde_json::{Map, Value, json};

const REASONING: &str = "zPrimerlReasoningz";
const CONTENT: &str = "zPrimerlContentz";

/// How many there are at most at each border. What a model writes beyond is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Newlines {
    /// Before `<think>`, the generation prompt's included.
    pub before_open: usize,
    /// After `<think>`.
    pub after_open: usize,
    /// Before `</think>`.
    pub before_close: usize,
    /// After `</think>`.
    pub after_close: usize,
    /// Between content and the first call.
    pub before_call: usize,
}

impl Newlines {
    /// For templates that do not write reasoning back (DeepSeek R1).
    pub const USUAL: Self = Self {
        before_open: 0,
        after_open: 1,
        before_close: 1,
        after_close: 2,
        before_call: 1,
    };

    /// As the model's own template writes them; the usual ones where it writes no such part.
    pub(super) fn learn(
        render: impl Fn(&[Message], &RenderOptions) -> Option<String>,
        think: Option<&ThinkMarkers>,
        tool: &ToolParser,
    ) -> Self {
        let mut newlines = Self {
            before_call: tool.newlines_before_call,
            ..Self::USUAL
        };
        let plain = tried(&render, false);
        let called = tried(&render, true);
        if let Some(think) = think
            && let Some(text) = plain.as_deref().or(called.as_deref())
        {
            newlines.learn_reasoning(text, think);
        }
        if let Some((_, after)) = called.as_deref().and_then(|text| text.split_once(CONTENT)) {
            let call = after.trim_start_matches('\n');
            newlines.before_call = match tool.openers.iter().any(|open| call.starts_with(open)) {
                true => leading(after),
                false => newlines.before_call,
            };
        }
        newlines
    }

    /// Leaves those around reasoning as they are if the text has none.
    fn learn_reasoning(&mut self, text: &str, think: &ThinkMarkers) {
        if let Some((before, after)) = text.split_once(REASONING)
            && let Some(before) = before.trim_end_matches('\n').strip_suffix(think.open)
            && let Some((between, after)) = after.split_once(think.close)
        {
            let opened = &text[before.len() + think.open.len()..];
            self.before_open = trailing(before);
            self.after_open = leading(opened);
            self.before_close = leading(between);
            self.after_close = leading(after);
        }
    }
}

fn leading(text: &str) -> usize {
    text.bytes().take_while(|byte| *byte == b'\n').count()
}

pub(crate) fn trailing(text: &str) -> usize {
    text.bytes().rev().take_while(|byte| *byte == b'\n').count()
}

fn tried(
    render: impl Fn(&[Message], &RenderOptions) -> Option<String>,
    has_call: bool,
) -> Option<String> {
    let call = ToolCall {
        id: Some("call00000".to_owned()),
        kind: Some("function".to_owned()),
        function: FunctionCall {
            name: "f".to_owned(),
            arguments: json!({"a": "b"}),
        },
        extra: Map::new(),
    };
    let answer = Message {
        reasoning_content: Some(REASONING.to_owned()),
        tool_calls: has_call.then(|| vec![call]),
        ..Message::assistant(CONTENT)
    };
    let options = RenderOptions {
        tools: has_call.then(tools),
        add_generation_prompt: false,
        template_kwargs: Map::new(),
        ..RenderOptions::default()
    };
    render(&[Message::user("x"), answer], &options)
}

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "f", "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}}),
    ]
}
