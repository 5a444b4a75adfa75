//! An answer of another model, as this model would have written it: the ids from the end of the prompt on.
//!
//! A short conversation is rendered with the generation prompt and with the answer. Where the first is the beginning of
//! the second, what follows is the answer, and its ids go behind any prompt that ends with a generation prompt. Where it
//! is not (a template that opens a reasoning block in the prompt and leaves reasoning out of answers, say), the whole
//! conversation is rendered, and the mask of its last answer tells prompt from answer.

use crate::error::{MaskFailure, RenderError};
use crate::mask::MaskedIds;
use crate::message::Message;
use crate::renderer::Renderer;
use crate::template::RenderOptions;

impl Renderer {
    /// The ids of `answer` behind a prompt, its stop token included; without it where the answer `was_cut`, for then it
    /// has no end. Takes time in the length of the answer (and the tools). `None` where the template begins the answer
    /// otherwise than it ends the prompt; then [`Renderer::prompt_and_answer`] says how it writes both.
    pub fn answer_ids(
        &self,
        answer: &Message,
        was_cut: bool,
        options: &RenderOptions,
    ) -> Result<Option<Vec<u32>>, RenderError> {
        let with = |add_generation_prompt| RenderOptions {
            add_generation_prompt,
            ..options.clone()
        };
        let asked = Message::user("x");
        let prompt = self.render_text(std::slice::from_ref(&asked), &with(true))?;
        let whole = self.render_text(&[asked, answer.clone()], &with(false))?;
        let Some(written) = whole.strip_prefix(&prompt) else {
            return Ok(None);
        };
        if !says_all(written, answer) {
            return Ok(None);
        }
        let Some((body, stop)) = self.closed(written, answer, options) else {
            return Ok(None);
        };
        let (before, through) = (
            self.tokenizer().encode(&prompt)?,
            self.tokenizer().encode(&format!("{prompt}{body}"))?,
        );
        // Where letters of both become one token, the prompt's end stays as the engine would be given it.
        let mut ids = match through.strip_prefix(&before[..]) {
            Some(ids) => ids.to_vec(),
            None => self.tokenizer().encode(body)?,
        };
        if !was_cut {
            ids.push(stop);
        }
        Ok(Some(ids))
    }

    /// The ids of a conversation up to the answer that ends it, and those of the answer, as the template writes both.
    /// Takes time in the length of the conversation.
    ///
    /// # Errors
    /// The template fails on the answer, or leaves it out.
    pub fn prompt_and_answer(
        &self,
        messages: &[Message],
        answer: &Message,
        was_cut: bool,
        options: &RenderOptions,
    ) -> Result<(Vec<u32>, Vec<u32>), RenderError> {
        let conversation: Vec<Message> = messages.iter().chain([answer]).cloned().collect();
        let MaskedIds { mut ids, mask, .. } = self.render_with_mask(&conversation, options)?;
        let end = mask.iter().rposition(|mask| *mask == 1).map(|at| at + 1);
        let end = end.ok_or(RenderError::Mask {
            message: messages.len(),
            reason: MaskFailure::Dropped,
        })?;
        let start = mask[..end].iter().rposition(|mask| *mask == 0);
        let start = start.map_or(0, |at| at + 1);
        ids.truncate(end);
        if was_cut && ids.last().is_some_and(|last| self.is_stop_token(*last)) {
            ids.pop();
        }
        let answer = ids.split_off(start.min(ids.len()));
        Ok((ids, answer))
    }

    /// The answer without what closes it, and the stop token that does: the one that the template writes behind it, or
    /// that the next message begins with.
    fn closed<'a>(
        &self,
        written: &'a str,
        answer: &Message,
        options: &RenderOptions,
    ) -> Option<(&'a str, u32)> {
        let end = written.trim_end();
        let close = self
            .stop_token_texts()
            .filter_map(|(id, stop)| Some((end.strip_suffix(stop)?, id)))
            .min_by_key(|(body, _)| body.len());
        if close.is_some() {
            return close;
        }
        let next = match answer.has_tool_calls() {
            true => Message::text("tool", "y"),
            false => Message::user("y"),
        };
        let prepared = self.prepared.prepare(&RenderOptions {
            add_generation_prompt: true,
            ..options.clone()
        });
        let after = self.suffix_text(answer, &[next], &prepared).ok()?;
        let (stop, _) = self.leading_stop_token(&after)?;
        Some((written, stop))
    }
}

/// Whether content and reasoning are there as they are, but for white space around them.
fn says_all(written: &str, answer: &Message) -> bool {
    let content = answer.content.joined().ok();
    let parts = [content.as_deref(), answer.reasoning_content.as_deref()];
    parts
        .into_iter()
        .flatten()
        .all(|part| written.contains(part.trim()))
}
