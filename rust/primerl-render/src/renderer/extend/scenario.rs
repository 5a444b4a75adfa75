//! What may change how new messages are rendered, and the conversations on which it is tried.

use super::SENTINEL;
use crate::message::{Content, FunctionCall, Message, ToolCall};
use crate::template::PreparedOptions;
use serde_json::{Value, json};

/// What may change how new messages are rendered, other than their text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    /// Role of each new message and its number of tool calls.
    pub messages: Vec<(String, usize)>,
    pub answer: AnswerShape,
    pub tools: Given,
    pub documents: Given,
    pub add_generation_prompt: bool,
    pub template_kwargs: String,
}

/// What templates ask about the answer before they write what follows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct AnswerShape {
    pub tool_calls: usize,
    /// The content of an answer with calls; an answer without calls always has text.
    pub content: ContentKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum ContentKind {
    Absent,
    Null,
    Empty,
    Text,
}

/// Templates tell none from an empty list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Given {
    None,
    Empty,
    Some,
}

impl Shape {
    pub fn of(answer: &Message, new_messages: &[Message], options: &PreparedOptions) -> Self {
        Self {
            messages: new_messages
                .iter()
                .map(|message| (message.role.clone(), count_calls(message)))
                .collect(),
            answer: AnswerShape::of(answer),
            tools: Given::of(options.options.tools.as_deref()),
            documents: Given::of(options.options.documents.as_deref()),
            add_generation_prompt: options.options.add_generation_prompt,
            template_kwargs: options.kwargs_key.clone(),
        }
    }

    pub fn scenario_messages(&self, text: &str) -> Vec<Message> {
        let mut answered = 0;
        let mut message = |(role, calls): &(String, usize)| {
            let mut message = scenario_answer(text, *calls);
            message.role = role.clone();
            if role == "tool" {
                message.tool_call_id = Some(call_id(answered));
                message.name = Some(format!("f{answered}"));
                answered += 1;
            }
            message
        };
        self.messages.iter().map(&mut message).collect()
    }
}

impl AnswerShape {
    pub fn of(answer: &Message) -> Self {
        let tool_calls = count_calls(answer);
        let content = match &answer.content {
            _ if tool_calls == 0 => ContentKind::Text,
            Content::Absent => ContentKind::Absent,
            Content::Null => ContentKind::Null,
            Content::Text(text) if text.is_empty() => ContentKind::Empty,
            Content::Text(_) | Content::Parts(_) => ContentKind::Text,
        };
        Self {
            tool_calls,
            content,
        }
    }

    pub fn scenario(self, text: &str) -> Message {
        let mut answer = scenario_answer(text, self.tool_calls);
        answer.content = self.content.with(text);
        answer
    }
}

impl ContentKind {
    fn with(self, text: &str) -> Content {
        match self {
            ContentKind::Absent => Content::Absent,
            ContentKind::Null => Content::Null,
            ContentKind::Empty => Content::Text(String::new()),
            ContentKind::Text => Content::Text(text.to_owned()),
        }
    }
}

impl Given {
    pub fn of(items: Option<&[Value]>) -> Self {
        match items {
            None => Given::None,
            Some([]) => Given::Empty,
            Some(_) => Given::Some,
        }
    }

    pub fn filled(self, item: impl Fn() -> Value) -> Option<Vec<Value>> {
        match self {
            Given::None => None,
            Given::Empty => Some(Vec::new()),
            Given::Some => Some(vec![item()]),
        }
    }
}

pub(super) fn count_calls(message: &Message) -> usize {
    message.tool_calls.as_ref().map_or(0, Vec::len)
}

/// The answer as the minimal conversation holds it: its calls keep their names and ids, for templates name tool results
/// after them; all text is sentinels.
pub(super) fn stand_in(answer: &Message) -> Message {
    let mut stand_in = Message::assistant("");
    stand_in.content = AnswerShape::of(answer).content.with(SENTINEL);
    stand_in.role = answer.role.clone();
    stand_in.tool_calls = answer.tool_calls.clone().filter(|calls| !calls.is_empty());
    for (index, call) in stand_in.tool_calls.iter_mut().flatten().enumerate() {
        call.function.arguments = argument_text(&argument_sentinel(index));
    }
    stand_in
}

pub(super) fn argument_sentinel(index: usize) -> String {
    format!("zPrimerlArgument{index}z")
}

// As text: a template that wants a mapping is given the mapping.
pub(crate) fn argument_text(value: &str) -> Value {
    Value::String(json!({ "a": value }).to_string())
}

pub(crate) fn call_id(index: usize) -> String {
    // Nine letters and digits: Mistral's templates insist.
    format!("call{index:05}")
}

pub(crate) fn scenario_answer(text: &str, calls: usize) -> Message {
    let call = |index| ToolCall {
        id: Some(call_id(index)),
        kind: Some("function".to_owned()),
        function: FunctionCall {
            name: format!("f{index}"),
            arguments: argument_text("b"),
        },
        extra: serde_json::Map::new(),
    };
    let tool_calls = (calls > 0).then(|| (0..calls).map(call).collect());
    Message {
        content: Content::Text(text.to_owned()),
        tool_calls,
        ..Message::assistant("")
    }
}

pub(crate) fn scenario_tool() -> Value {
    json!({"type": "function", "function": {"name": "f0", "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}}})
}

pub(super) fn scenario_histories() -> Vec<Vec<Message>> {
    let user = || Message::user("Why?\n\nBecause.");
    let system = || Message::text("system", "Be brief.");
    let answered = || Message::assistant("Then no.");
    let result_of = |index| {
        let mut result = Message::text("tool", "{\"r\": 1}");
        result.tool_call_id = Some(call_id(index));
        result.name = Some(format!("f{index}"));
        result
    };
    let tool_result = result_of(0);
    let called = || scenario_answer("", 1);
    let mut reasoned = Message::assistant("So be it.");
    reasoned.reasoning_content = Some("Is it?\n\nYes.".to_owned());
    vec![
        vec![user()],
        vec![system(), user()],
        vec![user(), answered(), user()],
        vec![system(), user(), answered(), user(), answered(), user()],
        vec![user(), reasoned, user()],
        vec![user(), called(), tool_result.clone()],
        // Templates that set the system message apart have been seen to count from the wrong one afterwards.
        vec![system(), user(), called(), tool_result.clone()],
        // A template may treat the first of several results differently, and what follows the last.
        vec![
            user(),
            scenario_answer("", 2),
            tool_result.clone(),
            result_of(1),
        ],
        vec![system(), user(), called(), tool_result, answered(), user()],
    ]
}
