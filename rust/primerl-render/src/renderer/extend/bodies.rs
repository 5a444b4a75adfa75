//! Which of an extension's tokens are the text of a new message, and not what the template writes around it.
//!
//! A text is located by putting a sentinel in its place: what the template then writes before and behind it must be what
//! it writes around the text. A token that holds some of both is not the text's.

use super::Asked;
use crate::message::{Content, Message};
use crate::neutral::Restored;
use crate::renderer::Renderer;
use crate::template::PreparedOptions;
use std::ops::Range;

const BODY_SENTINEL: &str = "zPrimerlBodySentinelz";

/// The text of one new message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    /// Position among the new messages.
    pub message: usize,
    /// Positions among the extension's ids; never empty.
    pub tokens: Range<usize>,
}

/// All that follows the answer.
pub(super) struct Whole<'a> {
    pub suffix: &'a str,
    pub ids: &'a [u32],
    /// Where the suffix has sentinels: what is encoded.
    pub restored: Option<&'a Restored>,
}

impl Renderer {
    /// The bodies of those new messages that are wanted, as far as they can be located, in order. The extension is the ids
    /// behind the first `left_out`.
    pub(super) fn bodies(
        &self,
        asked: &Asked<'_>,
        whole: &Whole<'_>,
        left_out: usize,
        wants: &dyn Fn(&Message) -> bool,
    ) -> Vec<Body> {
        let mut wanted = (0..asked.new.len())
            .filter(|at| wants(&asked.new[*at]))
            .peekable();
        if wanted.peek().is_none() {
            return Vec::new();
        }
        let text = whole
            .restored
            .map_or(whole.suffix, |restored| &restored.text);
        let Some(boundaries) = self.byte_boundaries(text, whole.ids) else {
            return Vec::new();
        };
        let token_from = |byte: usize| boundaries.partition_point(|(at, _)| *at < byte);
        let token_until = |byte: usize| boundaries.partition_point(|(at, _)| *at <= byte) - 1;
        let options = self.prepared.prepare(asked.previous.options);
        let located = wanted.filter_map(|message| {
            let bytes = self.body_bytes(asked, message, whole, &options)?;
            let (first, end) = (token_from(bytes.start), token_until(bytes.end));
            let tokens = first.checked_sub(left_out)?..end.checked_sub(left_out)?;
            (!tokens.is_empty()).then_some(Body { message, tokens })
        });
        located.collect()
    }

    fn body_bytes(
        &self,
        asked: &Asked<'_>,
        message: usize,
        whole: &Whole<'_>,
        options: &PreparedOptions,
    ) -> Option<Range<usize>> {
        let mut replaced = asked.new.to_vec();
        replaced[message].content = Content::Text(BODY_SENTINEL.to_owned());
        let text = self
            .suffix_after(asked.previous.answer, asked.own, &replaced, options)
            .ok()?;
        let mut pieces = text.split(BODY_SENTINEL);
        let (Some(before), Some(after), None) = (pieces.next(), pieces.next(), pieces.next())
        else {
            return None;
        };
        let begin = whole.suffix.starts_with(before).then_some(before.len())?;
        let end = whole.suffix.strip_suffix(after)?.len();
        let bytes = match whole.restored {
            Some(restored) => restored.text_at(begin)?..restored.text_at(end)?,
            None => begin..end,
        };
        (!bytes.is_empty()).then_some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::RenderOptions;
    use crate::testing::tiny;
    use crate::{Extension, ExtensionContext};

    fn extension(sampled: &[u32], new: &[Message], renderer: &Renderer) -> Extension {
        let (answer, options) = (Message::assistant("hi"), RenderOptions::default());
        let options = RenderOptions {
            add_generation_prompt: true,
            ..options
        };
        let context = ExtensionContext {
            answer: &answer,
            sampled,
            options: &options,
        };
        let wants = |message: &Message| message.role == "user";
        renderer
            .extend_located(&context, None, new, &wants)
            .expect("extends")
    }

    #[test]
    fn the_text_of_a_message_is_told_from_what_the_template_writes_around_it() {
        let renderer = tiny();
        let stop = renderer.stop_token_ids()[0];
        let mut no_more = Message::user("no more");
        no_more.role = "system".to_owned();
        let new = [
            Message::user("what else?"),
            no_more,
            Message::user("user"),
            Message::user(""),
        ];
        // The stop token was sampled, or is part of the extension.
        for sampled in [vec![7, stop], vec![7]] {
            let found = extension(&sampled, &new, &renderer);
            let texts: Vec<(usize, String)> = found
                .bodies
                .iter()
                .map(|body| {
                    let ids = &found.ids[body.tokens.clone()];
                    let text = renderer.tokenizer().decode(ids, false).expect("decodes");
                    (body.message, text)
                })
                .collect();
            let expected = [(0, "what else?".to_owned()), (2, "user".to_owned())];
            assert_eq!(texts, expected);
        }
    }
}
