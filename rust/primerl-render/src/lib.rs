//! Messages to tokens and back, for one model folder at a time.
//!
//! [`Renderer::load`] reads the model's own tokenizer and chat template. From there:
//! messages become token ids ([`Renderer::render`]), exactly those of `transformers`' `apply_chat_template`;
//! a recorded conversation grows by the tokens of its new messages only ([`Renderer::extend`]);
//! sampled ids become the assistant message an environment sees, whole ([`Renderer::parse_answer`]) or as they come
//! ([`Renderer::answer_stream`]);
//! and supervised training gets ids with a mask of what the assistant wrote ([`Renderer::render_with_mask`]).
//!
//! The crate is pure: it reads the model's files at load time, and the date where a template asks for it.

#![forbid(unsafe_code)]

mod answer;
mod check;
mod control_tokens;
mod error;
mod mask;
mod message;
mod model_files;
mod neutral;
mod null_content;
mod parse;
mod renderer;
mod template;
#[cfg(feature = "testing")]
pub mod testing;
mod tokenizer;

pub use check::{CheckError, CheckedTurn, Verdict};
pub use error::{LoadError, MaskFailure, RenderError};
pub use mask::MaskedIds;
pub use message::{
    Content, FunctionCall, Message, ToolCall, answer_words, canonical, canonical_json,
    reasoning_words,
};
pub use neutral::ControlTokenPolicy;
pub use parse::{
    AnswerContext, AnswerStream, CallProblem, Delta, Demand, DemandError, Description,
    DescriptionError, MalformedCall, Parsed, ParserChoice, ParserSetting, Segment, SegmentKind,
    literals, reasoning_parsers, tool_parsers,
};
pub use renderer::{
    Body, Extension, ExtensionContext, LoadOptions, NotExtendable, Renderer, RoleSupport,
};
pub use template::{ChatTemplate, RenderOptions};
pub use tokenizer::{AddedToken, BackendChoice, DecodeState, StreamDecoder, Tokenizer};
