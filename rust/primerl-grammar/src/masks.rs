//! The masks of one answer, token after token.

use crate::GrammarError;
use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use std::sync::Arc;

/// Allowed tokens: bit `id % 32` of word `id / 32`, for as many ids as the vocabulary has.
pub type Mask = Arc<[u32]>;

/// What may come next in one answer.
pub struct Masks {
    matcher: Matcher,
    size: u32,
    ends: Arc<[u32]>,
    tokens: usize,
}

impl Masks {
    pub(crate) fn new(matcher: Matcher, size: u32, ends: &[u32]) -> Result<Self, String> {
        match matcher.get_error() {
            Some(problem) => Err(problem),
            None => Ok(Masks {
                matcher,
                size,
                ends: ends.into(),
                tokens: 0,
            }),
        }
    }

    /// The tokens that may come next; at least one.
    ///
    /// # Errors
    /// [`GrammarError::Step`]
    pub fn mask(&mut self) -> Result<Mask, GrammarError> {
        let allowed = self.matcher.compute_mask_or_eos();
        let allowed = allowed.map_err(|error| self.failed(error.to_string()))?;
        let mask = self.of(&allowed);
        match mask.iter().all(|word| *word == 0) {
            true => Err(self.failed("no token of this model fits the grammar".to_owned())),
            false => Ok(mask),
        }
    }

    /// In place of the bit behind the vocabulary, the bits of the tokens that end an answer.
    fn of(&self, allowed: &SimpleVob) -> Mask {
        let words = (self.size as usize).div_ceil(32);
        let mut mask: Vec<u32> = allowed.as_slice().iter().copied().take(words).collect();
        mask.resize(words, 0);
        let used = self.size % 32;
        if let (1.., Some(last)) = (used, mask.last_mut()) {
            *last &= (1 << used) - 1;
        }
        if allowed.is_allowed(self.size) {
            for id in self.ends.iter() {
                mask[(id / 32) as usize] |= 1 << (id % 32);
            }
        }
        mask.into()
    }

    /// Goes on behind a sampled token, which must be one of the last mask's and not end the answer.
    ///
    /// # Errors
    /// [`GrammarError::Step`]
    pub fn push(&mut self, token: u32) -> Result<(), GrammarError> {
        let pushed = self.matcher.consume_token(token);
        pushed.map_err(|error| self.failed(error.to_string()))?;
        self.tokens += 1;
        Ok(())
    }

    /// Another answer from the same place, which shares nothing with this one.
    pub fn fork(&self) -> Masks {
        Masks {
            matcher: self.matcher.deep_clone(),
            size: self.size,
            ends: Arc::clone(&self.ends),
            tokens: self.tokens,
        }
    }

    fn failed(&self, problem: String) -> GrammarError {
        GrammarError::Step {
            tokens: self.tokens,
            problem,
        }
    }
}

impl std::fmt::Debug for Masks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Masks")
            .field("tokens", &self.tokens)
            .finish()
    }
}
