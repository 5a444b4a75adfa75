//! Token ids with a mask of what the assistant wrote, for supervised training.
//!
//! The mask covers the answers and the stop token that ends each, not the white space after it. Templates with
//! `{% generation %}` blocks say it themselves. For the others each answer is located by rendering: the text before it
//! must be a prefix of the whole, and so must the text through it; where a template changes an earlier answer by what
//! follows (Qwen3), the text around a sentinel in its place must be the text around the answer. What cannot be located
//! in this way is an error that names the message. Of an answer whose prompt the whole does not begin with, only the
//! content and what follows it are proven: the empty thinking that Qwen3 writes before the second of two answers in a row
//! might as well be the prompt's (without thinking it is), and is not in the mask.

use crate::error::{MaskFailure, RenderError};
use crate::message::{Content, Message};
use crate::neutral::{Neutralized, Restored};
use crate::renderer::Renderer;
use crate::template::{RenderOptions, SPAN_END, SPAN_START};
use std::ops::Range;

const SENTINEL: &str = "zPrimerlMaskSentinelz";

/// A rendered conversation; `ids` and `mask` have one entry per token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MaskedIds {
    pub ids: Vec<u32>,
    /// 1 where the assistant wrote the token, else 0.
    pub mask: Vec<u8>,
    /// What the ids encode, as the template writes it.
    pub text: String,
}

/// Bytes of the rendered text that belong to messages[message].
struct Span {
    message: usize,
    bytes: Range<usize>,
}

impl Span {
    /// `boundaries`: `(byte, token)` for every token that may begin or end a span.
    fn tokens(&self, boundaries: &[(usize, usize)]) -> Result<Range<usize>, RenderError> {
        let token_at = |byte: usize| {
            boundaries
                .binary_search_by_key(&byte, |(at, _)| *at)
                .map(|found| boundaries[found].1)
                .map_err(|_| RenderError::Mask {
                    message: self.message,
                    reason: MaskFailure::TokenAcrossBoundary,
                })
        };
        Ok(token_at(self.bytes.start)?..token_at(self.bytes.end)?)
    }
    /// The span in the text that was rendered with sentinels.
    fn restored(self, restored: &Restored) -> Result<Span, RenderError> {
        let Span { message, bytes } = self;
        let ends = restored
            .text_at(bytes.start)
            .zip(restored.text_at(bytes.end));
        let (start, end) = ends.ok_or(RenderError::Mask {
            message,
            reason: MaskFailure::TokenAcrossBoundary,
        })?;
        let bytes = start..end;
        Ok(Span { message, bytes })
    }
}

/// The ids of the text up to a byte, where it can be encoded by itself.
type EncodeHead<'a> = dyn Fn(usize) -> Result<Option<Vec<u32>>, RenderError> + 'a;

