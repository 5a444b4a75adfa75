//! Sampled tokens to the assistant message that environments see.

use crate::message::Message;

/// Turns the text of an answer into a message. Families with tool calls or reasoning bring their own.
pub trait ResponseParser: Send + Sync {
    /// `text` has no special tokens and no stop token.
    fn parse(&self, text: &str) -> Message;
}

/// The whole text is the content.
pub struct PlainText;

impl ResponseParser for PlainText {
    fn parse(&self, text: &str) -> Message {
        Message::assistant(text)
    }
}
