//! Sentinels in place of the control tokens that texts of a conversation hold.
//!
//! Also of what could become one together with the text next to it: `<|im_` at the end of a text, `end|>` at its
//! beginning. A text in the middle of a token whose ends the template writes (`<|` + role + `|>`) is the template's markup.

use super::timed;
use crate::control_tokens::ControlTokens;
use crate::message::{Content, Message, ToolCall};
use crate::template::RenderOptions;
use serde_json::{Map, Value};
use std::ops::Range;

const SENTINEL: &str = "zPrimerlControl";
const SENTINEL_END: char = 'z';

/// What the sentinels stand for, by their number.
#[derive(Default)]
pub(crate) struct Originals(Vec<String>);

impl Originals {
    /// Of a conversation that has some.
    pub fn first(&self) -> &str {
        self.0.first().map_or("", String::as_str)
    }

    pub fn contain(&self, c: char) -> bool {
        self.0.iter().any(|original| original.contains(c))
    }

    fn sentinel(&mut self, original: &str) -> String {
        let known = self.0.iter().position(|text| text == original);
        let number = known.unwrap_or_else(|| {
            self.0.push(original.to_owned());
            self.0.len() - 1
        });
        format!("{SENTINEL}{number}{SENTINEL_END}")
    }

    /// Begin, end and original of each sentinel in a text; `None` where one is cut, or has another number.
    pub fn sentinels_in(&self, text: &str) -> Option<Vec<(usize, usize, &str)>> {
        let one = |(begin, _)| {
            let number = &text[begin + SENTINEL.len()..];
            let (number, _) = number.split_once(SENTINEL_END)?;
            let original = self.0.get(number.parse::<usize>().ok()?)?;
            let end = begin + SENTINEL.len() + number.len() + SENTINEL_END.len_utf8();
            Some((begin, end, original.as_str()))
        };
        text.match_indices(SENTINEL).map(one).collect()
    }
}

/// Puts sentinels into the texts of one conversation.
pub(crate) struct Texts<'a> {
    every: &'a ControlTokens,
    special: &'a ControlTokens,
    takes_mappings: bool,
    originals: Originals,
}

impl<'a> Texts<'a> {
    /// `takes_mappings`: the template reads the arguments of calls.
    pub fn new(every: &'a ControlTokens, special: &'a ControlTokens, takes_mappings: bool) -> Self {
        Self {
            every,
            special,
            takes_mappings,
            originals: Originals::default(),
        }
    }

    /// What was replaced; `None` where nothing was.
    pub fn replaced(self) -> Option<Originals> {
        (!self.originals.0.is_empty()).then_some(self.originals)
    }

    pub fn message(&mut self, message: &Message) -> Message {
        let tokens = match message.role.as_str() {
            "assistant" | "system" | "developer" => self.special,
            _ => self.every,
        };
        let mut message = message.clone();
        match &mut message.content {
            Content::Absent | Content::Null => {}
            Content::Text(text) => self.replace(text, tokens),
            Content::Parts(parts) => parts
                .iter_mut()
                .for_each(|part| self.replace_in(part, tokens)),
        }
        let fields = [
            &mut message.reasoning_content,
            &mut message.tool_call_id,
            &mut message.name,
        ];
        for text in fields.into_iter().flatten() {
            self.replace(text, tokens);
        }
        for call in message.tool_calls.iter_mut().flatten() {
            self.replace_in_call(call, tokens);
        }
        self.replace_in_map(&mut message.extra, tokens);
        message
    }

    /// Text that follows an answer.
    pub fn appended(&mut self, text: &str) -> String {
        let mut text = text.to_owned();
        self.replace(&mut text, self.special);
        text
    }

    pub fn options(&mut self, options: &RenderOptions) -> RenderOptions {
        let mut options = timed(options);
        let lists = [&mut options.tools, &mut options.documents];
        for value in lists.into_iter().flatten().flatten() {
            self.replace_in(value, self.every);
        }
        options
    }

    fn replace_in_call(&mut self, call: &mut ToolCall, tokens: &ControlTokens) {
        if let Some(id) = &mut call.id {
            self.replace(id, tokens);
        }
        self.replace(&mut call.function.name, tokens);
        match &mut call.function.arguments {
            Value::String(text) => self.replace_in_arguments(text, tokens),
            arguments => self.replace_in(arguments, tokens),
        }
        self.replace_in_map(&mut call.extra, tokens);
    }

    /// JSON text that is read may spell a control token with escapes; its strings are looked at as they will be read.
    fn replace_in_arguments(&mut self, text: &mut String, tokens: &ControlTokens) {
        let is_read =
            self.takes_mappings && serde_json::from_str::<Map<String, Value>>(text).is_ok();
        if !is_read {
            return self.replace(text, tokens);
        }
        let mut written = String::with_capacity(text.len());
        let mut at = 0;
        for literal in string_literals(text) {
            let Ok(read) = serde_json::from_str::<String>(&text[literal.clone()]) else {
                continue;
            };
            let mut replaced = read.clone();
            self.replace(&mut replaced, tokens);
            if replaced != read {
                written.push_str(&text[at..literal.start]);
                written.push_str(&Value::String(replaced).to_string());
                at = literal.end;
            }
        }
        written.push_str(&text[at..]);
        *text = written;
    }

    fn replace_in(&mut self, value: &mut Value, tokens: &ControlTokens) {
        match value {
            Value::String(text) => self.replace(text, tokens),
            Value::Array(items) => items
                .iter_mut()
                .for_each(|item| self.replace_in(item, tokens)),
            Value::Object(map) => self.replace_in_map(map, tokens),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn replace_in_map(&mut self, map: &mut Map<String, Value>, tokens: &ControlTokens) {
        let replaced = std::mem::take(map).into_iter().map(|(mut key, mut value)| {
            self.replace(&mut key, tokens);
            self.replace_in(&mut value, tokens);
            (key, value)
        });
        *map = replaced.collect();
    }

    fn replace(&mut self, text: &mut String, tokens: &ControlTokens) {
        let found = tokens.ranges(text);
        if found.is_empty() {
            return;
        }
        let mut replaced = String::with_capacity(text.len());
        let mut at = 0;
        for range in found {
            replaced.push_str(&text[at..range.start]);
            replaced.push_str(&self.originals.sentinel(&text[range.clone()]));
            at = range.end;
        }
        replaced.push_str(&text[at..]);
        *text = replaced;
    }
}

/// The strings of a JSON text, with their quotes.
fn string_literals(text: &str) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let begin = at + text.get(at..)?.find('"')?;
        let bytes = text.as_bytes();
        let mut end = begin + 1;
        while *bytes.get(end)? != b'"' {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        at = end + 1;
        Some(begin..at)
    })
}
