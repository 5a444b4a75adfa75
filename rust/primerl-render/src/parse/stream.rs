//! An answer that arrives id by id.

use super::choice::ParserChoice;
use super::cut::Cut;
use super::machine::Machine;
use super::newlines::Newlines;
use super::parsers::harmony::Harmony;
use super::{AnswerContext, Delta, Parsed, Segment, SegmentKind};
use crate::error::RenderError;
use crate::message::{Content, Message};
use crate::template::RenderOptions;
use crate::tokenizer::{DecodeState, Tokenizer};
use std::ops::Range;

/// What the parsers of a model need to know, learned when it is loaded.
pub(crate) struct AnswerParser {
    choice: ParserChoice,
    newlines: Newlines,
    /// Special tokens that are no markers of tool calls, by id, with their text.
    hidden: Vec<(u32, Box<str>)>,
}

impl AnswerParser {
    pub fn new(choice: ParserChoice, tokenizer: &Tokenizer) -> Self {
        let mut hidden: Vec<_> = tokenizer
            .added_tokens()
            .filter(|token| token.special && !choice.has_marker(&token.content))
            .map(|token| (token.id, token.content.as_str().into()))
            .collect();
        hidden.sort_unstable_by_key(|(id, _)| *id);
        Self {
            choice,
            newlines: Newlines::USUAL,
            hidden,
        }
    }

    /// Looks at what the model's template writes around reasoning and calls.
    pub fn learn(&self, render: impl Fn(&[Message], &RenderOptions) -> Option<String>) -> Newlines {
        Newlines::learn(render, self.choice.think(), self.choice.tool)
    }

    pub fn set_newlines(&mut self, newlines: Newlines) {
        self.newlines = newlines;
    }

    pub fn newlines(&self) -> Newlines {
        self.newlines
    }

    pub fn choice(&self) -> ParserChoice {
        self.choice
    }

    /// Whether text that ends a prompt leaves the model in reasoning.
    pub fn opens_reasoning(&self, prompt_tail: &str) -> bool {
        let tail = prompt_tail.trim_end();
        match self.choice.think() {
            Some(think) => tail.ends_with(think.open),
            None => {
                self.choice.reads_harmony_reasoning()
                    && tail.ends_with("<|channel|>analysis<|message|>")
            }
        }
    }

    fn hidden_text(&self, id: u32) -> Option<&str> {
        let found = self.hidden.binary_search_by_key(&id, |(id, _)| *id);
        found.ok().map(|place| &*self.hidden[place].1)
    }
}

/// What is needed to read the ids of a model's answers.
#[derive(Clone, Copy)]
pub(crate) struct AnswerModel<'a> {
    pub parser: &'a AnswerParser,
    pub tokenizer: &'a Tokenizer,
    /// Ascending.
    pub stop_token_ids: &'a [u32],
}

/// Cuts the text of an answer.
pub(super) enum Engine {
    Machine(Machine),
    Harmony(Harmony),
}

impl Engine {
    pub fn new(choice: ParserChoice, newlines: Newlines, context: &AnswerContext<'_>) -> Self {
        if choice.is_harmony() {
            Engine::Harmony(Harmony::new(
                choice.reads_harmony_reasoning(),
                choice.reads_harmony_calls()
                    && context.tools.is_some_and(|tools| !tools.is_empty()),
                context.starts_in_reasoning,
            ))
        } else {
            Engine::Machine(Machine::new(choice, newlines, context))
        }
    }

    pub fn run(&mut self, cut: &mut Cut, is_end: bool) {
        match self {
            Engine::Machine(machine) => machine.run(cut, is_end),
            Engine::Harmony(harmony) => harmony.run(cut, is_end),
        }
    }
}

/// Parses an answer while it is sampled. It borrows nothing: each call takes the renderer that made it.
///
/// The deltas of all calls add up to the message of [`AnswerStream::finish`], and both are the same for any split of the
/// ids. Time is linear in the length of the answer.
pub struct AnswerStream {
    engine: Engine,
    cut: Cut,
    decoder: DecodeState,
    /// What each token is in the text; a token that ends within a character touches the character.
    tokens: Vec<Range<usize>>,
    /// A stop token that ends the answer unless another id follows.
    stop_token: Option<u32>,
}

