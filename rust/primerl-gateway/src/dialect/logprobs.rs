//! Sampled tokens as texts with their log-probabilities, in the format of chat completions and responses.

use crate::answer::Tokens;
use primerl_render::Tokenizer;
use serde::Serialize;

#[derive(Clone, Debug, Serialize)]
pub(crate) struct TokenLogprob {
    #[serde(flatten)]
    pub token: TokenText,
    pub top_logprobs: Vec<TokenText>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct TokenText {
    pub token: String,
    pub logprob: f32,
    pub bytes: Option<Vec<u8>>,
}

impl TokenText {
    /// `as_id`: `token_id:<n>` instead of the text.
    pub(crate) fn of(id: u32, logprob: f32, as_id: bool, tokenizer: &Tokenizer) -> TokenText {
        if as_id {
            return TokenText {
                token: format!("token_id:{id}"),
                logprob,
                bytes: None,
            };
        }
        let bytes = tokenizer.token_bytes(id);
        TokenText {
            token: String::from_utf8_lossy(&bytes).into_owned(),
            logprob,
            bytes: Some(bytes),
        }
    }
}

pub(super) fn token_logprobs(
    tokens: Tokens<'_>,
    as_ids: bool,
    tokenizer: &Tokenizer,
) -> Vec<TokenLogprob> {
    let text = |(id, logprob): (u32, f32)| TokenText::of(id, logprob, as_ids, tokenizer);
    let entry = |(index, (id, logprob)): (usize, (&u32, &f32))| {
        let top = tokens.top.get(index).map(Vec::as_slice).unwrap_or_default();
        TokenLogprob {
            token: text((*id, *logprob)),
            top_logprobs: top.iter().copied().map(text).collect(),
        }
    };
    let sampled = tokens.ids.iter().zip(tokens.logprobs).enumerate();
    sampled.map(entry).collect()
}
