//! How an answer is sampled: what the request may choose, and what its rollout decides.
//!
//! A training rollout samples from the policy's own distribution, as the trainer assumes, or from what truncation or a
//! grammar keeps of it, which is recorded and replayed. An evaluation may sample in any way.

use super::fields::Fields;
use crate::Sampling;
use bytes::Bytes;
use primerl_core::Truncation;
use primerl_service::http::ApiError;
use serde_json::{Map, Value, json};

/// Stop sequences of one request; more, or longer ones, are a mistake.
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 512;
/// OpenAI's limit; engines are asked for one more.
const MOST_TOP_LOGPROBS: u32 = 20;
const MOST_CHOICES: u32 = 128;

/// What the engines are asked for, in addition to the prompt.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TurnSampling {
    pub temperature: f64,
    /// Longest answer in tokens, before the context length is considered.
    pub max_tokens: u32,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// Number of alternatives returned for each token; `None`: no log-probabilities.
    pub logprobs: Option<u32>,
    pub truncation: Truncation,
    /// A grammar, a schema or a choice that the answer must follow, in vLLM's format.
    pub structured_outputs: Option<Value>,
    /// A tool call that the answer must be.
    pub demanded: Option<Demanded>,
}

/// The call that a client demands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Demanded {
    /// A call of any tool.
    Any,
    Tool(String),
}

impl Demanded {
    /// The demand in OpenAI's format.
    pub(crate) fn choice(&self) -> Value {
        match self {
            Demanded::Any => "required".into(),
            Demanded::Tool(name) => json!({"type": "function", "function": {"name": name}}),
        }
    }
}

/// The kind of rollout that the request belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules<'a> {
    pub sampling: &'a Sampling,
    pub evaluation: bool,
}

impl Rules<'_> {
    /// Takes the fields that have the same names in all dialects. `max_tokens` is what the dialect found.
    pub(crate) fn read(
        &self,
        fields: &mut Fields,
        max_tokens: Option<u32>,
        stop: Vec<String>,
    ) -> Result<TurnSampling, ApiError> {
        let temperature = self.temperature(fields)?;
        if max_tokens == Some(0) {
            return Err(ApiError::invalid("max_tokens must be at least 1").param("max_tokens"));
        }
        let ceiling = self.sampling.max_tokens;
        Ok(TurnSampling {
            temperature,
            max_tokens: max_tokens.map_or(ceiling, |asked| asked.min(ceiling)),
            stop: checked_stops(stop)?,
            logprobs: None,
            truncation: self.truncation(fields)?,
            structured_outputs: None,
            demanded: None,
        })
    }

    /// Variables of the chat template: the request's as JSON text, and the run's.
    pub(crate) fn template_kwargs(&self, asked: Option<Bytes>) -> Result<Option<Bytes>, ApiError> {
        if self.sampling.template_kwargs.is_none() {
            return Ok(asked);
        }
        let asked: Result<Option<Map<String, Value>>, _> = match &asked {
            Some(text) => serde_json::from_slice(text),
            None => Ok(None),
        };
        let name = "chat_template_kwargs";
        let asked =
            asked.map_err(|error| ApiError::invalid(format!("{name}: {error}")).param(name))?;
        let mut kwargs = asked.unwrap_or_default();
        self.sampling.add_template_kwargs(&mut kwargs);
        Ok(Some(Value::Object(kwargs).to_string().into()))
    }

    fn temperature(&self, fields: &mut Fields) -> Result<f64, ApiError> {
        let own = self.sampling.temperature;
        let Some(asked) = fields.number("temperature")? else {
            return Ok(own);
        };
        if self.evaluation && asked.is_finite() && asked >= 0.0 {
            return Ok(asked);
        }
        if (asked - own).abs() > 1e-6 {
            let message = format!(
                "temperature is {asked}, but this rollout samples at {own}; omit it or send the same value"
            );
            return Err(ApiError::invalid(message).param("temperature"));
        }
        Ok(own)
    }

    fn truncation(&self, fields: &mut Fields) -> Result<Truncation, ApiError> {
        let asked = Asked::take(fields)?;
        let own = match self.evaluation {
            true => Truncation::default(),
            false => self.sampling.replayed.unwrap_or_default(),
        };
        if self.evaluation || self.sampling.replayed.is_some() {
            return Ok(asked.over(own));
        }
        match asked.narrowing() {
            Some(name) => {
                let message = format!(
                    "{name} is not supported in a training rollout: its tokens would not be sampled from the policy's \
                     own distribution, which the trainer assumes; omit it, or set sampling.truncated = \"replay\" \
                     in the orchestrator's config"
                );
                Err(refused(name, message))
            }
            None => Ok(own),
        }
    }
}