impl Renderer {
    /// Ids of the whole conversation (those of [`Renderer::render`] without a generation prompt) and the mask of its
    /// assistant messages. `options.add_generation_prompt` does not matter.
    pub fn render_with_mask(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<MaskedIds, RenderError> {
        let options = RenderOptions {
            add_generation_prompt: false,
            ..options.clone()
        };
        if let Some(neutral) = self.neutralized(messages, &options) {
            return self.neutral_with_mask(messages, &options, &neutral);
        }
        let text = self.render_text(messages, &options)?;
        let spans = self.spans(&text, messages, &options)?;
        let ids = self.tokenizer().encode(&text)?;
        let head = |byte: usize| self.tokenizer().encode(&text[..byte]).map(Some);
        let mask = self.token_mask(&text, &ids, &spans, &head)?;
        Ok(MaskedIds { ids, mask, text })
    }

    /// Stop tokens in the text of messages would be taken for the template's: located without them.
    fn neutral_with_mask(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        neutral: &Neutralized,
    ) -> Result<MaskedIds, RenderError> {
        let rendered = self.render_text(&neutral.messages, &neutral.options)?;
        let spans = self.spans(&rendered, &neutral.messages, &neutral.options)?;
        let (ids, restored) = self.encode_neutralized(messages, options, neutral)?;
        let spans = spans.into_iter().map(|span| span.restored(&restored));
        let spans = spans.collect::<Result<Vec<_>, RenderError>>()?;
        let head = |byte: usize| self.encode_head(&restored, byte);
        let mask = self.token_mask(&restored.text, &ids, &spans, &head)?;
        let text = restored.text;
        Ok(MaskedIds { ids, mask, text })
    }

    /// Where in the rendered text the assistant's messages are.
    fn spans(
        &self,
        text: &str,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Vec<Span>, RenderError> {
        if self.template_for(options).has_generation_blocks() {
            return self.marked_spans(text, messages, options);
        }
        (0..messages.len())
            .filter(|&index| messages[index].is_assistant())
            .map(|index| self.located_span(text, messages, index, options))
            .collect()
    }

    /// [`Renderer::trainable`] and [`Renderer::render_with_mask`] for many conversations, on all cores. The error names
    /// the conversation.
    pub fn render_many_trainable(
        &self,
        conversations: &[Vec<Message>],
        options: &RenderOptions,
    ) -> Result<Vec<MaskedIds>, RenderError> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let share = conversations.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let chunks = (0..).step_by(share).zip(conversations.chunks(share));
            let handles: Vec<_> = chunks
                .map(|(first, chunk)| {
                    scope.spawn(move || self.trainable_from(first, chunk, options))
                })
                .collect();
            let mut rendered = Vec::with_capacity(conversations.len());
            for handle in handles {
                match handle.join() {
                    Ok(part) => rendered.extend(part?),
                    Err(panic) => std::panic::resume_unwind(panic),
                }
            }
            Ok(rendered)
        })
    }

    /// `first`: the number of the first conversation, for the error.
    fn trainable_from(
        &self,
        first: usize,
        conversations: &[Vec<Message>],
        options: &RenderOptions,
    ) -> Result<Vec<MaskedIds>, RenderError> {
        let one = |(conversation, messages): (usize, &Vec<Message>)| {
            let messages = self.trainable(messages.clone(), options);
            let rendered = messages.and_then(|messages| self.render_with_mask(&messages, options));
            rendered.map_err(|source| RenderError::Conversation {
                conversation,
                source: Box::new(source),
            })
        };
        (first..).zip(conversations).map(one).collect()
    }

    fn marked_spans(
        &self,
        text: &str,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Vec<Span>, RenderError> {
        for marker in [SPAN_START, SPAN_END] {
            if text.contains(marker) {
                return Err(RenderError::ReservedMarker(marker));
            }
        }
        let assistants: Vec<usize> = (0..messages.len())
            .filter(|&index| messages[index].is_assistant())
            .collect();
        let template = self.template_for(options);
        let marked = template.render_prepared(messages, &self.prepared.prepare(options), true)?;
        let (plain, spans) = split_marked(&marked, &assistants)?;
        // The template worked on the text of a block after it was closed: the marks say nothing.
        if plain != text {
            return Err(failed(&assistants, 0, MaskFailure::Rewritten));
        }
        if spans.len() < assistants.len() {
            return Err(failed(&assistants, spans.len(), MaskFailure::Dropped));
        }
        Ok(spans)
    }

    fn located_span(
        &self,
        text: &str,
        messages: &[Message],
        index: usize,
        options: &RenderOptions,
    ) -> Result<Span, RenderError> {
        let prompt_options = RenderOptions {
            add_generation_prompt: true,
            ..options.clone()
        };
        // A refusal (no messages yet, an odd last role) is no proof, as is a text that is not a prefix.
        let prefix = |rendered: Result<String, RenderError>| {
            rendered.ok().filter(|part| text.starts_with(part))
        };
        let before =
            prefix(self.render_text(&messages[..index], &prompt_options)).map(|part| part.len());
        let through = prefix(self.render_text(&messages[..=index], options)).map(|part| part.len());
        let failure = |reason| RenderError::Mask {
            message: index,
            reason,
        };
        let (start, end) = match (before, through) {
            (Some(before), Some(through)) if through >= before => (before, through),
            (before, _) => {
                let (content, end) = self.around_sentinel(text, messages, index, options)?;
                let end = end.or_else(|| self.end_by_what_follows(text, messages, index, options));
                let start = before.into_iter().chain(content).min();
                let span = start.zip(end).filter(|(start, end)| start <= end);
                span.ok_or_else(|| failure(MaskFailure::Rewritten))?
            }
        };
        let end = self.end_with_stop_token(text, start..end);
        if start == end {
            return Err(failure(MaskFailure::Dropped));
        }
        Ok(Span {
            message: index,
            bytes: start..end,
        })
    }

    /// Where the turn of messages[index] ends: the text that closes it and holds the later messages is the same after
    /// a short conversation (as for an extension), and `text` ends with it.
    fn end_by_what_follows(
        &self,
        text: &str,
        messages: &[Message],
        index: usize,
        options: &RenderOptions,
    ) -> Option<usize> {
        let after = self
            .suffix_text(
                &messages[index],
                &messages[index + 1..],
                &self.prepared.prepare(options),
            )
            .ok()?;
        let (_, stop) = self.leading_stop_token(&after)?;
        text.strip_suffix(after.as_str())
            .map(|before| before.len() + stop)
    }

    /// Where the content of messages[index] begins, and where its turn ends, found by putting a sentinel in its place;
    /// each `None` when that changes the text before it, or around it (calls behind no content follow without a line's
    /// end, say).
    fn around_sentinel(
        &self,
        text: &str,
        messages: &[Message],
        index: usize,
        options: &RenderOptions,
    ) -> Result<(Option<usize>, Option<usize>), RenderError> {
        let mut replaced = messages.to_vec();
        replaced[index].content = Content::Text(SENTINEL.to_owned());
        let rendered = self.render_text(&replaced, options)?;
        let mut pieces = rendered.split(SENTINEL);
        let (Some(before), Some(after), None) = (pieces.next(), pieces.next(), pieces.next())
        else {
            return Ok((None, None));
        };
        let content = text.starts_with(before).then_some(before.len());
        let around =
            before.len() + after.len() <= text.len() && content.is_some() && text.ends_with(after);
        let content_end = text.len() - after.len().min(text.len());
        let close = self
            .stop_token_texts()
            .filter_map(|(_, stop)| after.find(stop).map(|at| (at, at + stop.len())))
            .min_by_key(|(at, end)| (*at, usize::MAX - *end));
        // Between plain content and its stop token nothing may stand; tool calls may.
        let closed =
            close.filter(|(at, _)| around && (*at == 0 || messages[index].has_tool_calls()));
        Ok((content, closed.map(|(_, end)| content_end + end)))
    }

    /// `span` up to its last stop token, when only white space follows there; else a stop token right behind the span is
    /// taken in (GLM ends an answer with the next role's marker).
    fn end_with_stop_token(&self, text: &str, span: Range<usize>) -> usize {
        let inside = &text[span.clone()];
        let last = self
            .stop_token_texts()
            .filter_map(|(_, stop)| inside.rfind(stop).map(|at| at + stop.len()))
            .max();
        let closed = last.filter(|end| inside[*end..].trim().is_empty());
        match (closed, self.leading_stop_token(&text[span.end..])) {
            (Some(end), _) => span.start + end,
            (None, Some((_, length))) => span.end + length,
            (None, None) => span.end,
        }
    }

    fn token_mask(
        &self,
        text: &str,
        ids: &[u32],
        spans: &[Span],
        encode_head: &EncodeHead<'_>,
    ) -> Result<Vec<u8>, RenderError> {
        let boundaries = match self.byte_boundaries(text, ids) {
            Some(boundaries) => boundaries,
            None => boundaries_by_prefix(ids, spans, encode_head)?,
        };
        let mut mask = vec![0; ids.len()];
        for span in spans {
            mask[span.tokens(&boundaries)?].fill(1);
        }
        Ok(mask)
    }

    /// `(byte, token)` for every token that begins at that byte, and for the end. `None` unless the tokens' bytes are the
    /// text: a normalizer may have changed it.
    pub(crate) fn byte_boundaries(&self, text: &str, ids: &[u32]) -> Option<Vec<(usize, usize)>> {
        let mut boundaries = Vec::with_capacity(ids.len() + 1);
        let mut at = 0;
        for (token, &id) in ids.iter().enumerate() {
            boundaries.push((at, token));
            let bytes = self.tokenizer().bytes_of(id)?;
            if !text.as_bytes().get(at..)?.starts_with(bytes) || bytes.is_empty() {
                return None;
            }
            at += bytes.len();
        }
        boundaries.push((at, ids.len()));
        (at == text.len()).then_some(boundaries)
    }
}

