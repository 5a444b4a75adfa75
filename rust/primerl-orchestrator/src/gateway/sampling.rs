//! How an answer is sampled: what the request may choose, and what its rollout decides.
//!
//! A training rollout samples from the policy's own distribution, for that is what the trainer assumes; an evaluation may
//! sample as it likes.

use super::fields::Fields;
use crate::config::Sampling;
use crate::engines::Truncation;
use crate::http::ApiError;
use serde_json::{Map, Value};

/// Stop sequences of one request; more, or longer ones, are a mistake.
const MOST_STOPS: usize = 16;
const LONGEST_STOP: usize = 512;
/// OpenAI's bound; engines are asked for one more.
const MOST_TOP_LOGPROBS: u32 = 20;
const MOST_CHOICES: u32 = 128;

/// What engines are asked for, besides the prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct TurnSampling {
    pub temperature: f64,
    /// Longest answer, tokens, before the context is considered.
    pub max_tokens: u32,
    /// The answer ends before the first of these texts.
    pub stop: Vec<String>,
    /// Alternatives to be returned for each token; `None`: no log-probabilities are.
    pub logprobs: Option<u32>,
    pub truncation: Truncation,
    pub structured_outputs: Option<Value>,
}

/// Whose request it is.
#[derive(Clone, Copy, Debug)]
pub struct Rules<'a> {
    pub sampling: &'a Sampling,
    pub evaluation: bool,
}

impl Rules<'_> {
    /// Takes the fields that all dialects name alike. `max_tokens` is what the dialect found.
    pub fn read(
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
        })
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
                "temperature is {asked}, this rollout samples at {own}; leave it out or ask for the same"
            );
            return Err(ApiError::invalid(message).param("temperature"));
        }
        Ok(own)
    }

    fn truncation(&self, fields: &mut Fields) -> Result<Truncation, ApiError> {
        let truncation = Truncation {
            top_p: fields.number("top_p")?.filter(|top_p| *top_p != 1.0),
            top_k: fields
                .number("top_k")?
                .filter(|top_k| *top_k > 0.0)
                .map(|top_k| top_k as i64),
            min_p: fields.number("min_p")?.filter(|min_p| *min_p != 0.0),
        };
        let given = [
            ("top_p", truncation.top_p.is_some()),
            ("top_k", truncation.top_k.is_some()),
            ("min_p", truncation.min_p.is_some()),
        ];
        match given.iter().find(|(_, given)| *given) {
            Some((name, _)) if !self.evaluation => Err(self.not_the_policy(name)),
            _ => Ok(truncation),
        }
    }

    /// A grammar, a schema or a choice that the answer must obey, as vLLM takes it.
    pub fn structured(
        &self,
        name: &str,
        outputs: Option<Value>,
    ) -> Result<Option<Value>, ApiError> {
        match outputs {
            Some(_) if !self.evaluation => Err(self.not_the_policy(name)),
            outputs => Ok(outputs),
        }
    }

    fn not_the_policy(&self, name: &str) -> ApiError {
        let message = format!(
            "{name} is not supported in a training rollout: its tokens would not be sampled from the policy's own \
             distribution, which the trainer assumes; leave it out"
        );
        ApiError::invalid(message)
            .param(name)
            .code("unsupported_parameter")
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
pub fn choices(fields: &mut Fields) -> Result<u32, ApiError> {
    match fields.count("n")?.unwrap_or(1) {
        n @ 1..=MOST_CHOICES => Ok(n),
        n => Err(
            ApiError::invalid(format!("n is {n}; it must be from 1 to {MOST_CHOICES}")).param("n"),
        ),
    }
}

/// Alternatives a token, within what engines give.
pub fn top_logprobs(asked: Option<u32>, name: &str) -> Result<u32, ApiError> {
    match asked.unwrap_or(0) {
        k @ 0..=MOST_TOP_LOGPROBS => Ok(k),
        k => {
            let message = format!("{name} is {k}; at most {MOST_TOP_LOGPROBS} are given");
            Err(ApiError::invalid(message).param(name))
        }
    }
}

/// vLLM's parameter for OpenAI's answer format, `response_format` or `text.format`, whichever `name` is.
pub fn structured_outputs(
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
            let schema = format
                .get("json_schema")
                .and_then(|named| named.get("schema"))
                .or_else(|| format.get("schema"));
            match schema {
                Some(schema @ Value::Object(_)) => Ok(Some(serde_json::json!({"json": schema}))),
                _ => refuse(format!("{name}: its schema must be an object")),
            }
        }
        _ => refuse(format!(
            "{name}.type must be text, json_object or json_schema"
        )),
    }
}
