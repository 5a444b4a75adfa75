//! Decoding token by token, without ever returning half a character.

use super::Tokenizer;
use crate::error::RenderError;

/// Feeds ids one at a time; the pieces, with the last of [`StreamDecoder::finish`], add up to exactly what
/// [`Tokenizer::decode`] gives for all of them at once.
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// Byte-level: the tail that is not yet a whole character (at most 3 bytes).
    pending: Vec<u8>,
    /// Otherwise: ids decoded together with each new one. The first `context` of them are out already, as the first
    /// `shown` bytes of the window's text.
    window: Vec<u32>,
    context: usize,
    shown: usize,
}

impl<'a> StreamDecoder<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            pending: Vec::new(),
            window: Vec::new(),
            context: 0,
            shown: 0,
        }
    }

    /// The text that is certain now, possibly empty.
    pub fn push(&mut self, id: u32) -> Result<String, RenderError> {
        if self.skip_special && self.tokenizer.is_special(id) {
            return Ok(String::new());
        }
        match self.tokenizer.bytes_of(id) {
            Some(bytes) => {
                self.pending.extend_from_slice(bytes);
                Ok(self.take_complete())
            }
            None => self.push_window(id),
        }
    }

    /// The rest: a character cut off by the end becomes U+FFFD.
    pub fn finish(self) -> Result<String, RenderError> {
        if !self.pending.is_empty() {
            return Ok(String::from_utf8_lossy(&self.pending).into_owned());
        }
        let text = self.tokenizer.decode(&self.window, self.skip_special)?;
        Ok(text.get(self.shown..).unwrap_or_default().to_owned())
    }

    fn take_complete(&mut self) -> String {
        let mut text = String::new();
        let mut consumed = 0;
        for chunk in self.pending.utf8_chunks() {
            text.push_str(chunk.valid());
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
            text.push(char::REPLACEMENT_CHARACTER);
            consumed += chunk.invalid().len();
        }
        self.pending.drain(..consumed);
        text
    }

    // Decoders that look at neighbours (Metaspace, WordPiece, byte fallback) see the last piece's ids again, so that
    // a token is never decoded as if it began the text.
    fn push_window(&mut self, id: u32) -> Result<String, RenderError> {
        self.window.push(id);
        let text = self.tokenizer.decode(&self.window, self.skip_special)?;
        if text.len() <= self.shown || text.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        let piece = text.get(self.shown..).unwrap_or_default().to_owned();
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.shown = self
            .tokenizer
            .decode(&self.window, self.skip_special)?
            .len();
        Ok(piece)
    }
}
