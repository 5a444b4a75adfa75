//! Extending a recorded conversation: only the new messages are rendered, never the history.
//!
//! The suffix is a template difference. The template renders a minimal conversation, one user message, an answer that
//! is a sentinel, and the new messages; what follows the sentinel is what has to follow the recorded tokens. It begins
//! with the stop token that ends the turn, which is the only place where cutting cannot split or join tokens.
//!
//! That this text does not depend on the history is proven once for each shape of new messages ([`Shape`]), by full
//! renders of scenario conversations, and remembered. What is not proven is not extended: the caller renders in full.
//!
//! Some templates rewrite history in a full render (Qwen3 drops the thinking of earlier turns). An extension keeps the
//! tokens as they were sampled.

mod bodies;
mod neutral;
mod proofs;
mod scenario;

pub use bodies::Body;
use bodies::Whole;
pub(crate) use proofs::Proofs;
pub(crate) use scenario::{call_id, scenario_answer, scenario_tool};

use crate::message::{Content, Message};
use crate::renderer::Renderer;
use crate::template::{PreparedOptions, RenderOptions};
use scenario::{Shape, argument_sentinel, stand_in};

/// Stands for the answer; survives every trimming and splitting that templates do.
const SENTINEL: &str = "zPrimerlAnswerSentinelz";

/// The turn that is extended.
#[derive(Clone, Copy, Debug)]
pub struct ExtensionContext<'a> {
    /// The assistant message that was answered, as the new request holds it; its tool calls matter, its text does not.
    pub answer: &'a Message,
    /// The ids sampled in that turn; its last one tells whether the turn was closed.
    pub sampled: &'a [u32],
    /// As for the full render of the new request.
    pub options: &'a RenderOptions,
}

/// What is to be extended, and by what.
#[derive(Clone, Copy)]
struct Asked<'a> {
    previous: ExtensionContext<'a>,
    /// Text behind that of the answer.
    own: &'a str,
    new: &'a [Message],
}

/// What continues a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extension {
    /// The ids to append to those of the prompt and the answer.
    pub ids: Vec<u32>,
    /// The texts of new messages among them.
    pub bodies: Vec<Body>,
}

/// Why new messages cannot be appended to recorded tokens.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NotExtendable {
    #[error("there is no new message")]
    NoNewMessages,
    #[error("the template cannot render the new messages after a short conversation: {0}")]
    TemplateFailed(String),
    #[error("the template does not write the answer verbatim")]
    AnswerNotVerbatim,
    #[error("the template does not end the answer with a stop token")]
    NoTurnEnd,
    #[error("the turn ended with token {sampled}, but the template continues with {expected}")]
    OtherStopToken { sampled: u32, expected: u32 },
    #[error(
        "what the template writes for the new messages depends on the conversation before them"
    )]
    DependsOnHistory,
    #[error("the tokens of the new messages depend on the text before them")]
    TokensMerge,
    #[error(
        "control tokens in the text of the new messages cannot be distinguished from the template's"
    )]
    ControlTokens,
}

impl NotExtendable {
    /// The reason in one word, for tables and logs.
    pub fn code(&self) -> &'static str {
        match self {
            NotExtendable::NoNewMessages => "no_new_messages",
            NotExtendable::TemplateFailed(_) => "template_failed",
            NotExtendable::AnswerNotVerbatim => "answer_not_verbatim",
            NotExtendable::NoTurnEnd => "no_turn_end",
            NotExtendable::OtherStopToken { .. } => "other_stop_token",
            NotExtendable::DependsOnHistory => "depends_on_history",
            NotExtendable::TokensMerge => "tokens_merge",
            NotExtendable::ControlTokens => "control_tokens",
        }
    }
}

impl Renderer {
    /// The ids to append to `prompt ids + sampled ids` so that the conversation continues with `new_messages`: the close of
    /// the answered turn (omitted where it was sampled), the messages, the generation prompt. Takes time in the length
    /// of the new messages (and the tools), not of the conversation.
    pub fn extend(
        &self,
        previous: &ExtensionContext<'_>,
        new_messages: &[Message],
    ) -> Result<Vec<u32>, NotExtendable> {
        let extension = self.extend_located(previous, None, new_messages, &|_| false)?;
        Ok(extension.ids)
    }

    /// How many ids of the extension were sampled: its first closes the turn, and `last` was sampled.
    fn sampled_close(&self, last: u32, first: u32) -> Result<usize, NotExtendable> {
        match last == first {
            true => Ok(1),
            false if self.is_stop_token(last) => Err(NotExtendable::OtherStopToken {
                sampled: last,
                expected: first,
            }),
            false => Ok(0),
        }
    }

