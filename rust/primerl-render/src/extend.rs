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
mod scenario;

pub use bodies::Body;
pub(crate) use scenario::{call_id, scenario_answer, scenario_tool};

use crate::message::{Content, Message};
use crate::renderer::Renderer;
use crate::template::{PreparedOptions, RenderOptions};
use scenario::{
    AnswerShape, ContentKind, Given, Shape, argument_sentinel, scenario_histories, stand_in,
};
use serde_json::json;
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

/// Stands for the answer; survives every trimming and splitting that templates do.
const SENTINEL: &str = "zPrimerlAnswerSentinelz";
/// Shapes remembered; far more than one run shows.
const MAX_PROOFS: usize = 1024;

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
        }
    }
}

/// Verdicts so far. Written by the first caller that meets a new shape; held only to look up or insert.
#[derive(Default)]
pub(crate) struct Proofs(Mutex<HashMap<Shape, Result<(), NotExtendable>>>);

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

    /// As [`Renderer::extend`], or with `appended` as [`Renderer::extend_unfinished`], and where in it the text of the new
    /// messages is that are wanted. One whose text cannot be located is left out.
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
        let own = appended.unwrap_or_default();
        let suffix = self.proven_suffix(previous, own, new_messages)?;
        let ids = match appended {
            Some(_) => self.encode_text(&suffix)?,
            None => self.encode_suffix(&suffix)?,
        };
        let first = match closed {
            _ if appended.is_some() => 0,
            Some(&last) if last == ids[0] => 1,
            Some(&last) if is_closed => {
                return Err(NotExtendable::OtherStopToken {
                    sampled: last,
                    expected: ids[0],
                });
            }
            _ => 0,
        };
        let mut extension = Extension {
            ids: ids[first..].to_vec(),
            bodies: Vec::new(),
        };
        let whole = (suffix.as_str(), ids.as_slice());
        self.bodies(previous, own, new_messages, whole, &mut extension, wants);
        Ok(extension)
    }

    /// As [`Renderer::extend`], where the answer was sampled without a stop token and the new request has `appended` behind
    /// its text. The sampled ids stay as they are and `appended` is encoded by itself, as the prompt of a model that is to
    /// continue its own tokens: where the tokenizer would have made one token of both, there are two.
    pub fn extend_unfinished(
        &self,
        previous: &ExtensionContext<'_>,
        appended: &str,
        new_messages: &[Message],
    ) -> Result<Vec<u32>, NotExtendable> {
        let extension = self.extend_located(previous, Some(appended), new_messages, &|_| false)?;
        Ok(extension.ids)
    }

    fn proven_suffix(
        &self,
        previous: &ExtensionContext<'_>,
        appended: &str,
        new_messages: &[Message],
    ) -> Result<String, NotExtendable> {
        if new_messages.is_empty() {
            return Err(NotExtendable::NoNewMessages);
        }
        let options = self.prepared.prepare(previous.options);
        self.prove(Shape::of(previous.answer, new_messages, &options), &options)?;
        self.suffix_after(previous.answer, appended, new_messages, &options)
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

    /// Tries the shapes that agents use, so that a run's first turns find the verdict.
    pub(crate) fn prove_common_shapes(&self) {
        let (tool, user) = (("tool".to_owned(), 0), ("user".to_owned(), 0));
        let shapes = [
            (vec![user.clone()], 0, Given::None),
            (vec![user.clone()], 0, Given::Some),
            (vec![tool.clone()], 1, Given::Some),
            (vec![tool.clone(), tool.clone()], 2, Given::Some),
            (vec![tool, user], 1, Given::Some),
        ];
        let options = PreparedOptions::new(RenderOptions::default());
        for (messages, tool_calls, tools) in shapes {
            let content = if tool_calls > 0 {
                ContentKind::Null
            } else {
                ContentKind::Text
            };
            let shape = Shape {
                messages,
                answer: AnswerShape {
                    tool_calls,
                    content,
                },
                tools,
                documents: Given::None,
                add_generation_prompt: true,
                template_kwargs: options.kwargs_key.clone(),
            };
            // A refusal is remembered; the turn that meets it forks with this reason.
            let _ = self.prove(shape, &options);
        }
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
        match self.leading_stop_token(suffix) {
            Some((stop, _)) if ids.first() == Some(&stop) => Ok(ids),
            _ => Err(NotExtendable::TokensMerge),
        }
    }

    fn prove(&self, shape: Shape, options: &PreparedOptions) -> Result<(), NotExtendable> {
        if let Some(verdict) = self
            .proofs
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&shape)
        {
            return verdict.clone();
        }
        // Proven outside of the lock: two threads may prove the same shape once, and find the same.
        let verdict = self.prove_scenarios(&shape, options);
        let mut proofs = self.proofs.0.lock().unwrap_or_else(PoisonError::into_inner);
        if proofs.len() >= MAX_PROOFS {
            proofs.clear();
        }
        proofs.insert(shape, verdict.clone());
        verdict
    }

    fn prove_scenarios(
        &self,
        shape: &Shape,
        options: &PreparedOptions,
    ) -> Result<(), NotExtendable> {
        let options = PreparedOptions::new(RenderOptions {
            tools: shape.tools.filled(scenario_tool),
            documents: shape
                .documents
                .filled(|| json!({"title": "t", "text": "x"})),
            add_generation_prompt: shape.add_generation_prompt,
            template_kwargs: options.options.template_kwargs.clone(),
            // One moment for all renders.
            now: Some(SystemTime::now()),
        });
        let mut compared = 0;
        for (answer_text, text) in [
            ("yes", "z"),
            ("Two words.\n\n1. more", "Line one\n\n  é 12\n<b>"),
        ] {
            let answer = shape.answer.scenario(answer_text);
            let new_messages = shape.scenario_messages(text);
            let suffix = self.suffix_text(&answer, &new_messages, &options)?;
            for history in scenario_histories() {
                let mut messages = history;
                messages.push(answer.clone());
                messages.extend_from_slice(&new_messages);
                // Not every template takes every history (system messages, tools).
                let Ok(full) = self.prepared_text(&messages, &options) else {
                    continue;
                };
                self.compare(&full, &suffix, answer_text, shape.answer.tool_calls == 0)?;
                compared += 1;
            }
        }
        if compared >= 4 {
            Ok(())
        } else {
            Err(NotExtendable::DependsOnHistory)
        }
    }

    /// Whether `full` is some text, then `suffix`, in letters and in tokens.
    fn compare(
        &self,
        full: &str,
        suffix: &str,
        answer: &str,
        answer_ends: bool,
    ) -> Result<(), NotExtendable> {
        let before = full
            .strip_suffix(suffix)
            .ok_or(NotExtendable::DependsOnHistory)?;
        if answer_ends && !before.ends_with(answer) {
            return Err(NotExtendable::AnswerNotVerbatim);
        }
        let encode = |text| {
            self.tokenizer()
                .encode(text)
                .map_err(|error| NotExtendable::TemplateFailed(error.to_string()))
        };
        let mut ids = encode(before)?;
        ids.extend(self.encode_suffix(suffix)?);
        if ids == encode(full)? {
            Ok(())
        } else {
            Err(NotExtendable::TokensMerge)
        }
    }
}
