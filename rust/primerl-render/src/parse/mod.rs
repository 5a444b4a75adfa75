//! Sampled tokens to the assistant message that environments see.
//!
//! The decoded text of an answer is cut into [`Segment`]s that tile it: what the client is shown (content, reasoning),
//! tool calls, and what is hidden (markers, the newlines a template writes around them, headers, left-over special
//! tokens). Each segment knows its range of text and of sampled tokens, so anything shown leads back to the ids.
//!
//! One implementation serves streaming and whole answers: [`AnswerStream`] takes ids in any split and holds back only
//! what may be the beginning of a marker. Nothing a model writes is an error: a call that cannot be read stays text, with
//! an entry in [`Parsed::malformed`].
//!
//! Without tools in the request no call is parsed: the text stays text, markers included, even where they are special
//! tokens. Reasoning is parsed all the same. Other special tokens are always hidden.

mod arguments;
mod choice;
mod cut;
mod demand;
mod description;
#[cfg(feature = "testing")]
pub mod fuzz;
mod json;
mod list;
mod machine;
mod markers;
mod newlines;
mod pairs;
mod parsers;
mod protocol;
mod python_literal;
mod scan;
mod stream;
mod tagged;

pub use choice::{ParserChoice, ParserSetting, reasoning_parsers, tool_parsers};
pub(crate) use demand::CallGrammars;
pub use demand::{Demand, DemandError, literals};
pub use description::{Description, DescriptionError};
pub(crate) use newlines::{Newlines, trailing};
pub use stream::AnswerStream;
pub(crate) use stream::{AnswerModel, AnswerParser};

use crate::message::Message;
use serde_json::Value;
use std::ops::Range;

/// What a stretch of an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SegmentKind {
    /// Text of `message.content`.
    Content,
    /// Text of `message.reasoning_content`.
    Reasoning,
    /// `message.tool_calls[index]`, with the markers of that call alone.
    ToolCall(usize),
    /// Not shown.
    Hidden,
}

/// A stretch of the decoded answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    pub kind: SegmentKind,
    /// Bytes of [`Parsed::text`].
    pub text_range: Range<usize>,
    /// Sampled tokens that touch it. A token that crosses a border belongs to both sides.
    pub token_range: Range<usize>,
}

/// A stretch that looked like a tool call and is shown as content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MalformedCall {
    pub reason: CallProblem,
    /// Bytes of [`Parsed::text`].
    pub text_range: Range<usize>,
}

/// Why a stretch is not a tool call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CallProblem {
    #[error("the answer ends within the call")]
    CutOff,
    #[error("the arguments are not JSON: {0}")]
    InvalidJson(String),
    #[error("the {0} is not a JSON object")]
    NotAnObject(&'static str),
    #[error("the call has no name")]
    NoName,
    #[error("{0}")]
    Structure(&'static str),
}

/// A parsed answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Parsed {
    /// Role `assistant`. Content is null where there is nothing but tool calls.
    pub message: Message,
    /// The decoded text with special tokens, without the stop token that ended the answer.
    pub text: String,
    /// In order; their texts concatenate to `text`, and together they touch every token but the stop token.
    pub segments: Vec<Segment>,
    pub malformed: Vec<MalformedCall>,
    /// The last sampled token, where it is a stop token.
    pub stop_token: Option<u32>,
}

/// A piece of an answer for a client that reads along. Pieces of a kind add up to the message's field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    Reasoning(String),
    Content(String),
    /// A whole call, as soon as it is complete.
    ToolCall {
        index: usize,
        id: Option<String>,
        name: String,
        arguments: String,
    },
}

/// What a request says about its answer.
#[derive(Clone, Copy, Debug, Default)]
pub struct AnswerContext<'a> {
    /// OpenAI tool schemas. None or empty: calls are not parsed.
    pub tools: Option<&'a [Value]>,
    /// Whether the prompt ends within reasoning: [`crate::Renderer::starts_in_reasoning`].
    pub starts_in_reasoning: bool,
}
