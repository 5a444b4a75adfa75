//! Structured outputs: which tokens a JSON schema, a regular expression, a choice or a grammar allows next.
//!
//! A [`Spec`] says what an answer must obey. A [`Vocabulary`] compiles it into [`Masks`], which give the set of allowed
//! tokens before each sampled token and then take that token in. A mask depends on the spec, the vocabulary, this
//! crate's version and the tokens before, and on nothing else: a process that has the spec and the tokens of an answer gets the
//! masks that its engine applied ([`replay`]), so a recorded answer carries its spec in place of its masks.
//! [`Vocabulary::identity`] names vocabulary and version; equal identities give equal masks.
//!
//! ```text
//! spec {"json": {"type": "boolean"}}     masks: [t f] -> "t" -> [r] -> "r" -> [u] -> ... -> [the ids that end it]
//! ```
//! The work per mask is limited (see `LIMITS` in `vocabulary.rs`); a grammar that needs more is an error, not a stall.

mod masks;
mod replay;
mod spec;
mod vocabulary;

pub use masks::{Mask, Masks};
pub use replay::{Replayed, after, replay};
pub use spec::{Reasoning, Spec};
pub use vocabulary::Vocabulary;

/// Why there is no mask.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// The request asks for something that cannot be enforced.
    #[error("{parameter}: {problem}")]
    Unsupported { parameter: String, problem: String },
    /// No spec can be enforced with this tokenizer.
    #[error(
        "structured outputs need a tokenizer that decodes token by token, and this model's does not"
    )]
    Tokenizer,
    /// The grammar was accepted, but a mask took more work than is allowed, or no token fits.
    #[error("after {tokens} tokens of the answer: {problem}")]
    Step { tokens: usize, problem: String },
    /// A recorded token that its mask does not allow.
    #[error(
        "token {index} of the answer, {token}, is not allowed by the grammar that it was recorded with"
    )]
    Disallowed { index: usize, token: u32 },
}

impl GrammarError {
    pub(crate) fn unsupported(parameter: &str, problem: impl Into<String>) -> Self {
        GrammarError::Unsupported {
            parameter: parameter.to_owned(),
            problem: problem.into(),
        }
    }
}
