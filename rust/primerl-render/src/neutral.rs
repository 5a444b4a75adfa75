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
use crate::message::Message;
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
    pub coded: String,
    /// With sentinels, as it would be encoded.
    pub coded_sentinels: String,
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

/// The options with a time: two renders are compared.
fn timed(options: &RenderOptions) -> RenderOptions {
    RenderOptions {
        now: options.now.or_else(|| Some(SystemTime::now())),
        ..options.clone()
    }
}
