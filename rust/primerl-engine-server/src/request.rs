//! One generation request, checked and resolved.

mod resolve;

pub use resolve::resolve;

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::model_info::ModelInfo;

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
