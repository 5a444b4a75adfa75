//! The bytes behind each token, for tokenizers whose decoding is nothing but their concatenation: byte-level ones, and
//! SentencePiece's with byte fallback.

use super::TokenizerFile;
use serde_json::{Value, json};
use std::collections::HashMap;

/// Bytes of every token id, one after another.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Token `id` is `bytes[starts[id]..starts[id + 1]]`; empty for ids without a token.
    starts: Vec<u32>,
    /// Spaces that are omitted at the start of a text, if there are any.
    pub(super) spaces_to_strip: usize,
}

impl TokenBytes {
    /// `None` when the decoder of this file does more than concatenate the bytes of its tokens.
    pub(super) fn build(file: &TokenizerFile) -> Option<Self> {
        let spelling = Spelling::of(&file.decoder)?;
        let mut tokens: Vec<(u32, Vec<u8>)> = match &file.model.vocab {
            Value::Object(vocabulary) => vocabulary
                .iter()
                .map(|(token, id)| Some((u32::try_from(id.as_u64()?).ok()?, spelling.bytes(token))))
                .collect::<Option<_>>()?,
            // Unigram: pairs of token and score.
            Value::Array(vocabulary) => (0..)
                .zip(vocabulary)
                .map(|(id, entry)| Some((id, spelling.bytes(entry.get(0)?.as_str()?))))
                .collect::<Option<_>>()?,
            _ => return None,
        };
        tokens.extend(
            file.added_tokens
                .iter()
                .map(|token| (token.id, spelling.added_bytes(&token.content))),
        );
        // Stable: an added token that is also in the vocabulary comes last and wins.
        tokens.sort_by_key(|(id, _)| *id);
        Self::lay_out(tokens, spelling.spaces_to_strip())
    }

    /// The text of tokens; bytes that are not UTF-8 become U+FFFD.
    pub(super) fn text(&self, ids: impl Iterator<Item = u32>) -> String {
        let mut bytes = Vec::new();
        for id in ids {
            bytes.extend_from_slice(self.get(id));
        }
        let spaces = leading_spaces(&bytes, self.spaces_to_strip);
        String::from_utf8_lossy(&bytes[spaces..]).into_owned()
    }

    fn lay_out(tokens: Vec<(u32, Vec<u8>)>, spaces_to_strip: usize) -> Option<Self> {
        let size = tokens.last().map_or(0, |(id, _)| *id as usize + 1);
        let mut table = vec![None; size];
        for (id, bytes) in tokens {
            table[id as usize] = Some(bytes);
        }
        let mut all = Vec::new();
        let mut starts = Vec::with_capacity(size + 1);
        for bytes in table {
            starts.push(u32::try_from(all.len()).ok()?);
            all.extend(bytes.unwrap_or_default());
        }
        starts.push(u32::try_from(all.len()).ok()?);
        Some(Self {
            bytes: all,
            starts,
            spaces_to_strip,
        })
    }

    pub(super) fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        match (self.starts.get(id), self.starts.get(id + 1)) {
            (Some(&start), Some(&end)) => &self.bytes[start as usize..end as usize],
            _ => &[],
        }
    }

    /// Number of ids, with those that have no token.
    pub(super) fn len(&self) -> usize {
        self.starts.len() - 1
    }
}

/// Spaces at the start of `bytes`, at most `most`.
pub(super) fn leading_spaces(bytes: &[u8], most: usize) -> usize {
    let spaces = bytes.iter().take(most).take_while(|byte| **byte == b' ');
    spaces.count()
}

/// How a vocabulary writes bytes.
enum Spelling {
    /// A printable character for each byte.
    Alphabet(HashMap<char, u8>),
    /// Text with `▁` for spaces, and `<0xE9>` for bytes that are no text.
    Fallback { spaces_to_strip: usize },
}

impl Spelling {
    fn of(decoder: &Value) -> Option<Self> {
        let kind = |decoder: &Value| {
            decoder
                .get("type")
                .and_then(Value::as_str)
                .map(str::to_owned)
        };
        if kind(decoder)? == "ByteLevel" {
            let alphabet = byte_alphabet().into_iter().zip(0..=255).collect();
            return Some(Spelling::Alphabet(alphabet));
        }
        let [replace, fallback, fuse, rest @ ..] = decoder.get("decoders")?.as_array()?.as_slice()
        else {
            return None;
        };
        let is_usual = *replace
            == json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "})
            && kind(fallback)? == "ByteFallback"
            && kind(fuse)? == "Fuse";
        let spaces_to_strip = match rest {
            [] => 0,
            [strip] if kind(strip)? == "Strip" && strip["content"] == " " && strip["stop"] == 0 => {
                usize::try_from(strip["start"].as_u64()?).ok()?
            }
            _ => return None,
        };
        is_usual.then_some(Spelling::Fallback { spaces_to_strip })
    }

    fn bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Spelling::Alphabet(alphabet) => {
                let mapped: Option<Vec<u8>> = token
                    .chars()
                    .map(|char| alphabet.get(&char).copied())
                    .collect();
                // A token outside of the alphabet stands for itself, as in the library.
                mapped.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Spelling::Fallback { .. } => {
                let hexadecimal = token.strip_prefix("<0x").and_then(|t| t.strip_suffix('>'));
                match hexadecimal.map(|digits| (digits.len(), u8::from_str_radix(digits, 16))) {
                    Some((2, Ok(byte))) => vec![byte],
                    _ => token.replace('▁', " ").into_bytes(),
                }
            }
        }
    }

    fn added_bytes(&self, token: &str) -> Vec<u8> {
        match self {
            Spelling::Alphabet(_) => token.as_bytes().to_vec(),
            Spelling::Fallback { .. } => self.bytes(token),
        }
    }

    fn spaces_to_strip(&self) -> usize {
        match self {
            Spelling::Alphabet(_) => 0,
            Spelling::Fallback { spaces_to_strip } => *spaces_to_strip,
        }
    }
}

/// GPT-2's printable stand-in for each byte value: printable Latin-1 stands for itself, the other bytes take
/// the characters from U+0100 on (`bytes_to_unicode` of the GPT-2 release).
pub(crate) fn byte_alphabet() -> Vec<char> {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    (0..256u32)
        .map(|byte| {
            let code = if printable(byte) {
                byte
            } else {
                next += 1;
                next - 1
            };
            char::from_u32(code).unwrap_or('\u{fffd}')
        })
        .collect()
}
