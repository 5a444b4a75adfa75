//! Text to token ids and back, exactly as the model's own `tokenizer.json` says.
//!
//! Two libraries can do the work. The fast one is trusted only after it gave the same ids as the reference
//! on a probe corpus; otherwise the reference is used and the reason is kept ([`Tokenizer::backend`]).

pub(crate) mod bytes;
mod check;
mod fast;
mod renamed;
mod stable;
mod stream;

pub(crate) use renamed::{RENAMED, Renamed};
pub use stream::{DecodeState, StreamDecoder};

use crate::error::{LoadError, RenderError};
use bytes::TokenBytes;
use serde::Deserialize;
use std::collections::HashMap;
use std::path::Path;

/// What both libraries offer. Errors are the library's words.
trait Backend: Send + Sync {
    /// Ids of `text`. Special tokens written in the text become their ids; none is added around it.
    fn encode(&self, text: &str) -> Result<Vec<u32>, String>;
    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, String>;
}

/// Which library encodes, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BackendChoice {
    /// `tokenizers` 1.0: gave the reference's ids on the whole probe corpus.
    Fast,
    /// `tokenizers` 0.23, because the fast one cannot be trusted with this file.
    Stable { reason: String },
}

impl BackendChoice {
    pub fn name(&self) -> &'static str {
        match self {
            BackendChoice::Fast => "fast",
            BackendChoice::Stable { .. } => "stable",
        }
    }
}

/// A token of `added_tokens` in `tokenizer.json`.
#[derive(Clone, Debug, Deserialize)]
pub struct AddedToken {
    pub id: u32,
    pub content: String,
    /// Special tokens are omitted by `decode(.., skip_special = true)`.
    #[serde(default)]
    pub special: bool,
}

/// The parts of `tokenizer.json` this crate reads itself.
#[derive(Deserialize)]
struct TokenizerFile {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    #[serde(default)]
    decoder: serde_json::Value,
    model: ModelSection,
}

#[derive(Deserialize)]
struct ModelSection {
    #[serde(default)]
    vocab: serde_json::Value,
}

/// A loaded tokenizer. Shared freely: every method takes `&self`.
pub struct Tokenizer {
    backend: Box<dyn Backend>,
    choice: BackendChoice,
    added: HashMap<String, AddedToken>,
    special: Vec<u32>,
    /// The bytes of every token, when decoding is nothing but their concatenation.
    token_bytes: Option<TokenBytes>,
}

impl Tokenizer {
    /// Reads `tokenizer.json`. Takes about a second for a vocabulary of 128k.
    pub fn load(path: &Path) -> Result<Self, LoadError> {
        let place = || path.to_path_buf();
        let json = std::fs::read_to_string(path).map_err(|source| LoadError::Read {
            path: place(),
            source,
        })?;
        let file = serde_json::from_str(&json).map_err(|source| LoadError::Json {
            path: place(),
            source,
        })?;
        let reference = stable::Stable::load(&json).map_err(|message| LoadError::Tokenizer {
            path: place(),
            message,
        })?;
        Ok(Tokenizer::of(&json, file, reference))
    }

    fn of(json: &str, file: TokenizerFile, reference: stable::Stable) -> Self {
        let (backend, choice): (Box<dyn Backend>, _) =
            match check::trusted(json, &reference, &file.added_tokens) {
                Ok(fast) => (Box::new(fast), BackendChoice::Fast),
                Err(reason) => (Box::new(reference), BackendChoice::Stable { reason }),
            };
        let token_bytes = TokenBytes::build(&file)
            .filter(|table| check::decodes_alike(table, backend.as_ref(), &file.added_tokens));
        let special = file.added_tokens.iter().filter(|token| token.special);
        let mut special: Vec<u32> = special.map(|token| token.id).collect();
        special.sort_unstable();
        let added = file.added_tokens.into_iter();
        Self {
            backend,
            choice,
            added: added.map(|token| (token.content.clone(), token)).collect(),
            special,
            token_bytes,
        }
    }

    pub fn backend(&self) -> &BackendChoice {
        &self.choice
    }

    /// Ids of `text`; nothing is added around it (chat templates write their own special tokens).
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, RenderError> {
        self.backend.encode(text).map_err(RenderError::Tokenizer)
    }

    /// Text of `ids`. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, RenderError> {
        match &self.token_bytes {
            Some(table) => {
                let shown = |id: &u32| !(skip_special && self.is_special(*id));
                Ok(table.text(ids.iter().copied().filter(shown)))
            }
            None => self
                .backend
                .decode(ids, skip_special)
                .map_err(RenderError::Tokenizer),
        }
    }

    /// A decoder that takes ids one by one and never returns half a character.
    pub fn decode_stream(&self, skip_special: bool) -> StreamDecoder<'_> {
        StreamDecoder::new(self, skip_special)
    }

    /// Id of a token of `added_tokens`, by its text.
    pub fn added_token(&self, content: &str) -> Option<u32> {
        self.added.get(content).map(|token| token.id)
    }

    /// Id of a token by its text: an added token, or one that the text encodes to alone.
    pub fn token_id(&self, content: &str) -> Option<u32> {
        self.added_token(content)
            .or_else(|| match self.backend.encode(content).ok()?.as_slice() {
                [id] => Some(*id),
                _ => None,
            })
    }

    pub fn added_tokens(&self) -> impl Iterator<Item = &AddedToken> {
        self.added.values()
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.binary_search(&id).is_ok()
    }

    /// The bytes one token stands for by itself, for display.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.bytes_of(id) {
            Some(bytes) => bytes.to_vec(),
            None => self.decode(&[id], false).unwrap_or_default().into_bytes(),
        }
    }

    /// The bytes of every token, by id: none for ids without a token and for special tokens, which are no text. `None`
    /// when this tokenizer's decoding is not a concatenation.
    pub fn vocabulary(&self) -> Option<Vec<&[u8]>> {
        let table = self.token_bytes.as_ref()?;
        let size = u32::try_from(table.len()).ok()?;
        let text = |id| match self.is_special(id) {
            true => &[][..],
            false => table.get(id),
        };
        Some((0..size).map(text).collect())
    }

    /// The bytes one token stands for; `None` when this tokenizer's decoding is not a concatenation.
    pub(crate) fn bytes_of(&self, id: u32) -> Option<&[u8]> {
        self.token_bytes.as_ref().map(|table| table.get(id))
    }

    /// Spaces that decoding omits at the start of a text.
    pub(crate) fn spaces_to_strip(&self) -> usize {
        let table = self.token_bytes.as_ref();
        table.map_or(0, |table| table.spaces_to_strip)
    }
}