fn refused(name: &str, message: String) -> ApiError {
    ApiError::invalid(message)
        .param(name)
        .code("unsupported_parameter")
}

fn check_bound(
    name: &str,
    value: Option<f64>,
    holds: impl Fn(f64) -> bool,
    bound: &str,
) -> Result<(), ApiError> {
    match value {
        Some(value) if !holds(value) => {
            let message = format!("{name} is {value}; it must be {bound}");
            Err(ApiError::invalid(message).param(name))
        }
        _ => Ok(()),
    }
}

/// The truncation that a request asks for, within vLLM's bounds.
struct Asked {
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
}

impl Asked {
    fn take(fields: &mut Fields) -> Result<Asked, ApiError> {
        let (top_p, top_k, min_p) = (
            fields.number("top_p")?,
            fields.number("top_k")?,
            fields.number("min_p")?,
        );
        let share = |value: f64| value as f32 > 0.0 && value <= 1.0;
        check_bound("top_p", top_p, share, "more than 0 and at most 1")?;
        let number = |value: f64| value >= -1.0 && value.fract() == 0.0;
        check_bound("top_k", top_k, number, "a whole number, 0 for all tokens")?;
        let probability = |value| (0.0..=1.0).contains(&value);
        check_bound("min_p", min_p, probability, "0 to 1")?;
        Ok(Asked {
            top_p: top_p.map(|top_p| top_p as f32),
            // -1 means 0, and a value that is too large is reduced to the maximum: both keep all tokens.
            top_k: top_k.map(|top_k| top_k as u32),
            min_p: min_p.map(|min_p| min_p as f32),
        })
    }

    fn over(&self, own: Truncation) -> Truncation {
        Truncation {
            top_p: self.top_p.unwrap_or(own.top_p),
            top_k: self.top_k.unwrap_or(own.top_k),
            min_p: self.min_p.unwrap_or(own.min_p),
        }
    }

    /// The first parameter that removes tokens from the distribution.
    fn narrowing(&self) -> Option<&'static str> {
        let asked = self.over(Truncation::default());
        let narrowing = [
            ("top_p", asked.top_p != 1.0),
            ("top_k", asked.top_k != 0),
            ("min_p", asked.min_p != 0.0),
        ];
        narrowing
            .into_iter()
            .find_map(|(name, narrows)| narrows.then_some(name))
    }
}

fn checked_stops(stop: Vec<String>) -> Result<Vec<String>, ApiError> {
    let refuse = |problem: String| Err(ApiError::invalid(problem).param("stop"));
    if stop.len() > MOST_STOPS {
        return refuse(format!("stop holds more than {MOST_STOPS} sequences"));
    }
    if stop.iter().any(String::is_empty) {
        return refuse("a stop sequence is empty".into());
    }
    if stop.iter().any(|text| text.len() > LONGEST_STOP) {
        return refuse(format!(
            "a stop sequence is longer than {LONGEST_STOP} bytes"
        ));
    }
    Ok(stop)
}

/// `n` of the OpenAI dialects.
pub(crate) fn choices(fields: &mut Fields) -> Result<u32, ApiError> {
    match fields.count("n")?.unwrap_or(1) {
        n @ 1..=MOST_CHOICES => Ok(n),
        n => Err(
            ApiError::invalid(format!("n is {n}; it must be from 1 to {MOST_CHOICES}")).param("n"),
        ),
    }
}

/// Number of alternatives for each token, within what engines support.
pub(crate) fn top_logprobs(asked: Option<u32>, name: &str) -> Result<u32, ApiError> {
    match asked.unwrap_or(0) {
        k @ 0..=MOST_TOP_LOGPROBS => Ok(k),
        k => {
            let message = format!("{name} is {k}; at most {MOST_TOP_LOGPROBS} are given");
            Err(ApiError::invalid(message).param(name))
        }
    }
}

/// vLLM's parameter for OpenAI's answer format; `name` is `response_format` or `text.format`.
pub(crate) fn structured_outputs(
    name: &str,
    format: &Map<String, Value>,
) -> Result<Option<Value>, ApiError> {
    let refuse = |problem: String| {
        Err(ApiError::invalid(problem)
            .param(name)
            .code("unsupported_parameter"))
    };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(serde_json::json!({"json_object": true}))),
        Some("json_schema") => {
            let named = format.get("json_schema");
            let named = named.and_then(|named| named.get("schema"));
            match named.or_else(|| format.get("schema")) {
                Some(schema @ Value::Object(_)) => Ok(Some(serde_json::json!({"json": schema}))),
                _ => refuse(format!("{name}: its schema must be an object")),
            }
        }
        _ => refuse(format!(
            "{name}.type must be text, json_object or json_schema"
        )),
    }
}
