//! An engine that scores tokens that it did not sample: `prompt_logprobs` of vLLM's `/inference/v1/generate`.

use super::ClientConfig;
use super::models::Models;
use super::server::{EndpointError, Server};
use bytes::Bytes;
use primerl_service::config_error::ConfigError;
use serde::Deserialize;
use serde_json::json;
use std::collections::HashMap;
use std::time::Duration;

/// A model in fp32 gives no lower log-probability, nats; a lower value is a placeholder.
const LOWEST: f32 = -1000.0;

/// A server that lives answers these at once; a machine whose cores are all busy needs some room.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub struct Scorer {
    server: Server,
    /// The URL without the `/v1` of its OpenAI routes.
    root: String,
}

/// The log-probabilities at one place in the prompt, by id: the token there and the most likely ones.
type Entries = HashMap<String, Entry>;

#[derive(Deserialize)]
struct Scored {
    /// By token; `None` for the first, which nothing precedes.
    prompt_logprobs: Option<Vec<Option<Entries>>>,
}

#[derive(Deserialize)]
struct Entry {
    logprob: f32,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

impl Scorer {
    /// One scorer for each server of the table called `name`.
    pub fn open_all(name: &str, config: &ClientConfig) -> Result<Vec<Scorer>, ConfigError> {
        let servers = Server::open_all(name, config)?.into_iter();
        let scorer = |server: Server| {
            let url = server.base_url();
            let root = url.strip_suffix("/v1").unwrap_or(url).to_owned();
            Scorer { server, root }
        };
        Ok(servers.map(scorer).collect())
    }

    /// Its address.
    pub fn root(&self) -> &str {
        &self.root
    }

    /// Longest time of one answer.
    pub fn timeout(&self) -> Duration {
        self.server.timeout()
    }

    /// Its description for people.
    pub fn describe(&self) -> String {
        format!("the teacher ({} at {})", self.server.model(), self.root)
    }

