//! One generation request, checked and resolved.

use crate::config::Config;
use crate::model_info::ModelInfo;

/// One sequence in the engine. A request with `n` > 1 has one key per choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestKey(pub u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FinishReason {
    Stop,
    Length,
    Abort,
    /// [`crate::sequence::Completion::failure`] says why.
    Error,
}

impl FinishReason {
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::Error => "error",
        }
    }
}

/// Resolved sampling parameters: defaults filled in, limits applied.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    pub top_p: f32,
    /// 0 is off.
    pub top_k: u32,
    pub min_p: f32,
    pub seed: u64,
    /// At least 1, and prompt + `max_tokens` fits `max_model_len`.
    pub max_tokens: u32,
    /// End-of-sequence and stop tokens cannot be sampled before this many tokens.
    pub min_tokens: u32,
    /// Stop with this token as `stop_reason`. Without duplicates.
    pub stop_token_ids: Vec<u32>,
    /// Stop with `stop_reason: null`; `None` when the request ignores it.
    pub eos_token_id: Option<u32>,
    /// How many of the most likely tokens are to be returned with each sampled one (0 = none).
    pub top_logprobs: u32,
    /// As `top_logprobs`, for the prompt's tokens; `None` does not score the prompt.
    pub prompt_logprobs: Option<u32>,
    /// First token of the prompt whose experts are reported, where any are.
    pub experts_from: u32,
}

/// Sampling parameters as they come in, before limits of model and configuration are applied.
#[derive(Clone, Debug)]
pub struct RequestedSampling {
    pub temperature: f64,
    pub top_p: f64,
    pub top_k: i64,
    pub min_p: f64,
    pub seed: Option<i64>,
    pub max_tokens: Option<i64>,
    pub min_tokens: i64,
    pub stop_token_ids: Vec<i64>,
    pub ignore_eos: bool,
    pub logprobs: Option<i64>,
    pub prompt_logprobs: Option<i64>,
    pub routed_experts_prompt_start: i64,
}

impl Default for RequestedSampling {
    fn default() -> Self {
        RequestedSampling {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
            routed_experts_prompt_start: 0,
        }
    }
}

/// A parameter out of its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{message}")]
pub struct InvalidRequest {
    pub parameter: Option<&'static str>,
    pub message: String,
}

impl InvalidRequest {
    fn new(
        parameter: &'static str,
        message: impl Into<String>,
        value: impl std::fmt::Display,
    ) -> Self {
        let message = format!("{} (parameter={parameter}, value={value})", message.into());
        InvalidRequest {
            parameter: Some(parameter),
            message,
        }
    }

    fn plain(message: impl Into<String>) -> Self {
        InvalidRequest {
            parameter: None,
            message: message.into(),
        }
    }
}

/// Checks prompt ids and length, and resolves the sampling parameters of one choice.
///
/// # Errors
/// [`InvalidRequest`] with the message vLLM gives for the same mistake.
pub fn resolve(
    prompt: &[i64],
    requested: &RequestedSampling,
    config: &Config,
    model: &ModelInfo,
) -> Result<(Vec<u32>, SamplingParams), InvalidRequest> {
    check_ranges(requested)?;
    let prompt_ids = check_prompt(prompt, requested.max_tokens.is_some(), config, model)?;
    let room = config.max_model_len - prompt_ids.len() as u32;
    let max_tokens = match requested.max_tokens {
        None => room,
        Some(count) => u32::try_from(count).unwrap_or(u32::MAX).min(room),
    };
    let mut stop_token_ids = Vec::with_capacity(requested.stop_token_ids.len());
    for &id in &requested.stop_token_ids {
        stop_token_ids.push(in_vocabulary(id, model).ok_or_else(|| {
            InvalidRequest::new(
                "stop_token_ids",
                format!("stop_token_ids contains out-of-vocab token id: {id}."),
                id,
            )
        })?);
    }
    let mut eos_token_id = None;
    if !requested.ignore_eos {
        eos_token_id = model.eos_token_ids.first().copied();
        stop_token_ids.extend(model.eos_token_ids.iter().skip(1));
    }
    stop_token_ids.sort_unstable();
    stop_token_ids.dedup();
    let sampling = SamplingParams {
        temperature: requested.temperature as f32,
        top_p: requested.top_p as f32,
        top_k: u32::try_from(requested.top_k)
            .unwrap_or(0)
            .min(model.vocab_size),
        min_p: requested.min_p as f32,
        seed: requested.seed.unwrap_or(0) as u64,
        max_tokens,
        min_tokens: u32::try_from(requested.min_tokens)
            .unwrap_or(u32::MAX)
            .min(max_tokens),
        stop_token_ids,
        eos_token_id,
        // `logprobs` 0 and 1 both mean the sampled token alone.
        top_logprobs: top_count("logprobs", requested.logprobs, config, model)?
            .filter(|&k| k > 1)
            .unwrap_or(0),
        prompt_logprobs: top_count("prompt_logprobs", requested.prompt_logprobs, config, model)?,
        experts_from: experts_from(requested, prompt_ids.len())?,
    };
    Ok((prompt_ids, sampling))
}

