//! Which of an extension's tokens are the text of a new message, and not what the template writes around it.
//!
//! A text is located by putting a sentinel in its place: what the template then writes before and behind it must be what
//! it writes around the text. A token that holds some of both is not the text's.

use super::{Extension, ExtensionContext};
use crate::message::{Content, Message};
use crate::renderer::Renderer;
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

impl Renderer {
    /// The bodies of those new messages that are wanted, as far as they can be located, in order. `suffix` and `ids` are
    /// all that follows the answer; the extension has the last of these ids.
    pub(super) fn bodies(
        &self,
        previous: &ExtensionContext<'_>,
        appended: &str,
        new_messages: &[Message],
        (suffix, ids): (&str, &[u32]),
        extension: &mut Extension,
        wants: &dyn Fn(&Message) -> bool,
    ) {
        let mut wanted = (0..new_messages.len())
            .filter(|at| wants(&new_messages[*at]))
            .peekable();
        if wanted.peek().is_none() {
            return;
        }
        let Some(boundaries) = self.byte_boundaries(suffix, ids) else {
            return;
        };
        let left_out = ids.len() - extension.ids.len();
        let token_from = |byte: usize| boundaries.partition_point(|(at, _)| *at < byte);
        let token_until = |byte: usize| boundaries.partition_point(|(at, _)| *at <= byte) - 1;
        for message in wanted {
            let found = self.body_bytes(previous, appended, new_messages, message, suffix);
            let Some(bytes) = found else { continue };
            let (first, end) = (token_from(bytes.start), token_until(bytes.end));
            if left_out <= first && first < end {
                let tokens = first - left_out..end - left_out;
                extension.bodies.push(Body { message, tokens });
            }
        }
    }

    fn body_bytes(
        &self,
        previous: &ExtensionContext<'_>,
        appended: &str,
        new_messages: &[Message],
        message: usize,
        suffix: &str,
    ) -> Option<Range<usize>> {
        let mut replaced = new_messages.to_vec();
        replaced[message].content = Content::Text(BODY_SENTINEL.to_owned());
        let options = self.prepared.prepare(previous.options);
        let text = self
            .suffix_after(previous.answer, appended, &replaced, &options)
            .ok()?;
        let mut pieces = text.split(BODY_SENTINEL);
        let (Some(before), Some(after), None) = (pieces.next(), pieces.next(), pieces.next())
        else {
            return None;
        };
        let begin = suffix.starts_with(before).then_some(before.len())?;
        let end = suffix.strip_suffix(after)?.len();
        (begin < end).then_some(begin..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::RenderOptions;
    use crate::testing::write_tiny_model;

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
        let folder = tempfile::tempdir().expect("temporary folder");
        write_tiny_model(folder.path()).expect("model folder");
        let renderer = Renderer::load(folder.path()).expect("loads");
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