    /// Log-probability of each token, nats, at temperature 1; 0 for the first. `[N]`
    ///
    /// # Errors
    /// If the failure may pass, the error says how long the server asked not to be called.
    pub async fn score(
        &self,
        token_ids: &[u32],
    ) -> Result<Vec<f32>, (EndpointError, Option<Duration>)> {
        // One token is always sampled.
        let sampling = json!({"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0});
        let body = json!({
            "model": self.server.model(), "token_ids": token_ids, "sampling_params": sampling, "stream": false,
        });
        let answer = self.post("inference/v1/generate", &body).await?;
        scored_logprobs(&answer, token_ids)
            .map_err(|problem| (self.server.malformed(&problem), None))
    }

    /// Checks that the server answers at all; not every server has a route for that.
    ///
    /// # Errors
    /// As [`Scorer::score`].
    pub async fn health(&self) -> Result<(), (EndpointError, Option<Duration>)> {
        let url = format!("{}/health", self.root);
        match self.server.get(&url, LOOK_TIMEOUT).await {
            Err((EndpointError::Status { status, .. }, _)) if status < 500 => Ok(()),
            answer => answer.map(drop),
        }
    }

    /// Context length of the model, prompt and answer together, tokens; `None` if the server does not say.
    ///
    /// # Errors
    /// As [`Scorer::score`]; it is a refusal if the server lists its models, and this one is not among them.
    pub async fn max_model_len(&self) -> Result<Option<u32>, (EndpointError, Option<Duration>)> {
        let url = format!("{}/v1/models", self.root);
        let answer = match self.server.get(&url, LOOK_TIMEOUT).await {
            Err((
                EndpointError::Status {
                    status: 400 | 404 | 405 | 501,
                    ..
                },
                _,
            )) => {
                return Ok(None);
            }
            answer => answer?,
        };
        let Ok(models) = serde_json::from_slice::<Models>(&answer) else {
            return Ok(None);
        };
        let own = models
            .data
            .iter()
            .find(|card| card.id == self.server.model());
        own.map(|card| card.max_model_len).ok_or_else(|| {
            let names: Vec<&str> = models.data.iter().map(|card| card.id.as_str()).collect();
            let problem = format!("it serves {names:?}, not `{}`", self.server.model());
            (self.server.malformed(&problem), None)
        })
    }

    /// The server's token ids for a text; `None` if it has no route for that.
    pub async fn tokenize(
        &self,
        text: &str,
    ) -> Result<Option<Vec<u32>>, (EndpointError, Option<Duration>)> {
        let body =
            json!({"model": self.server.model(), "prompt": text, "add_special_tokens": false});
        let answer = match self.post("tokenize", &body).await {
            // The route does not exist, in whatever words; vLLM also returns 404 for a model that does not exist.
            Err((EndpointError::Status { status, message }, _))
                if matches!(status, 400 | 404 | 405 | 501)
                    && !message.contains("does not exist") =>
            {
                return Ok(None);
            }
            answer => answer?,
        };
        let tokenized: Result<Tokenized, _> = serde_json::from_slice(&answer);
        Ok(tokenized.ok().map(|tokenized| tokenized.tokens))
    }

    async fn post(
        &self,
        route: &str,
        body: &serde_json::Value,
    ) -> Result<Bytes, (EndpointError, Option<Duration>)> {
        let url = format!("{}/{route}", self.root);
        let body = Bytes::from(body.to_string());
        self.server.post(&url, body, self.server.timeout()).await
    }
}

/// Reads an answer to a request with `prompt_logprobs`: the log-probability of each token, nats; 0 for the first. `[N]`
pub fn scored_logprobs(answer: &[u8], token_ids: &[u32]) -> Result<Vec<f32>, String> {
    let scored = serde_json::from_slice(answer).map_err(|error| {
        format!("{error}; it has to be an engine with vLLM's /inference/v1/generate")
    })?;
    of_tokens(scored, token_ids)
}

fn of_tokens(scored: Scored, token_ids: &[u32]) -> Result<Vec<f32>, String> {
    let Some(given) = scored.prompt_logprobs else {
        return Err("it has no prompt_logprobs; use an engine that gives them".to_owned());
    };
    if given.len() != token_ids.len() {
        return Err(format!(
            "{} prompt_logprobs for {} tokens",
            given.len(),
            token_ids.len()
        ));
    }
    let one = |(at, (id, entries)): (usize, (&u32, Option<Entries>))| match at {
        0 => Ok(0.0),
        _ => logprob_of(at, *id, entries),
    };
    token_ids.iter().zip(given).enumerate().map(one).collect()
}

fn logprob_of(at: usize, id: u32, entries: Option<Entries>) -> Result<f32, String> {
    let entries = entries.ok_or_else(|| format!("no prompt_logprobs of token {at}"))?;
    let entry = entries.get(&id.to_string());
    let entry = entry.ok_or_else(|| format!("prompt_logprobs of token {at} are not of {id}"))?;
    match entry.logprob {
        // Sums of rounded numbers may end slightly above 0.
        above if (0.0..1e-3).contains(&above) => Ok(0.0),
        // vLLM writes -9999 for an impossible token.
        logprob if (LOWEST..0.0).contains(&logprob) => Ok(logprob),
        logprob => Err(format!(
            "the log-probability of token {at} is {logprob}, which no model gives: not within {LOWEST} and 0"
        )),
    }
}

/// Mean and largest difference of two scores of one text, nats; the first token, which nothing precedes, does not
/// count. The mean is NaN if one of the scores holds NaN.
pub fn distance(one: &[f32], other: &[f32]) -> (f64, f64) {
    let pairs = one.iter().zip(other).skip(1);
    let differences = pairs.map(|(one, other)| f64::from((one - other).abs()));
    let count = differences.len().max(1);
    let largest = differences.clone().fold(0.0, f64::max);
    (differences.sum::<f64>() / count as f64, largest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(prompt_logprobs: serde_json::Value, ids: &[u32]) -> Result<Vec<f32>, String> {
        let body = json!({"prompt_logprobs": prompt_logprobs, "choices": []});
        of_tokens(serde_json::from_value(body).expect("is one"), ids)
    }

    #[test]
    fn the_tokens_own_log_probability_is_taken() {
        let given = json!([null, {"7": {"logprob": -1.5, "rank": 3}, "9": {"logprob": -0.5, "rank": 1}},
                           {"7": {"logprob": 1e-7, "rank": 1}}]);
        assert_eq!(read(given, &[5, 7, 7]), Ok(vec![0.0, -1.5, 0.0]));
    }

    #[test]
    fn what_is_missing_is_named() {
        let given = json!([null, {"7": {"logprob": -1.5}}]);
        let error = |given: &serde_json::Value, ids: &[u32]| {
            read(given.clone(), ids).expect_err("is refused")
        };
        assert!(error(&given, &[5, 8]).contains("not of 8"));
        assert!(error(&given, &[5]).contains("2 prompt_logprobs for 1 tokens"));
        assert!(error(&json!([null, null]), &[5, 8]).contains("of token 1"));
        assert!(error(&json!(null), &[5]).contains("no prompt_logprobs"));
        for absurd in [-9999.0, -3e38, 0.5] {
            let given = json!([null, {"7": {"logprob": absurd}}]);
            assert!(
                error(&given, &[5, 7]).contains("which no model gives"),
                "{absurd}"
            );
        }
    }

    #[test]
    fn the_first_token_does_not_count() {
        let own = [0.0, -1.0, -3.0];
        assert_eq!(distance(&own, &[-9.0, -1.5, -2.0]), (0.75, 1.0));
    }
}