fn experts_from(requested: &RequestedSampling, prompt: usize) -> Result<u32, InvalidRequest> {
    let start = requested.routed_experts_prompt_start;
    u32::try_from(start)
        .ok()
        .filter(|start| *start as usize <= prompt)
        .ok_or_else(|| {
            let message =
                format!("routed_experts_prompt_start must be between 0 and {prompt}, got {start}.");
            InvalidRequest::new("routed_experts_prompt_start", message, start)
        })
}

fn check_ranges(requested: &RequestedSampling) -> Result<(), InvalidRequest> {
    let RequestedSampling {
        temperature,
        top_p,
        top_k,
        min_p,
        min_tokens,
        max_tokens,
        ..
    } = *requested;
    if !(temperature.is_finite() && temperature >= 0.0) {
        let message = format!("temperature must be non-negative, got {temperature}.");
        return Err(InvalidRequest::new("temperature", message, temperature));
    }
    if !(top_p > 0.0 && top_p <= 1.0) {
        return Err(InvalidRequest::new(
            "top_p",
            format!("top_p must be in (0, 1], got {top_p}."),
            top_p,
        ));
    }
    if top_k < -1 {
        let message = format!("top_k must be 0 (disable), or at least 1, got {top_k}.");
        return Err(InvalidRequest::new("top_k", message, top_k));
    }
    if !(0.0..=1.0).contains(&min_p) {
        return Err(InvalidRequest::new(
            "min_p",
            format!("min_p must be in [0, 1], got {min_p}."),
            min_p,
        ));
    }
    if min_tokens < 0 {
        let message = format!("min_tokens must be greater than or equal to 0, got {min_tokens}.");
        return Err(InvalidRequest::new("min_tokens", message, min_tokens));
    }
    if let Some(count) = max_tokens {
        if count < 1 {
            let message = format!("max_tokens must be at least 1, got {count}.");
            return Err(InvalidRequest::new("max_tokens", message, count));
        }
        if min_tokens > count {
            let message = format!(
                "min_tokens must be less than or equal to max_tokens={count}, got {min_tokens}."
            );
            return Err(InvalidRequest::new("min_tokens", message, min_tokens));
        }
    }
    Ok(())
}

fn check_prompt(
    prompt: &[i64],
    max_tokens_given: bool,
    config: &Config,
    model: &ModelInfo,
) -> Result<Vec<u32>, InvalidRequest> {
    let limit = config.max_model_len as usize;
    let length = prompt.len();
    if length > limit {
        return Err(InvalidRequest::plain(if max_tokens_given {
            format!(
                "The decoder prompt (length {length}) is longer than the maximum model length of {limit}. \
                 Make sure that `max_model_len` is no smaller than the number of prompt tokens."
            )
        } else {
            format!("Input length ({length}) exceeds model's maximum context length ({limit}).")
        }));
    }
    if length == limit {
        return Err(InvalidRequest::plain(format!(
            "The decoder prompt (length {length}) plus the number of requested output tokens (at least 1) is longer than \
             the maximum model length of {limit}. Make sure that `max_model_len` is no smaller than the number of \
             prompt tokens plus one."
        )));
    }
    prompt
        .iter()
        .map(|&id| {
            in_vocabulary(id, model)
                .ok_or_else(|| InvalidRequest::plain(format!("Token id {id} is out of vocabulary")))
        })
        .collect()
}

