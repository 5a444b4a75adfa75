//! Control tokens in the text of messages as plain text ([`ControlTokenPolicy::Neutralize`]).
//!
//! Each of them is replaced by a sentinel before the template sees the messages, so that the rendered text shows where
//! the template put it, and every control token that is left there is the template's own. With the sentinels turned back
//! the text must be what the template makes of the messages as they are; else it looked at the control tokens, and nothing
//! is known about where they are.
//!
//! The text is then encoded by the model's tokenizer with its control tokens renamed (`tokenizer::Renamed`): those of the
//! template are written by their new names, those of messages are left and are no tokens any more. Two comparisons prove
//! it: the text with sentinels has the same ids by both tokenizers, and the text itself has the same control tokens as the
//! one with sentinels.

mod sentinels;

use crate::control_tokens::ControlTokens;
use crate::error::RenderError;
use crate::message::Message;
use crate::renderer::Renderer;
use crate::template::RenderOptions;
use crate::tokenizer::{RENAMED, Renamed};
pub(crate) use sentinels::{Originals, Texts};
use std::ops::Range;
use std::time::SystemTime;

/// What becomes of control tokens of the model in the text of messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlTokenPolicy {
    /// They are control tokens, as `transformers` makes them.
    #[default]
    Keep,
    /// They are text: special tokens in every message; other added tokens that the template writes (`<tool_call>`) in
    /// what users, tools and documents say, for in a system message and in an answer they are the model's own syntax.
    Neutralize,
}

/// Set up for [`ControlTokenPolicy::Neutralize`].
pub(crate) struct Neutral {
    pub every: ControlTokens,
    pub special: ControlTokens,
    pub tokenizer: Renamed,
}

/// A conversation whose control tokens in the text of messages are sentinels.
pub(crate) struct Neutralized {
    pub messages: Vec<Message>,
    pub options: RenderOptions,
    pub originals: Originals,
}

/// A text that was rendered with sentinels, as it is without them and as it is encoded.
#[derive(Default)]
pub(crate) struct Restored {
    pub text: String,
    coded: String,
    /// With sentinels, as it would be encoded.
    coded_sentinels: String,
    pieces: Vec<Piece>,
}

/// Where a part of the text is in each of its forms.
struct Piece {
    rendered: Range<usize>,
    text: Range<usize>,
    coded: Range<usize>,
}

impl Neutral {
    /// `written`: whether a template of the model holds this text. Errors are the reason why this tokenizer cannot be used.
    pub fn new(
        tokenizer: &crate::tokenizer::Tokenizer,
        path: &std::path::Path,
        written: impl Fn(&str) -> bool,
    ) -> Result<Self, String> {
        let every = ControlTokens::of(tokenizer, written);
        let special = ControlTokens::of(tokenizer, |_| false);
        let tokens = every.texts().filter_map(|text| {
            let id = tokenizer.added_token(text)?;
            Some((id, text.to_owned()))
        });
        let tokens: Vec<_> = tokens.collect();
        let tokenizer = Renamed::load(path, &tokens)?;
        Ok(Self {
            every,
            special,
            tokenizer,
        })
    }

    /// `rendered` without sentinels. `None` where there are others than those of `originals`, or text that would be read
    /// as a renamed token.
    pub fn restore(&self, rendered: &str, originals: &Originals) -> Option<Restored> {
        if rendered.contains(RENAMED) || originals.contain(RENAMED) {
            return None;
        }
        let mut restored = Restored::default();
        let mut at = 0;
        for (begin, end, original) in originals.sentinels_in(rendered)? {
            self.put_template_text(&mut restored, rendered, at..begin);
            restored.put(begin..end, original, original, &rendered[begin..end]);
            at = end;
        }
        self.put_template_text(&mut restored, rendered, at..rendered.len());
        Some(restored)
    }

    fn put_template_text(&self, restored: &mut Restored, rendered: &str, range: Range<usize>) {
        let mut at = range.start;
        for found in self.every.matches(&rendered[range.clone()]) {
            let (begin, end) = (range.start + found.start, range.start + found.end);
            let plain = &rendered[at..begin];
            restored.put(at..begin, plain, plain, plain);
            let token = &rendered[begin..end];
            let name = self.tokenizer.name(token);
            restored.put(begin..end, token, name, name);
            at = end;
        }
        let plain = &rendered[at..range.end];
        restored.put(at..range.end, plain, plain, plain);
    }
}

