//! Answers of the model: parsed as they come, and the grammar of those that must call a tool.

use super::Renderer;
use crate::error::RenderError;
use crate::message::Message;
use crate::parse::{
    AnswerContext, AnswerModel, AnswerStream, CallGrammars, Delta, Demand, DemandError, Newlines,
    Parsed, trailing,
};
use crate::template::RenderOptions;

/// Tokens of a prompt that are looked at for an opened reasoning block; enough for the longest marker byte by byte.
const PROMPT_TAIL: usize = 48;

impl Renderer {
    /// The assistant message that `sampled` stands for, for a request without tools whose prompt opened no reasoning.
    pub fn parse(&self, sampled: &[u32]) -> Result<Message, RenderError> {
        Ok(self
            .parse_answer(sampled, &AnswerContext::default())?
            .message)
    }

    /// The assistant message that `sampled` stands for, and which tokens became what.
    pub fn parse_answer(
        &self,
        sampled: &[u32],
        context: &AnswerContext<'_>,
    ) -> Result<Parsed, RenderError> {
        let mut stream = self.answer_stream(context);
        stream.push(self, sampled)?;
        Ok(stream.finish(self)?.1)
    }

    /// A parser for an answer that is still being sampled.
    pub fn answer_stream(&self, context: &AnswerContext<'_>) -> AnswerStream {
        AnswerStream::new(&self.parser, context)
    }

    /// Whether the generation prompt at the end of `prompt` opened a reasoning block.
    pub fn starts_in_reasoning(&self, prompt: &[u32]) -> bool {
        self.parser.opens_reasoning(&self.prompt_tail(prompt))
    }

    /// The end of the prompt as text; empty where it cannot be decoded.
    pub(crate) fn prompt_tail(&self, prompt: &[u32]) -> String {
        let tail = &prompt[prompt.len().saturating_sub(PROMPT_TAIL)..];
        self.tokenizer.decode(tail, false).unwrap_or_default()
    }

    /// The newlines that the model's template writes around reasoning and calls.
    pub(super) fn learn_newlines(&self) -> Newlines {
        let render = |messages: &[Message], options: &RenderOptions| {
            self.render_text(messages, options).ok()
        };
        self.parser.learn(render)
    }

    fn answer_model(&self) -> AnswerModel<'_> {
        AnswerModel {
            parser: &self.parser,
            tokenizer: &self.tokenizer,
            stop_token_ids: &self.stop_token_ids,
        }
    }

    /// The grammar of an answer that is calls, or JSON where the demand allows it. Reasoning is not in it, unless it is a
    /// channel of the answer.
    ///
    /// # Errors
    /// The model's calls have no grammar, the demand names no tool, or a tool's schema cannot be written in the syntax
    /// of the model's calls.
    pub fn call_grammar(&self, demand: &Demand<'_>) -> Result<String, DemandError> {
        let grammars = CallGrammars {
            parsers: self.parsers(),
            tokenizer: &self.tokenizer,
            is_in_template: &|text| self.template_sources_contain(text),
            starts_in_reasoning: self.starts_in_reasoning(demand.prompt),
        };
        grammars.of(demand)
    }

    /// The markers of a reasoning block that may, or does, come before the rest of an answer to this prompt: the opening
    /// one, where the prompt has not opened the block, and the closing one. The opening one has the newlines that the
    /// template writes before it and the prompt does not end with. `None`: no block comes, or [`Demand`] says all.
    pub fn reasoning_ahead(&self, prompt: &[u32]) -> Option<(Option<String>, &'static str)> {
        let think = self
            .parsers()
            .think()
            .filter(|_| !self.parsers().is_harmony())?;
        if self.starts_in_reasoning(prompt) {
            return Some((None, think.close));
        }
        let tail = self.prompt_tail(prompt);
        if tail.trim_end().ends_with(think.close) {
            return None;
        }
        let written = self.parser.newlines().before_open;
        let missing = written.saturating_sub(trailing(&tail));
        Some((Some("\n".repeat(missing) + think.open), think.close))
    }
}

impl AnswerStream {
    /// Takes the next sampled ids; returns what is certain by now.
    pub fn push(&mut self, renderer: &Renderer, ids: &[u32]) -> Result<Vec<Delta>, RenderError> {
        self.take(renderer.answer_model(), ids)
    }

    /// The answer is over: the remaining deltas, and all of it.
    pub fn finish(self, renderer: &Renderer) -> Result<(Vec<Delta>, Parsed), RenderError> {
        self.end(&renderer.tokenizer)
    }
}
