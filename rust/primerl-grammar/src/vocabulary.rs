//! The tokens of a model as the grammar library knows them.

use crate::masks::Masks;
use crate::{GrammarError, Spec};
use llguidance::api::{GrammarInit, ParserLimits};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokRxInfo, TokTrie};
use llguidance::{Logger, Matcher, ParserFactory};
use primerl_render::Tokenizer;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// Part of every identity: masks may change with it.
const LIBRARY: &str = "llguidance-1.9.1";

/// The tokenizer's tokens in a trie, shared by all answers of a model.
pub struct Vocabulary {
    factory: ParserFactory,
    /// Ids the model computes a probability for.
    size: u32,
    /// Special tokens.
    special: Vec<(String, u32)>,
    identity: Arc<str>,
}

impl Vocabulary {
    /// `size`: ids the model computes a probability for; those without a token are never allowed. Takes some hundred
    /// milliseconds for 150,000 tokens.
    ///
    /// # Errors
    /// [`GrammarError::Tokenizer`]
    pub fn new(tokenizer: &Tokenizer, size: u32) -> Result<Self, GrammarError> {
        let texts = tokenizer.vocabulary().ok_or(GrammarError::Tokenizer)?;
        let marker = TokTrie::SPECIAL_TOKEN_MARKER;
        let named = |id: u32| [&[marker][..], format!("[{id}]").as_bytes()].concat();
        let mut tokens: Vec<Vec<u8>> = (0..size)
            .map(
                |id| match texts.get(id as usize).copied().unwrap_or_default() {
                    [] => named(id),
                    // No text begins with this byte, which the library reads as the mark of a special token.
                    [first, _, ..] if *first == marker => named(id),
                    text => text.to_vec(),
                },
            )
            .collect();
        let mut digest = Xxh3::new();
        for token in &tokens {
            digest.update(&(token.len() as u64).to_le_bytes());
            digest.update(token);
        }
        let identity = format!("{LIBRARY}/{:016x}", digest.digest()).into();
        // One more, behind the model's own, stands for the end of the answer.
        tokens.push(named(size));
        let trie = TokTrie::from(&TokRxInfo::new(size + 1, size), &tokens);
        let env: llguidance::toktrie::TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|_| GrammarError::Tokenizer)?;
        factory.quiet();
        *factory.limits_mut() = limits();
        let special = tokenizer
            .added_tokens()
            .filter(|token| token.special && token.id < size)
            .map(|token| (token.content.clone(), token.id))
            .collect();
        Ok(Vocabulary {
            factory,
            size,
            special,
            identity,
        })
    }

    /// Ids the model computes a probability for.
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Names the tokens, their ids and the library's version. Equal identities give equal masks.
    pub fn identity(&self) -> &Arc<str> {
        &self.identity
    }

    /// The masks of one answer. Takes milliseconds, more for large schemas.
    ///
    /// # Errors
    /// [`GrammarError::Unsupported`] names the keyword that cannot be enforced.
    pub fn compile(&self, spec: &Spec) -> Result<Masks, GrammarError> {
        let refuse = |problem: String| {
            let mut kinds = spec.structured_outputs.as_object().into_iter().flatten();
            let kind = kinds.find(|(_, value)| !value.is_null() && *value != false);
            let parameter = kind.map_or_else(
                || "structured_outputs".to_owned(),
                |(kind, _)| format!("structured_outputs.{kind}"),
            );
            GrammarError::unsupported(&parameter, problem)
        };
        let ends_known = spec.ends.iter().all(|id| *id < self.size);
        if spec.ends.is_empty() || !ends_known {
            return Err(GrammarError::unsupported(
                "structured_outputs",
                "nothing may end the answer: it needs an end-of-sequence or stop token of this model",
            ));
        }
        let init = GrammarInit::Serialized(spec.grammar(|text| self.literals(text))?);
        let parser = self.factory.create_parser_from_init_ext(
            init,
            Logger::new(0, 0),
            InferenceCapabilities::default(),
            limits(),
        );
        let parser = parser.map_err(|error| refuse(first_lines(&error.to_string())))?;
        let masks = Masks::new(Matcher::new(Ok(parser)), self.size, &spec.ends);
        masks.map_err(|problem| refuse(first_lines(&problem)))
    }

    /// How the grammar language writes this text, in which there may be special tokens.
    pub(crate) fn literals(&self, text: &str) -> String {
        let special = self.special.iter().map(|(text, id)| (text.as_str(), *id));
        let special: Vec<_> = special.filter(|(token, _)| text.contains(token)).collect();
        primerl_render::literals(text, &special)
    }
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Vocabulary").field(&self.identity).finish()
    }
}

/// Work that a grammar may cost: of the library's units about 14,000 to 50,000 a millisecond, so a mask takes at most
/// some ten milliseconds, and typically well below one. Counted, not timed: a machine under load allows the same tokens.
fn limits() -> ParserLimits {
    ParserLimits {
        step_lexer_fuel: 100_000,
        step_max_items: 50_000,
        verbose_errors: false,
        ..ParserLimits::default()
    }
}

/// The library adds its state to some messages.
fn first_lines(message: &str) -> String {
    const MOST: usize = 400;
    let message = message.split("<state>").next().unwrap_or_default().trim();
    message.chars().take(MOST).collect()
}