impl Restored {
    fn put(&mut self, rendered: Range<usize>, text: &str, coded: &str, coded_sentinels: &str) {
        if rendered.is_empty() {
            return;
        }
        let (text_at, coded_at) = (self.text.len(), self.coded.len());
        self.text.push_str(text);
        self.coded.push_str(coded);
        self.coded_sentinels.push_str(coded_sentinels);
        self.pieces.push(Piece {
            rendered,
            text: text_at..self.text.len(),
            coded: coded_at..self.coded.len(),
        });
    }

    /// The byte of the text for one of the text with sentinels; `None` within a sentinel.
    pub fn text_at(&self, rendered: usize) -> Option<usize> {
        self.moved(rendered, |piece| &piece.rendered, |piece| &piece.text)
    }

    /// What is encoded of the text up to this byte; `None` within what was replaced.
    pub fn coded_until(&self, text: usize) -> Option<&str> {
        let end = self.moved(text, |piece| &piece.text, |piece| &piece.coded)?;
        self.coded.get(..end)
    }

    fn moved(
        &self,
        at: usize,
        from: impl Fn(&Piece) -> &Range<usize>,
        to: impl Fn(&Piece) -> &Range<usize>,
    ) -> Option<usize> {
        let index = self.pieces.partition_point(|piece| from(piece).end < at);
        let Some(piece) = self.pieces.get(index) else {
            return (at == 0).then_some(0);
        };
        let (from, to) = (from(piece), to(piece));
        match at {
            at if at == from.start => Some(to.start),
            at if at == from.end => Some(to.end),
            at if from.len() == to.len() => Some(to.start + (at - from.start)),
            _ => None,
        }
    }
}

impl Renderer {
    /// The conversation with sentinels; `None` where its text holds no control tokens, or they are kept.
    pub(crate) fn neutralized(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Option<Neutralized> {
        let mut texts = self.neutral_texts(options)?;
        let messages = messages.iter().map(|message| texts.message(message));
        let messages = messages.collect();
        let options = texts.options(options);
        let originals = texts.replaced()?;
        Some(Neutralized {
            messages,
            options,
            originals,
        })
    }

    /// Replaces control tokens in texts; `None` where they are kept.
    pub(crate) fn neutral_texts(&self, options: &RenderOptions) -> Option<Texts<'_>> {
        let takes_mappings = self.template_for(options).takes_mappings();
        let neutral = self.neutral.as_ref()?;
        Some(Texts::new(&neutral.every, &neutral.special, takes_mappings))
    }

    /// The ids of a conversation, of which `neutral` is the one with sentinels, and its text.
    pub(crate) fn encode_neutralized(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        neutral: &Neutralized,
    ) -> Result<(Vec<u32>, Restored), RenderError> {
        let options = RenderOptions {
            now: neutral.options.now,
            ..options.clone()
        };
        let text = self.render_text(messages, &options)?;
        let rendered = self.render_text(&neutral.messages, &neutral.options)?;
        self.encode_neutral(&rendered, &neutral.originals, &text)
    }

    /// The ids of `rendered`, a text with sentinels, which stands for `text`.
    pub(crate) fn encode_neutral(
        &self,
        rendered: &str,
        originals: &Originals,
        text: &str,
    ) -> Result<(Vec<u32>, Restored), RenderError> {
        let unproven = || RenderError::ControlTokens {
            found: originals.first().to_owned(),
        };
        let neutral = self.neutral.as_ref().ok_or_else(unproven)?;
        let restored = neutral.restore(rendered, originals);
        let restored = restored.filter(|restored| restored.text == text);
        let restored = restored.ok_or_else(unproven)?;
        let tokenizer = &neutral.tokenizer;
        let with_sentinels = tokenizer.encode(&restored.coded_sentinels)?;
        let ids = tokenizer.encode(&restored.coded)?;
        let control = |ids: &[u32]| -> Vec<u32> {
            let control = ids.iter().copied().filter(|id| tokenizer.is_renamed(*id));
            control.collect()
        };
        let is_proven = with_sentinels == self.tokenizer().encode(rendered)?
            && control(&with_sentinels) == control(&ids);
        match is_proven {
            true => Ok((ids, restored)),
            false => Err(unproven()),
        }
    }

    /// What is encoded of a text up to one of its bytes, by itself.
    pub(crate) fn encode_head(
        &self,
        restored: &Restored,
        byte: usize,
    ) -> Result<Option<Vec<u32>>, RenderError> {
        match (restored.coded_until(byte), &self.neutral) {
            (Some(head), Some(neutral)) => neutral.tokenizer.encode(head).map(Some),
            _ => Ok(None),
        }
    }
}

/// The options with a time: two renders are compared.
fn timed(options: &RenderOptions) -> RenderOptions {
    RenderOptions {
        now: options.now.or_else(|| Some(SystemTime::now())),
        ..options.clone()
    }
}
