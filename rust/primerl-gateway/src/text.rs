//! Converts sampled ids to what the client gets, whole or in pieces: parsed, and cut at stop sequences.

use super::request::{Options, Parse, TurnRequest};
use primerl_core::conversation::digest_next;
use primerl_render::{
    AnswerContext, AnswerStream, Content, DecodeState, Message, RenderError, Renderer,
    StreamDecoder,
};
use std::sync::Arc;

/// What sampled tokens add to an answer.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Delta {
    Reasoning(String),
    Content(String),
    ToolCall {
        index: usize,
        id: String,
        name: String,
        /// JSON text.
        arguments: String,
    },
}

/// How sampled ids are converted to what the client gets.
#[derive(Debug)]
pub(crate) struct Reading {
    pub parse: Parse,
    /// Template options of a request with messages.
    pub options: Option<Arc<Options>>,
    /// Whether the prompt ends within reasoning.
    pub starts_in_reasoning: bool,
    /// The text ends before the first of these.
    pub stop: Vec<String>,
    /// Digest of the request; the ids of tool calls are derived from it.
    pub request_digest: u128,
}

/// An answer after parsing.
#[derive(Debug)]
pub(crate) struct Read {
    pub message: Message,
    /// The stop sequence that ended it.
    pub stop: Option<String>,
    /// Why parts of the text that look like tool calls are shown as text.
    pub malformed: Vec<String>,
}

impl Reading {
    /// `suffix`: the last ids of the prompt, including the generation prompt.
    pub(crate) fn new(
        renderer: &Renderer,
        request: &TurnRequest,
        options: Option<Arc<Options>>,
        suffix: &[u32],
    ) -> Reading {
        let is_message = matches!(request.parse, Parse::Message { .. });
        Reading {
            parse: request.parse,
            options,
            starts_in_reasoning: is_message && renderer.starts_in_reasoning(suffix),
            stop: request.sampling.stop.clone(),
            request_digest: request.digest,
        }
    }

    fn context(&self) -> AnswerContext<'_> {
        let options = self.options.as_ref();
        AnswerContext {
            tools: options.and_then(|options| options.render.tools.as_deref()),
            starts_in_reasoning: self.starts_in_reasoning,
        }
    }

    fn shows_call(&self, index: usize) -> bool {
        index == 0 || self.parse != (Parse::Message { one_call: true })
    }

    pub(crate) fn read(
        &self,
        renderer: &Renderer,
        sampled: &[u32],
        choice: usize,
    ) -> Result<Read, RenderError> {
        let (mut message, malformed) = self.parse(renderer, sampled)?;
        if let Some(calls) = &mut message.tool_calls {
            calls.truncate(if self.shows_call(1) { calls.len() } else { 1 });
            for (index, call) in calls.iter_mut().enumerate() {
                let id = || self.call_id(choice, index);
                call.id.get_or_insert_with(id);
            }
        }
        let stop = match cut_message(&mut message, &self.stop) {
            // The stop sequence may be between two parts of a message, and not be shown anywhere.
            None if self.parse != Parse::Text => self.sampled_stop(renderer, sampled)?,
            stop => stop,
        };
        Ok(Read {
            message,
            stop,
            malformed,
        })
    }

    /// The message, and why parts of it that look like tool calls are text.
    fn parse(
        &self,
        renderer: &Renderer,
        sampled: &[u32],
    ) -> Result<(Message, Vec<String>), RenderError> {
        match self.parse {
            Parse::Text => {
                let text = renderer.tokenizer().decode(sampled, true)?;
                Ok((Message::assistant(text), Vec::new()))
            }
            Parse::Message { .. } => {
                let parsed = renderer.parse_answer(sampled, &self.context())?;
                let reasons = parsed.malformed.iter().map(|call| call.reason.to_string());
                Ok((parsed.message, reasons.collect()))
            }
        }
    }

    fn sampled_stop(
        &self,
        renderer: &Renderer,
        sampled: &[u32],
    ) -> Result<Option<String>, RenderError> {
        if self.stop.is_empty() {
            return Ok(None);
        }
        let text = renderer.tokenizer().decode(sampled, true)?;
        Ok(first_stop(&text, &self.stop).map(|(_, sequence)| sequence.clone()))
    }

    /// The id for a tool call to which the model gave none: the same each time the same answer is shown. Nine letters
    /// and digits, because some templates require that.
    fn call_id(&self, choice: usize, index: usize) -> String {
        const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
        let mut hash = digest_next(self.request_digest, (choice << 32 | index) as u128);
        let mut digit = || {
            let digit = DIGITS[(hash % 36) as usize];
            hash /= 36;
            char::from(digit)
        };
        (0..9).map(|_| digit()).collect()
    }
}

/// The text of one choice, as far as it is final.
pub(crate) struct ChoiceText {
    reading: Arc<Reading>,
    choice: usize,
    parser: Parser,
    content: StopCut,
    reasoning: StopCut,
    /// Number of tokens added so far.
    pub tokens: usize,
}

enum Parser {
    Message(Box<AnswerStream>),
    Text(Box<DecodeState>),
}

impl ChoiceText {
    pub(crate) fn new(renderer: &Renderer, reading: &Arc<Reading>, choice: usize) -> ChoiceText {
        let parser = match reading.parse {
            Parse::Message { .. } => {
                Parser::Message(Box::new(renderer.answer_stream(&reading.context())))
            }
            Parse::Text => Parser::Text(Box::new(DecodeState::new(true))),
        };
        ChoiceText {
            reading: Arc::clone(reading),
            choice,
            parser,
            content: StopCut::new(&reading.stop),
            reasoning: StopCut::new(&reading.stop),
            tokens: 0,
        }
    }

