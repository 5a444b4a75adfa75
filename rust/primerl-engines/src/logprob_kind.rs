//! Which distribution an engine's log-probabilities come from: the one that the token was sampled from (in vLLM's words
//! `processed_logprobs`), or the model's own, without the sampling settings (`raw_logprobs`, vLLM's default).
//!
//! The trainer takes them for the first kind. The two are the same at temperature 1 with no token excluded; a run that
//! samples otherwise asks each engine two questions before it gets traffic, with the same prompt:
//!
//! ```text
//! plain: temperature 1, all tokens              l_i       of the most likely tokens, l_1 >= l_2 >= ...
//! asked: temperature 2, the k most likely ones  l_i / 2 - log(sum over j <= k of exp(l_j / 2))    processed
//!                                               l_i                                               raw
//! ```

use super::client::EngineClient;
use super::config::EnginesConfig;
use super::error::EngineError;
use super::generate::{Bounds, GenerateBody, Generated, SamplingParams, lowest_logprob};
use super::ids::PromptIds;
use super::served_version::Named;
use primerl_core::Truncation;
use primerl_core::conversation::History;
use std::time::Duration;

/// An engine that does not answer in this time is of no use anyway.
const TIMEOUT: Duration = Duration::from_secs(30);
const TEMPERATURE: f64 = 2.0;
/// Tokens whose log-probabilities are requested; engines return 20 at most unless they are configured otherwise.
pub(super) const ALTERNATIVES: u32 = 8;
/// Values that agree must be nearer by this factor than values that do not: engines compute in half precision, too.
const NEARER: f32 = 4.0;
/// If the answer to one prompt decides nothing, another's may. Two tokens each: vLLM's kernel for convolutions on a CPU
/// ends the engine at a prompt of one ("expect x to be transposed").
pub(super) const PROMPTS: [[u32; 2]; 3] = [[0, 1], [1, 2], [2, 0]];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meaning {
    Processed,
    Raw,
    Neither,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum LogprobKindError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error(
        "its log-probabilities are those of temperature 1 and all tokens (raw), but this run trains on tokens that were \
         sampled otherwise; start vLLM with `--logprobs-mode processed_logprobs`, `primerl inference` with \
         `--logprobs-mode processed_logprobs`, or leave sampling at temperature 1 and untruncated"
    )]
    Raw,
    #[error(
        "its log-probabilities are neither those of the distribution that was sampled from, nor those of temperature 1; \
         start it with `--logprobs-mode processed_logprobs`"
    )]
    Neither,
}

/// Checks that the engine's log-probabilities come from the distribution that it samples from.
pub(super) async fn prove_processed(
    client: &EngineClient,
    config: &EnginesConfig,
    named: &Named,
) -> Result<(), LogprobKindError> {
    for prompt in PROMPTS {
        match look(client, config, named, prompt).await? {
            Meaning::Processed => return Ok(()),
            Meaning::Raw => return Err(LogprobKindError::Raw),
            Meaning::Neither => {}
        }
    }
    Err(LogprobKindError::Neither)
}

/// What the answers to one prompt decide.
async fn look(
    client: &EngineClient,
    config: &EnginesConfig,
    named: &Named,
    prompt: [u32; 2],
) -> Result<Meaning, EngineError> {
    let plain = ask(client, config, named, prompt, 1.0, Truncation::default()).await?;
    let Some(kept) = widest_gap(&plain) else {
        return Ok(Meaning::Neither);
    };
    let truncation = Truncation {
        top_k: kept as u32,
        ..Truncation::default()
    };
    let asked = ask(client, config, named, prompt, TEMPERATURE, truncation).await?;
    Ok(meaning_of(&plain[..kept], &asked))
}

