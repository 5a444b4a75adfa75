//! What an answer must be like: its tokens, their log-probabilities, and the weights that sampled them.

use super::{NOT_FINITE, TokenLogprob, VersionSpan, malformed};
use crate::error::EngineError;
use primerl_core::{PolicyVersion, VersionRun, VersionRuns};

/// A log-probability is at most 0; engines that compute in half precision may miss that by this much.
const LOGPROB_ROUNDING: f32 = 1e-3;

/// If it were accepted, the end of an unfinished answer would be trained: the model would learn to stop there.
pub(super) fn check_stop(token_ids: &[u32], stop_token_ids: &[u32]) -> Result<(), EngineError> {
    let Some(last) = token_ids.last() else {
        return Ok(());
    };
    if stop_token_ids.is_empty() || stop_token_ids.contains(last) {
        return Ok(());
    }
    Err(malformed(format!(
        "finish_reason is \"stop\", and the last token, {last}, is not one that ends an answer ({stop_token_ids:?})"
    )))
}

pub(super) fn check_logprobs(
    content: &[TokenLogprob],
    token_ids: &[u32],
    lowest: f32,
) -> Result<(), EngineError> {
    let differs = |(logprob, token): (&TokenLogprob, &u32)| logprob.token_id != *token;
    if content.len() != token_ids.len() || content.iter().zip(token_ids).any(differs) {
        return Err(malformed(
            "the log-probabilities are not those of the sampled tokens".into(),
        ));
    }
    let infinite = |token: &TokenLogprob| !token.logprob.is_finite() || token.logprob == NOT_FINITE;
    if content.iter().any(infinite) {
        return Err(malformed(
            "a sampled token has no finite log-probability".into(),
        ));
    }
    let mut problems = content
        .iter()
        .filter_map(|token| implausible(token.logprob, lowest));
    problems
        .next()
        .map_or(Ok(()), |problem| Err(malformed(problem)))
}

/// What is wrong with the log-probability of a sampled token, if anything.
fn implausible(logprob: f32, lowest: f32) -> Option<String> {
    match logprob {
        above if above > LOGPROB_ROUNDING => {
            Some(format!("{above} is not a log-probability: it is above 0"))
        }
        below if below < lowest => Some(format!(
            "a sampled token has the log-probability {below:e}, and none can be sampled below {lowest}"
        )),
        _ => None,
    }
}

/// The most likely tokens at each position.
pub(super) fn tops(content: &[TokenLogprob], count: u32) -> Vec<Vec<(u32, f32)>> {
    match count {
        0 => Vec::new(),
        count => content.iter().map(|token| token.top(count)).collect(),
    }
}

/// Keeps the runs of the first `tokens` tokens.
pub(super) fn cut_runs(runs: &mut VersionRuns, tokens: usize) {
    let mut left = tokens as u32;
    for run in runs.iter_mut() {
        run.n_tokens = run.n_tokens.min(left);
        left -= run.n_tokens;
    }
    runs.retain(|run| run.n_tokens > 0);
}

pub(super) fn version_runs(
    spans: Vec<VersionSpan>,
    tokens: usize,
) -> Result<VersionRuns, EngineError> {
    let mut covered = 0;
    let mut runs = VersionRuns::with_capacity(spans.len());
    for span in spans {
        let Ok(version) = span.version.parse() else {
            let label = span.version;
            return Err(EngineError::Unproved { label });
        };
        if span.start != covered || span.end < span.start {
            break;
        }
        covered = span.end;
        if span.end > span.start {
            runs.push(VersionRun {
                version: PolicyVersion(version),
                n_tokens: (span.end - span.start) as u32,
            });
        }
    }
    if covered != tokens {
        let problem = format!("weight_versions cover {covered} of {tokens} tokens");
        return Err(malformed(problem));
    }
    Ok(runs)
}
