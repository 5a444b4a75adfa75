//! Decoding token by token, without ever returning half a character.

use super::Tokenizer;
use super::bytes::leading_spaces;
use crate::error::RenderError;

/// Feeds ids one at a time; the pieces, with the last of [`StreamDecoder::finish`], add up to exactly what
/// [`Tokenizer::decode`] gives for all of them at once.
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    state: DecodeState,
}

impl<'a> StreamDecoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer,
            state: DecodeState::new(skip_special),
        }
    }

    /// The text that is certain now, possibly empty.
    pub fn push(&mut self, id: u32) -> Result<String, RenderError> {
        let mut text = String::new();
        self.state.push(self.tokenizer, id, &mut text)?;
        Ok(text)
    }

    /// The rest: a character cut off by the end becomes U+FFFD.
    pub fn finish(self) -> Result<String, RenderError> {
        let mut text = String::new();
        self.state.finish(self.tokenizer, &mut text)?;
        Ok(text)
    }
}

/// [`StreamDecoder`] without its tokenizer, for owners that outlive a borrow.
#[derive(Default)]
pub struct DecodeState {
    skip_special: bool,
    /// Whether the text has begun: before that, spaces may have to be omitted ([`Tokenizer::spaces_to_strip`]).
    has_begun: bool,
    stripped: usize,
    /// Tokens that are bytes: the tail that is not yet a whole character (at most 3 bytes).
    pending: Vec<u8>,
    /// Otherwise: ids decoded together with each new one. The first `context` of them are out already, as the first
    /// `shown` bytes of the window's text.
    window: Vec<u32>,
    context: usize,
    shown: usize,
}

impl DecodeState {
    pub fn new(skip_special: bool) -> DecodeState {
        DecodeState {
            skip_special,
            ..DecodeState::default()
        }
    }

    /// Appends to `out` the text that is certain now.
    pub fn push(
        &mut self,
        tokenizer: &Tokenizer,
        id: u32,
        out: &mut String,
    ) -> Result<(), RenderError> {
        if self.skip_special && tokenizer.is_special(id) {
            return Ok(());
        }
        match tokenizer.bytes_of(id) {
            Some(bytes) => {
                let bytes = self.without_leading_spaces(tokenizer, bytes);
                match std::str::from_utf8(bytes) {
                    Ok(text) if self.pending.is_empty() => out.push_str(text),
                    _ => {
                        self.pending.extend_from_slice(bytes);
                        self.take_complete(out);
                    }
                }
                Ok(())
            }
            None => self.push_window(tokenizer, id, out),
        }
    }

    /// Appends the rest: a character cut off by the end becomes U+FFFD.
    pub fn finish(self, tokenizer: &Tokenizer, out: &mut String) -> Result<(), RenderError> {
        if !self.pending.is_empty() {
            out.push_str(&String::from_utf8_lossy(&self.pending));
            return Ok(());
        }
        let text = tokenizer.decode(&self.window, self.skip_special)?;
        out.push_str(from(&text, self.shown));
        Ok(())
    }

    /// Whether a token's text is not out in full.
    pub(crate) fn holds_back(&self) -> bool {
        !self.pending.is_empty() || self.window.len() > self.context
    }

    fn without_leading_spaces<'a>(&mut self, tokenizer: &Tokenizer, bytes: &'a [u8]) -> &'a [u8] {
        if self.has_begun {
            return bytes;
        }
        let most = tokenizer.spaces_to_strip() - self.stripped;
        let spaces = leading_spaces(bytes, most);
        self.stripped += spaces;
        self.has_begun = spaces < bytes.len() || spaces == most;
        &bytes[spaces..]
    }

    fn take_complete(&mut self, out: &mut String) {
        let mut consumed = 0;
        for chunk in self.pending.utf8_chunks() {
            out.push_str(chunk.valid());
            consumed += chunk.valid().len();
            if chunk.invalid().is_empty() {
                continue;
            }
            let rest = &self.pending[consumed..];
            // `error_len` is none where more bytes could still complete the character.
            if std::str::from_utf8(rest)
                .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
            {
                break;
            }
            out.push(char::REPLACEMENT_CHARACTER);
            consumed += chunk.invalid().len();
        }
        self.pending.drain(..consumed);
    }

    // Decoders that look at neighbours (Metaspace, WordPiece, byte fallback) see the last piece's ids again, so that
    // a token is never decoded as if it began the text.
    fn push_window(
        &mut self,
        tokenizer: &Tokenizer,
        id: u32,
        out: &mut String,
    ) -> Result<(), RenderError> {
        self.window.push(id);
        let text = tokenizer.decode(&self.window, self.skip_special)?;
        if text.len() <= self.shown || text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(());
        }
        out.push_str(from(&text, self.shown));
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.shown = tokenizer.decode(&self.window, self.skip_special)?.len();
        Ok(())
    }
}

/// The rest of `text`. A decoder that changed what it had shown may leave `at` within a character: nothing is lost then.
fn from(text: &str, at: usize) -> &str {
    let starts = (0..=at.min(text.len())).rev();
    let start = starts.into_iter().find(|at| text.is_char_boundary(*at));
    &text[start.unwrap_or(0)..]
}