/// The assistant's message that the nth marked block is of.
fn nth_or_last(assistants: &[usize], nth: usize) -> usize {
    let message = assistants.get(nth).or(assistants.last());
    message.copied().unwrap_or(0)
}

fn failed(assistants: &[usize], nth: usize, reason: MaskFailure) -> RenderError {
    let message = nth_or_last(assistants, nth);
    RenderError::Mask { message, reason }
}

/// The text without its marks, and what they enclosed.
fn split_marked(marked: &str, assistants: &[usize]) -> Result<(String, Vec<Span>), RenderError> {
    let mut plain = String::with_capacity(marked.len());
    let mut spans = Vec::new();
    for (nth, piece) in marked.split(SPAN_START).enumerate() {
        let (inside, outside) = match piece.split_once(SPAN_END) {
            Some(parts) => parts,
            None if nth == 0 => ("", piece),
            None => return Err(failed(assistants, nth - 1, MaskFailure::Rewritten)),
        };
        if nth > 0 {
            spans.push(Span {
                message: nth_or_last(assistants, nth - 1),
                bytes: plain.len()..plain.len() + inside.len(),
            });
        }
        plain.push_str(inside);
        plain.push_str(outside);
    }
    Ok((plain, spans))
}

/// `(byte, token)` for the spans' ends only, by encoding the text before each: its ids must begin the ids of the whole.
fn boundaries_by_prefix(
    ids: &[u32],
    spans: &[Span],
    encode_head: &EncodeHead<'_>,
) -> Result<Vec<(usize, usize)>, RenderError> {
    let mut boundaries = Vec::new();
    for span in spans {
        for byte in [span.bytes.start, span.bytes.end] {
            match encode_head(byte)? {
                Some(head) if ids.starts_with(&head) => boundaries.push((byte, head.len())),
                _ => {}
            }
        }
    }
    boundaries.sort_unstable();
    Ok(boundaries)
}
