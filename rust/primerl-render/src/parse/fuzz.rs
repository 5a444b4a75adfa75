//! Entry for fuzzers: it takes any bytes for any tool parser, and panics where a promise of this module is broken.
//!
//! The first byte says whether there are tools, open reasoning and a stop token, the second one how the text is split; the rest is the
//! text of an answer.

use super::choice::ParserChoice;
use super::cut::Cut;
use super::newlines::Newlines;
use super::parsers::{REASONING_PARSERS, TOOL_PARSERS};
use super::stream::Engine;
use super::{AnswerContext, Delta, SegmentKind};
use serde_json::json;

/// Names of the parsers.
pub fn names() -> impl Iterator<Item = &'static str> {
    TOOL_PARSERS.iter().map(|parser| parser.name)
}

/// Fuzzes the parser at this place of [`names`], with the reasoning parser that its family usually needs.
///
/// # Panics
/// There is no such parser, or a promise is broken.
pub fn run(parser: usize, data: &[u8]) {
    let tool = TOOL_PARSERS[parser];
    let mut reasoning = REASONING_PARSERS.iter();
    let reasoning = reasoning.find(|parser| parser.name == tool.reasoning);
    let reasoning = reasoning.expect("a parser names its reasoning parser");
    run_choice(ParserChoice { tool, reasoning }, data);
}

fn run_choice(choice: ParserChoice, data: &[u8]) {
    let [flags, size, rest @ ..] = data else {
        return;
    };
    let text = String::from_utf8_lossy(rest);
    let tools = [
        json!({"function": {"name": "f", "parameters": {"properties": {"a": {"type": ["integer", "null"]}}}}}),
        json!({"function": {"name": "python"}}),
    ];
    let context = AnswerContext {
        tools: (flags & 1 == 1).then_some(&tools),
        starts_in_reasoning: flags & 2 == 2,
    };
    let parse = |size: usize| {
        let engine = Engine::new(choice, Newlines::USUAL, &context);
        in_pieces(engine, &text, size, flags & 4 == 4)
    };
    let (whole, _) = parse(usize::MAX);
    let (split, deltas) = parse(usize::from(*size).max(1));
    assert_eq!(whole.segments, split.segments);
    assert_eq!(whole.malformed, split.malformed);
    assert_eq!(whole.calls, split.calls);
    assert_eq!(shown(deltas), written(&whole, &text));
}

/// Parses a text that comes in pieces of so many characters.
fn in_pieces(mut engine: Engine, text: &str, size: usize, is_complete: bool) -> (Cut, Vec<Delta>) {
    let mut cut = Cut::default();
    let mut deltas = Vec::new();
    for (count, letter) in text.chars().enumerate() {
        cut.text.push(letter);
        if count % size == 0 {
            engine.run(&mut cut, false);
            deltas.extend(cut.take_deltas());
        }
    }
    cut.is_complete = is_complete;
    engine.run(&mut cut, true);
    deltas.extend(cut.take_deltas());
    (cut, deltas)
}

/// Content and reasoning of an answer's segments, which must tile the text.
fn written(cut: &Cut, text: &str) -> (String, String) {
    let mut end = 0;
    let (mut content, mut reasoning) = (String::new(), String::new());
    for (kind, range) in &cut.segments {
        assert_eq!(range.start, end, "segments tile the text");
        end = range.end;
        match kind {
            SegmentKind::Content => content.push_str(&text[range.clone()]),
            SegmentKind::Reasoning => reasoning.push_str(&text[range.clone()]),
            SegmentKind::ToolCall(_) | SegmentKind::Hidden => {}
        }
    }
    assert_eq!(end, text.len());
    (content, reasoning)
}

/// Content and reasoning that a client was shown.
fn shown(deltas: Vec<Delta>) -> (String, String) {
    let (mut shown, mut thought) = (String::new(), String::new());
    for delta in deltas {
        match delta {
            Delta::Content(text) => shown.push_str(&text),
            Delta::Reasoning(text) => thought.push_str(&text),
            Delta::ToolCall { arguments, .. } => assert!(arguments.starts_with('{')),
        }
    }
    (shown, thought)
}