fn in_vocabulary(id: i64, model: &ModelInfo) -> Option<u32> {
    u32::try_from(id).ok().filter(|&id| id < model.vocab_size)
}

fn top_count(
    parameter: &'static str,
    count: Option<i64>,
    config: &Config,
    model: &ModelInfo,
) -> Result<Option<u32>, InvalidRequest> {
    let Some(count) = count else { return Ok(None) };
    let kind = if parameter == "logprobs" {
        "sample"
    } else {
        "prompt"
    };
    if count < -1 {
        let message = format!("{parameter} must be non-negative or -1, got {count}.");
        return Err(InvalidRequest::new(parameter, message, count));
    }
    let asked = if count == -1 {
        i64::from(model.vocab_size)
    } else {
        count
    };
    if config.max_logprobs >= 0 && asked > config.max_logprobs {
        let cap = config.max_logprobs;
        let message = format!(
            "Requested {kind} logprobs of {asked}, which is greater than max allowed: {cap}"
        );
        return Err(InvalidRequest::new(parameter, message, count));
    }
    Ok(Some(asked.min(i64::from(model.vocab_size)) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> ModelInfo {
        ModelInfo {
            vocab_size: 100,
            max_model_len: 16,
            slots: 4,
            eos_token_ids: vec![7, 9],
            loadable: None,
        }
    }

    fn config() -> Config {
        Config {
            max_model_len: 16,
            ..Config::default()
        }
    }

    fn resolved(requested: RequestedSampling) -> Result<SamplingParams, InvalidRequest> {
        resolve(&[1, 2, 3], &requested, &config(), &model()).map(|(_, sampling)| sampling)
    }

    #[test]
    fn max_tokens_fills_and_clamps() {
        assert_eq!(
            resolved(RequestedSampling::default()).unwrap().max_tokens,
            13
        );
        let asked = RequestedSampling {
            max_tokens: Some(1000),
            ..Default::default()
        };
        assert_eq!(resolved(asked).unwrap().max_tokens, 13);
        let none = RequestedSampling {
            max_tokens: Some(0),
            ..Default::default()
        };
        assert_eq!(resolved(none).unwrap_err().parameter, Some("max_tokens"));
    }

    #[test]
    fn end_of_sequence_list() {
        let sampling = resolved(RequestedSampling {
            stop_token_ids: vec![3, 9],
            ..Default::default()
        })
        .unwrap();
        assert_eq!(
            (sampling.eos_token_id, sampling.stop_token_ids),
            (Some(7), vec![3, 9])
        );
        let ignoring = RequestedSampling {
            ignore_eos: true,
            stop_token_ids: vec![3],
            ..Default::default()
        };
        let sampling = resolved(ignoring).unwrap();
        assert_eq!(
            (sampling.eos_token_id, sampling.stop_token_ids),
            (None, vec![3])
        );
    }

    #[test]
    fn bad_prompts_are_refused() {
        let sampling = RequestedSampling::default();
        for prompt in [vec![100], vec![-1], vec![1; 16], vec![1; 17]] {
            assert!(
                resolve(&prompt, &sampling, &config(), &model()).is_err(),
                "{prompt:?}"
            );
        }
        assert!(resolve(&[1; 15], &sampling, &config(), &model()).is_ok());
    }

    #[test]
    fn logprobs_are_capped() {
        let over = RequestedSampling {
            logprobs: Some(50),
            ..Default::default()
        };
        assert!(
            resolved(over)
                .unwrap_err()
                .message
                .contains("greater than max allowed: 20")
        );
        for (asked, top) in [(None, 0), (Some(0), 0), (Some(1), 0), (Some(3), 3)] {
            let requested = RequestedSampling {
                logprobs: asked,
                ..Default::default()
            };
            assert_eq!(resolved(requested).unwrap().top_logprobs, top);
        }
    }
}
