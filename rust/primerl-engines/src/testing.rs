//! Answers of an engine from their bytes to what is recorded, without the engine; for fuzzing.

use super::error::EngineError;
use super::experts::WantedExperts;
use super::generate::{Bounds, GenerateAnswer, Generated};
use super::stream::Assembly;

const BOUNDS: Bounds<'static> = Bounds {
    max_tokens: 64,
    top_logprobs: 2,
    vocabulary_size: Some(300),
    lowest_logprob: -104.0,
    stop_token_ids: &[],
    experts: Some(WantedExperts {
        before: 1,
        prompt: 3,
    }),
    experts_rows: 4 + 64,
};

/// A streamed answer that comes in these pieces.
pub fn assemble(pieces: &[&[u8]]) -> Result<Generated, EngineError> {
    let mut assembly = Assembly::new(BOUNDS.max_tokens);
    for piece in pieces {
        assembly.push(piece)?;
    }
    assembly
        .finish(false)?
        .check(&BOUNDS, None)
        .inspect(is_whole)
}

/// An answer that comes as one body.
pub fn whole(body: &[u8]) -> Result<Generated, EngineError> {
    let answer: GenerateAnswer =
        serde_json::from_slice(body).map_err(|error| EngineError::Malformed {
            call: "generate",
            problem: error.to_string(),
        })?;
    answer.check(&BOUNDS).inspect(is_whole)
}

/// What the core relies on.
fn is_whole(generated: &Generated) {
    let tokens = generated.token_ids.len();
    assert_eq!(generated.logprobs.len(), tokens);
    assert!(generated.logprobs.iter().all(|logprob| logprob.is_finite()));
    let by_version: usize = generated
        .versions
        .iter()
        .map(|run| run.n_tokens as usize)
        .sum();
    assert_eq!(by_version, tokens);
}