    pub(crate) fn push(
        &mut self,
        renderer: &Renderer,
        ids: &[u32],
    ) -> Result<Vec<Delta>, RenderError> {
        self.tokens += ids.len();
        let deltas = match &mut self.parser {
            Parser::Message(stream) => stream.push(renderer, ids)?,
            Parser::Text(decoder) => {
                let mut text = String::new();
                for &id in ids {
                    decoder.push(renderer.tokenizer(), id, &mut text)?;
                }
                vec![primerl_render::Delta::Content(text)]
            }
        };
        Ok(self.cut(deltas))
    }

    /// Returns the text that was held back.
    pub(crate) fn finish(&mut self, renderer: &Renderer) -> Result<Vec<Delta>, RenderError> {
        let nothing = Parser::Text(Box::default());
        let rest = match std::mem::replace(&mut self.parser, nothing) {
            Parser::Message(stream) => stream.finish(renderer)?.0,
            Parser::Text(decoder) => {
                let mut text = String::new();
                decoder.finish(renderer.tokenizer(), &mut text)?;
                vec![primerl_render::Delta::Content(text)]
            }
        };
        let mut deltas = self.cut(rest);
        deltas.push(Delta::Reasoning(self.reasoning.finish()));
        deltas.push(Delta::Content(self.content.finish()));
        deltas.retain(|delta| !delta.is_empty());
        Ok(deltas)
    }

    fn cut(&mut self, deltas: Vec<primerl_render::Delta>) -> Vec<Delta> {
        use primerl_render::Delta as Read;
        let shown = |delta| match delta {
            Read::Content(text) => Some(Delta::Content(self.content.push(text))),
            Read::Reasoning(text) => Some(Delta::Reasoning(self.reasoning.push(text))),
            Read::ToolCall {
                index,
                id,
                name,
                arguments,
            } => self.reading.shows_call(index).then(|| Delta::ToolCall {
                index,
                id: id.unwrap_or_else(|| self.reading.call_id(self.choice, index)),
                name,
                arguments,
            }),
        };
        let mut deltas: Vec<Delta> = deltas.into_iter().filter_map(shown).collect();
        deltas.retain(|delta| !delta.is_empty());
        deltas
    }
}

impl Delta {
    fn is_empty(&self) -> bool {
        match self {
            Delta::Reasoning(text) | Delta::Content(text) => text.is_empty(),
            Delta::ToolCall { .. } => false,
        }
    }
}

/// Looks for stop sequences in tokens as they arrive.
pub(crate) struct StopFinder<'a> {
    decoder: StreamDecoder<'a>,
    stop: &'a [String],
    /// The end of the text, in which a sequence may begin.
    tail: String,
    longest: usize,
    tokens: usize,
}

impl<'a> StopFinder<'a> {
    pub(crate) fn new(renderer: &'a Renderer, stop: &'a [String]) -> StopFinder<'a> {
        StopFinder {
            decoder: renderer.tokenizer().decode_stream(true),
            stop,
            tail: String::new(),
            longest: stop.iter().map(String::len).max().unwrap_or(0),
            tokens: 0,
        }
    }

    /// The number of tokens through the one that completes a sequence, if there is one.
    pub(crate) fn push(&mut self, ids: &[u32]) -> Result<Option<usize>, RenderError> {
        for &id in ids {
            self.tokens += 1;
            self.tail.push_str(&self.decoder.push(id)?);
            if first_stop(&self.tail, self.stop).is_some() {
                return Ok(Some(self.tokens));
            }
            let mut cut = self.tail.len().saturating_sub(self.longest);
            while !self.tail.is_char_boundary(cut) {
                cut -= 1;
            }
            self.tail.drain(..cut);
        }
        Ok(None)
    }
}

/// The position of the first stop sequence, and which one it is.
fn first_stop<'s>(text: &str, stop: &'s [String]) -> Option<(usize, &'s String)> {
    let found = |sequence: &'s String| text.find(sequence.as_str()).map(|at| (at, sequence));
    stop.iter().filter_map(found).min_by_key(|(at, _)| *at)
}

/// Cuts a message before its first stop sequence; returns that sequence.
pub(crate) fn cut_message(message: &mut Message, stop: &[String]) -> Option<String> {
    let texts = [
        match &mut message.content {
            Content::Text(text) => Some(text),
            _ => None,
        },
        message.reasoning_content.as_mut(),
    ];
    texts.into_iter().flatten().find_map(|text| {
        let (at, sequence) = first_stop(text, stop)?;
        text.truncate(at);
        Some(sequence.clone())
    })
}

/// Cuts a text that arrives in pieces before its first stop sequence.
#[derive(Debug)]
pub(crate) struct StopCut {
    stop: Vec<String>,
    /// Text that may be the beginning of a sequence.
    held: String,
    ended: bool,
}

impl StopCut {
    pub(crate) fn new(stop: &[String]) -> StopCut {
        StopCut {
            stop: stop.to_vec(),
            held: String::new(),
            ended: false,
        }
    }

    /// Returns what may be shown now.
    pub(crate) fn push(&mut self, text: String) -> String {
        if self.stop.is_empty() {
            return text;
        }
        if self.ended {
            return String::new();
        }
        self.held.push_str(&text);
        if let Some((at, _)) = first_stop(&self.held, &self.stop) {
            self.ended = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let begins_a_stop =
            |from: &usize| self.stop.iter().any(|s| s.starts_with(&self.held[*from..]));
        let from = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(begins_a_stop)
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(from);
        std::mem::replace(&mut self.held, rest)
    }

    /// Returns the text that was held back but is no stop sequence.
    pub(crate) fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests;