    /// As [`Renderer::extend`], and where in it the text of the new messages is that are wanted. One whose text cannot be
    /// located is left out.
    ///
    /// `appended`: the answer was sampled without a stop token, and the new request has this text behind it. The sampled
    /// ids stay as they are and the text is encoded by itself, as the prompt of a model that is to continue its own tokens:
    /// where the tokenizer would have made one token of both, there are two.
    pub fn extend_located(
        &self,
        previous: &ExtensionContext<'_>,
        appended: Option<&str>,
        new_messages: &[Message],
        wants: &dyn Fn(&Message) -> bool,
    ) -> Result<Extension, NotExtendable> {
        let closed = previous.sampled.last();
        let is_closed = closed.is_some_and(|id| self.is_stop_token(*id));
        if appended.is_some() && (previous.answer.has_tool_calls() || is_closed) {
            return Err(NotExtendable::AnswerNotVerbatim);
        }
        let asked = Asked {
            previous: *previous,
            own: appended.unwrap_or_default(),
            new: new_messages,
        };
        let neutral = neutral::Extended::of(self, &asked);
        let rendered = match &neutral {
            Some(neutral) => neutral.asked(),
            None => asked,
        };
        let suffix = self.proven_suffix(&rendered)?;
        let (ids, restored) = match &neutral {
            Some(neutral) => {
                let (ids, restored) = neutral.encode(self, &asked, &suffix)?;
                (ids, Some(restored))
            }
            None => (self.encode_text(&suffix)?, None),
        };
        if appended.is_none() {
            self.check_turn_end(&suffix, &ids)?;
        }
        let first = match closed {
            Some(last) if appended.is_none() => self.sampled_close(*last, ids[0])?,
            _ => 0,
        };
        let whole = Whole {
            suffix: &suffix,
            ids: &ids,
            restored: restored.as_ref(),
        };
        let bodies = self.bodies(&rendered, &whole, first, wants);
        let ids = ids[first..].to_vec();
        Ok(Extension { ids, bodies })
    }

    fn proven_suffix(&self, asked: &Asked<'_>) -> Result<String, NotExtendable> {
        if asked.new.is_empty() {
            return Err(NotExtendable::NoNewMessages);
        }
        let (answer, options) = (asked.previous.answer, asked.previous.options);
        let options = self.prepared.prepare(options);
        self.prove(Shape::of(answer, asked.new, &options), &options)?;
        self.suffix_after(answer, asked.own, asked.new, &options)
    }

    /// What the template writes right after a plain answer that a user message follows, and after one that ends the
    /// conversation.
    pub(crate) fn texts_after_answer(&self) -> Option<[String; 2]> {
        let after = |following: Option<Message>| {
            let mut messages = vec![Message::user("x"), Message::assistant(SENTINEL)];
            let options = RenderOptions {
                add_generation_prompt: following.is_some(),
                ..RenderOptions::default()
            };
            messages.extend(following);
            let text = self.render_text(&messages, &options).ok()?;
            text.split_once(SENTINEL).map(|(_, after)| after.to_owned())
        };
        Some([after(Some(Message::user("y")))?, after(None)?])
    }

    /// Text from the stop token that closes the answer to the end of the render.
    pub(crate) fn suffix_text(
        &self,
        answer: &Message,
        new_messages: &[Message],
        options: &PreparedOptions,
    ) -> Result<String, NotExtendable> {
        self.suffix_after(answer, "", new_messages, options)
    }

    /// The same with `appended` before it, where the answer's text ends with that. A template may trim its end.
    fn suffix_after(
        &self,
        answer: &Message,
        appended: &str,
        new_messages: &[Message],
        options: &PreparedOptions,
    ) -> Result<String, NotExtendable> {
        let mut messages = vec![Message::user("x"), stand_in(answer)];
        if let Content::Text(text) = &mut messages[1].content {
            text.push_str(appended);
        }
        messages.extend_from_slice(new_messages);
        let text = self
            .prepared_text(&messages, options)
            .map_err(|error| NotExtendable::TemplateFailed(error.to_string()))?;
        let calls = scenario::count_calls(answer);
        let mark = if calls == 0 {
            SENTINEL.to_owned()
        } else {
            argument_sentinel(calls - 1)
        };
        let mut pieces = text.split(mark.as_str());
        let (Some(_), Some(after), None) = (pieces.next(), pieces.next(), pieces.next()) else {
            return Err(NotExtendable::AnswerNotVerbatim);
        };
        let rest = after
            .strip_prefix(appended)
            .or_else(|| after.strip_prefix(appended.trim_end()))
            .ok_or(NotExtendable::AnswerNotVerbatim)?;
        let close = self
            .stop_token_texts()
            .filter_map(|(_, stop)| rest.find(stop))
            .min()
            .ok_or(NotExtendable::NoTurnEnd)?;
        // After a call's arguments the template closes its syntax; after plain text nothing may come between, for the
        // model would have had to sample it.
        if calls == 0 && close > 0 {
            return Err(NotExtendable::NoTurnEnd);
        }
        // After a call nothing is appended, and what closes its syntax was sampled.
        match calls {
            0 => Ok(after.to_owned()),
            _ => Ok(rest[close..].to_owned()),
        }
    }

    fn encode_text(&self, text: &str) -> Result<Vec<u32>, NotExtendable> {
        let ids = self.tokenizer().encode(text);
        ids.map_err(|error| NotExtendable::TemplateFailed(error.to_string()))
    }

    fn encode_suffix(&self, suffix: &str) -> Result<Vec<u32>, NotExtendable> {
        let ids = self.encode_text(suffix)?;
        self.check_turn_end(suffix, &ids)?;
        Ok(ids)
    }

    fn check_turn_end(&self, suffix: &str, ids: &[u32]) -> Result<(), NotExtendable> {
        match self.leading_stop_token(suffix) {
            Some((stop, _)) if ids.first() == Some(&stop) => Ok(()),
            _ => Err(NotExtendable::TokensMerge),
        }
    }
}
