//! Checks what a request asks for, and applies the limits of model and configuration.

use super::{InvalidRequest, RequestedSampling, SamplingParams};
use crate::config::Config;
use crate::model_info::ModelInfo;

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
    let eos = model.eos_token_ids.first().copied();
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
        stop_token_ids: stop_token_ids(requested, model)?,
        eos_token_id: eos.filter(|_| !requested.ignore_eos),
        // `logprobs` 0 and 1 both mean the sampled token alone.
        top_logprobs: top_count("logprobs", requested.logprobs, config, model)?
            .filter(|&k| k > 1)
            .unwrap_or(0),
        prompt_logprobs: top_count("prompt_logprobs", requested.prompt_logprobs, config, model)?,
        experts_from: experts_from(requested, prompt_ids.len())?,
    };
    Ok((prompt_ids, sampling))
}

/// The request's, and the model's ends of sequence but for the first.
fn stop_token_ids(
    requested: &RequestedSampling,
    model: &ModelInfo,
) -> Result<Vec<u32>, InvalidRequest> {
    let mut ids = Vec::with_capacity(requested.stop_token_ids.len());
    for &id in &requested.stop_token_ids {
        ids.push(in_vocabulary(id, model).ok_or_else(|| {
            let message = format!("stop_token_ids contains out-of-vocab token id: {id}.");
            InvalidRequest::new("stop_token_ids", message, id)
        })?);
    }
    if !requested.ignore_eos {
        ids.extend(model.eos_token_ids.iter().skip(1));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(ids)
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
    check_temperature(requested.temperature)?;
    check_top_p(requested.top_p)?;
    check_top_k(requested.top_k)?;
    check_min_p(requested.min_p)?;
    let min_tokens = requested.min_tokens;
    if min_tokens < 0 {
        let message = format!("min_tokens must be greater than or equal to 0, got {min_tokens}.");
        return Err(InvalidRequest::new("min_tokens", message, min_tokens));
    }
    match requested.max_tokens {
        Some(max_tokens) => check_max_tokens(max_tokens, min_tokens),
        None => Ok(()),
    }
}

fn check_max_tokens(max_tokens: i64, min_tokens: i64) -> Result<(), InvalidRequest> {
    if max_tokens < 1 {
        let message = format!("max_tokens must be at least 1, got {max_tokens}.");
        return Err(InvalidRequest::new("max_tokens", message, max_tokens));
    }
    if min_tokens > max_tokens {
        let message = format!(
            "min_tokens must be less than or equal to max_tokens={max_tokens}, got {min_tokens}."
        );
        return Err(InvalidRequest::new("min_tokens", message, min_tokens));
    }
    Ok(())
}

fn check_temperature(temperature: f64) -> Result<(), InvalidRequest> {
    if temperature.is_finite() && temperature >= 0.0 {
        return Ok(());
    }
    let message = format!("temperature must be non-negative, got {temperature}.");
    Err(InvalidRequest::new("temperature", message, temperature))
}

fn check_top_p(top_p: f64) -> Result<(), InvalidRequest> {
    if top_p > 0.0 && top_p <= 1.0 {
        return Ok(());
    }
    let message = format!("top_p must be in (0, 1], got {top_p}.");
    Err(InvalidRequest::new("top_p", message, top_p))
}

fn check_top_k(top_k: i64) -> Result<(), InvalidRequest> {
    if top_k >= -1 {
        return Ok(());
    }
    let message = format!("top_k must be 0 (disable), or at least 1, got {top_k}.");
    Err(InvalidRequest::new("top_k", message, top_k))
}

fn check_min_p(min_p: f64) -> Result<(), InvalidRequest> {
    if (0.0..=1.0).contains(&min_p) {
        return Ok(());
    }
    let message = format!("min_p must be in [0, 1], got {min_p}.");
    Err(InvalidRequest::new("min_p", message, min_p))
}

fn check_prompt(
    prompt: &[i64],
    max_tokens_given: bool,
    config: &Config,
    model: &ModelInfo,
) -> Result<Vec<u32>, InvalidRequest> {
    check_length(prompt.len(), max_tokens_given, config)?;
    let id = |&id: &i64| {
        in_vocabulary(id, model)
            .ok_or_else(|| InvalidRequest::plain(format!("Token id {id} is out of vocabulary")))
    };
    prompt.iter().map(id).collect()
}

fn check_length(
    length: usize,
    max_tokens_given: bool,
    config: &Config,
) -> Result<(), InvalidRequest> {
    let limit = config.max_model_len as usize;
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
    Ok(())
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

    if count < -1 {
        let message = format!("{parameter} must be non-negative or -1, got {count}.");
        return Err(InvalidRequest::new(parameter, message, count));
    }
    let all = i64::from(model.vocab_size);
    let asked = if count == -1 { all } else { count };
    let cap = config.max_logprobs;
    if cap >= 0 && asked > cap {
        let message = above_cap(parameter, asked, cap);
        return Err(InvalidRequest::new(parameter, message, count));
    }
    Ok(Some(asked.min(all) as u32))
}

fn above_cap(parameter: &str, asked: i64, cap: i64) -> String {
    let kind = match parameter {
        "logprobs" => "sample",
        _ => "prompt",
    };
    format!("Requested {kind} logprobs of {asked}, which is greater than max allowed: {cap}")
}