/// The most likely first tokens of an answer with their log-probabilities.
async fn ask(
    client: &EngineClient,
    config: &EnginesConfig,
    named: &Named,
    prompt: [u32; 2],
    temperature: f64,
    truncation: Truncation,
) -> Result<Vec<(u32, f32)>, EngineError> {
    let body = GenerateBody {
        request_id: "primerl-meaning-of-logprobs",
        model: &named.model,
        token_ids: PromptIds {
            history: &History::default(),
            suffix: &prompt,
        },
        sampling_params: SamplingParams {
            temperature,
            truncation,
            max_tokens: 1,
            logprobs: ALTERNATIVES,
            stop_token_ids: &[],
            detokenize: false,
            structured_outputs: None,
            structured_reasoning: None,
            routed_experts_prompt_start: None,
        },
        cache_salt: named.version.to_string(),
        stream: false,
    };
    let body = body
        .encode(&config.written_ids)
        .map_err(|error| EngineError::Malformed {
            call: "generate",
            problem: error.to_string(),
        })?;
    let bounds = Bounds {
        max_tokens: 1,
        top_logprobs: ALTERNATIVES,
        vocabulary_size: config.vocabulary_size,
        lowest_logprob: lowest_logprob(temperature, false),
        // Only one token is possible.
        stop_token_ids: &[],
        experts: None,
        experts_rows: usize::from(config.returns_experts) * (prompt.len() + 1),
    };
    let Generated { mut top, .. } = client.generate(body, named, bounds, TIMEOUT).await?;
    Ok(top.pop().unwrap_or_default())
}

/// How many of these tokens to keep, at least two, so that rounding keeps no others.
fn widest_gap(likely: &[(u32, f32)]) -> Option<usize> {
    let gap = |kept: &usize| likely[*kept - 1].1 - likely[*kept].1;
    (2..likely.len()).max_by(|a, b| gap(a).total_cmp(&gap(b)))
}

/// `plain`: the kept tokens at temperature 1; `asked`: the most likely tokens of the other question.
fn meaning_of(plain: &[(u32, f32)], asked: &[(u32, f32)]) -> Meaning {
    let scaled = |logprob: f32| f64::from(logprob) / TEMPERATURE;
    let sum: f64 = plain.iter().map(|(_, own)| scaled(*own).exp()).sum();
    let (mut from_processed, mut from_raw) = (0.0_f32, 0.0_f32);
    for (id, logprob) in plain {
        let Some((_, answered)) = asked.iter().find(|(other, _)| other == id) else {
            return Meaning::Neither;
        };
        let processed = (scaled(*logprob) - sum.ln()) as f32;
        from_processed = from_processed.max((answered - processed).abs());
        from_raw = from_raw.max((answered - logprob).abs());
    }
    if from_processed * NEARER < from_raw {
        Meaning::Processed
    } else if from_raw * NEARER < from_processed {
        Meaning::Raw
    } else {
        Meaning::Neither
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: [(u32, f32); 3] = [(7, -0.5), (3, -1.25), (9, -4.0)];

    #[test]
    fn the_widest_gap_is_behind_what_is_kept() {
        assert_eq!(
            widest_gap(&[(1, -1.0), (2, -3.0), (3, -3.1), (4, -4.5)]),
            Some(3)
        );
        assert_eq!(widest_gap(&PLAIN), Some(2));
        assert_eq!(widest_gap(&PLAIN[..2]), None);
    }

    #[test]
    fn an_answer_is_told_by_what_it_is_near_to() {
        let kept = &PLAIN[..2];
        let sum = (-0.25_f32).exp() + (-0.625_f32).exp();
        let processed = [(3, -0.625 - sum.ln() + 0.01), (7, -0.25 - sum.ln() - 0.01)];
        assert_eq!(meaning_of(kept, &processed), Meaning::Processed);
        assert_eq!(meaning_of(kept, &PLAIN), Meaning::Raw);
        // Processed without the truncation, or without the temperature.
        assert_eq!(meaning_of(kept, &[(7, -0.9), (3, -1.28)]), Meaning::Neither);
        assert_eq!(meaning_of(kept, &processed[..1]), Meaning::Neither);
    }
}
