//! The bytes behind each token of a byte-level tokenizer.

use super::TokenizerFile;
use serde_json::Value;
use std::collections::HashMap;

/// Bytes of every token id, one after another.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    /// Token `id` is `bytes[starts[id]..starts[id + 1]]`; empty for ids without a token.
    starts: Vec<u32>,
}

impl TokenBytes {
    /// `None` when the decoder of this file does more than concatenate the bytes of its tokens.
    pub(super) fn build(file: &TokenizerFile) -> Option<Self> {
        if file.decoder.get("type").and_then(Value::as_str) != Some("ByteLevel") {
            return None;
        }
        let alphabet: HashMap<char, u8> = byte_alphabet().into_iter().zip(0..=255).collect();
        let mut tokens: Vec<(u32, Vec<u8>)> = Vec::new();
        for (token, id) in file.model.vocab.as_object()? {
            let mapped: Option<Vec<u8>> = token
                .chars()
                .map(|char| alphabet.get(&char).copied())
                .collect();
            // A token outside of the alphabet stands for itself, as in the library.
            let bytes = mapped.unwrap_or_else(|| token.as_bytes().to_vec());
            tokens.push((u32::try_from(id.as_u64()?).ok()?, bytes));
        }
        tokens.extend(
            file.added_tokens
                .iter()
                .map(|token| (token.id, token.content.as_bytes().to_vec())),
        );
        // Stable: an added token that is also in the vocabulary comes last and wins.
        tokens.sort_by_key(|(id, _)| *id);
        Self::lay_out(tokens)
    }

    fn lay_out(tokens: Vec<(u32, Vec<u8>)>) -> Option<Self> {
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
        Some(Self { bytes: all, starts })
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
