//! Backend on the released `tokenizers` 0.23, the library `transformers` uses: the reference.

use super::Backend;

pub(super) struct Stable(tokenizers_stable::Tokenizer);

impl Stable {
    pub(super) fn load(json: &str) -> Result<Self, String> {
        let mut tokenizer: tokenizers_stable::Tokenizer =
            json.parse().map_err(|error| format!("{error}"))?;
        // A truncation left in the file would silently cut prompts.
        tokenizer
            .with_padding(None)
            .with_truncation(None)
            .map_err(|error| error.to_string())?;
        Ok(Self(tokenizer))
    }
}

impl Backend for Stable {
    fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        let encoding = self
            .0
            .encode_fast(text, false)
            .map_err(|error| error.to_string())?;
        Ok(encoding.get_ids().to_vec())
    }

    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, String> {
        self.0
            .decode(ids, skip_special)
            .map_err(|error| error.to_string())
    }
}