impl AnswerStream {
    pub(crate) fn new(parser: &AnswerParser, context: &AnswerContext<'_>) -> Self {
        let engine = Engine::new(parser.choice, parser.newlines, context);
        Self {
            engine,
            cut: Cut::default(),
            decoder: DecodeState::default(),
            tokens: Vec::new(),
            stop_token: None,
        }
    }

    pub(crate) fn take(
        &mut self,
        model: AnswerModel<'_>,
        ids: &[u32],
    ) -> Result<Vec<Delta>, RenderError> {
        self.cut.text.reserve(ids.len() * 4);
        self.tokens.reserve(ids.len());
        for &id in ids {
            if let Some(id) = self.stop_token.take() {
                self.decode(model, id)?;
            }
            match model.stop_token_ids.binary_search(&id).is_ok() {
                true => self.stop_token = Some(id),
                false => self.decode(model, id)?,
            }
        }
        self.engine.run(&mut self.cut, false);
        Ok(self.cut.take_deltas())
    }

    pub(crate) fn end(
        mut self,
        tokenizer: &Tokenizer,
    ) -> Result<(Vec<Delta>, Parsed), RenderError> {
        std::mem::take(&mut self.decoder).finish(tokenizer, &mut self.cut.text)?;
        self.cut.is_complete = self.stop_token.is_some();
        self.engine.run(&mut self.cut, true);
        let deltas = self.cut.take_deltas();
        let message = self.message();
        let segments = self.segments();
        let parsed = Parsed {
            message,
            text: self.cut.text,
            segments,
            malformed: self.cut.malformed,
            stop_token: self.stop_token,
        };
        Ok((deltas, parsed))
    }

    fn decode(&mut self, model: AnswerModel<'_>, id: u32) -> Result<(), RenderError> {
        let text = &mut self.cut.text;
        let start = text.len();
        self.decoder.push(model.tokenizer, id, text)?;
        let end = text.len() + usize::from(self.decoder.holds_back());
        self.tokens.push(start..end);
        if let Some(token) = model.parser.hidden_text(id)
            && text[start..].ends_with(token)
        {
            self.cut.mark_special(token.len());
        }
        Ok(())
    }

    fn message(&mut self) -> Message {
        let text_of = |kind| {
            let of_kind = self.cut.segments.iter().filter(|(found, _)| *found == kind);
            of_kind
                .map(|(_, range)| &self.cut.text[range.clone()])
                .collect::<String>()
        };
        let (content, reasoning) = (
            text_of(SegmentKind::Content),
            text_of(SegmentKind::Reasoning),
        );
        let calls = std::mem::take(&mut self.cut.calls);
        Message {
            role: "assistant".to_owned(),
            content: match content.is_empty() && !calls.is_empty() {
                true => Content::Null,
                false => Content::Text(content),
            },
            reasoning_content: (!reasoning.is_empty()).then_some(reasoning),
            tool_calls: (!calls.is_empty()).then_some(calls),
            ..Message::default()
        }
    }

    fn segments(&mut self) -> Vec<Segment> {
        let mut cuts = std::mem::take(&mut self.cut.segments);
        // Tokens without text belong to the segment before them.
        if cuts.is_empty() && !self.tokens.is_empty() {
            cuts.push((SegmentKind::Hidden, 0..0));
        }
        let last = cuts.len().saturating_sub(1);
        let mut covered = 0;
        let segment = |(index, (kind, text_range)): (usize, (SegmentKind, Range<usize>))| {
            let first = self
                .tokens
                .partition_point(|token| token.end <= text_range.start);
            let end = match index == last {
                true => self.tokens.len(),
                false => self
                    .tokens
                    .partition_point(|token| token.start < text_range.end),
            };
            let token_range = first.min(covered)..end;
            covered = end;
            Segment {
                kind,
                text_range,
                token_range,
            }
        };
        cuts.into_iter().enumerate().map(segment).collect()
    }
}
