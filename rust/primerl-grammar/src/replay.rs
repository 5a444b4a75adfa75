//! The masks of an answer that was sampled before.

use crate::{GrammarError, Mask, Spec, Vocabulary};
use std::collections::HashMap;

/// The masks of an answer's tokens; most answers use few different ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    pub masks: Vec<Mask>,
    /// The place of each token's mask in `masks`.
    pub index: Vec<u32>,
}

/// The mask before each token of an answer, or of its beginning.
///
/// # Errors
/// [`GrammarError::Disallowed`] where the answer was not sampled with these masks; others as [`Vocabulary::compile`] and
/// [`crate::Masks::mask`].
pub fn replay(
    vocabulary: &Vocabulary,
    spec: &Spec,
    tokens: &[u32],
) -> Result<Replayed, GrammarError> {
    let mut masks = vocabulary.compile(spec)?;
    let mut replayed = Replayed::default();
    let mut known: HashMap<Mask, u32> = HashMap::new();
    for (index, &token) in tokens.iter().enumerate() {
        let mask = masks.mask()?;
        let allows = mask
            .get((token / 32) as usize)
            .is_some_and(|word| word & (1 << (token % 32)) != 0);
        if !allows {
            return Err(GrammarError::Disallowed { index, token });
        }
        let place = *known.entry(mask).or_insert_with_key(|mask| {
            replayed.masks.push(mask.clone());
            replayed.masks.len() as u32 - 1
        });
        replayed.index.push(place);
        if index + 1 < tokens.len() {
            masks.push(token)?;
        }
    }
    Ok(replayed)
}

/// The mask of the token that follows these.
///
/// # Errors
/// As [`replay`], but that a token is not allowed is [`GrammarError::Step`].
pub fn after(vocabulary: &Vocabulary, spec: &Spec, tokens: &[u32]) -> Result<Mask, GrammarError> {
    let mut masks = vocabulary.compile(spec)?;
    tokens.iter().try_for_each(|token| masks.push(*token))?;
    masks.mask()
}
