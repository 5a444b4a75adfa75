//! The policy's log-probabilities of tokens that it did not sample in this place: a prompt is computed, and not continued.

use super::attempts::Tries;
use super::client::EngineClient;
use super::clients::scored_logprobs;
use super::error::EngineError;
use super::pool::Engines;
use super::request::GenerateError;
use super::served_version::Named;
use serde::Deserialize;
use serde_json::json;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

#[derive(Deserialize)]
struct Answered {
    model: Option<String>,
}

impl Engines {
    /// Log-probability of each token, nats, at temperature 1, by one version of the weights that was proved; 0 for the
    /// first. Asks one engine and, if it fails, another, until the deadline. `request` names it in their logs. `[N]`
    pub async fn score(
        &self,
        request: &str,
        token_ids: &[u32],
        deadline: Instant,
    ) -> Result<Vec<f32>, GenerateError> {
        let mut tries = Tries::new();
        loop {
            let Some(slot) = self.pick(None, deadline, &tries.failed).await else {
                return Err(GenerateError::Deadline { last: tries.last });
            };
            let timeout = self.timeout(deadline);
            let (client, named) = (&slot.engine.client, &slot.served.named);
            let asked = scored(client, named, request, token_ids, timeout);
            let answer = slot.unless_lost(asked).await;
            let crossed = slot.engine.weights.load(Ordering::SeqCst) != slot.weights;
            let error = match answer {
                // The weights changed meanwhile: which of them answered is not known.
                Ok(_) if crossed => continue,
                Ok(logprobs) => {
                    slot.answered();
                    return Ok(logprobs);
                }
                Err(error) if !error.is_retryable() => return Err(GenerateError::Refused(error)),
                Err(error) => error,
            };
            let engine = slot.engine.client.url();
            tracing::warn!(%engine, %error, "an engine could not score");
            tries.lost(slot, error).await?;
        }
    }
}

/// What one engine says of the tokens, by the weights of this name.
pub(super) async fn scored(
    client: &EngineClient,
    named: &Named,
    request: &str,
    token_ids: &[u32],
    timeout: Duration,
) -> Result<Vec<f32>, EngineError> {
    let sampling =
        json!({"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0, "detokenize": false});
    let body = json!({
        "request_id": request, "model": named.model, "token_ids": token_ids, "sampling_params": sampling,
        "cache_salt": named.version.to_string(), "stream": false,
    });
    let (call, route) = ("generate", "/inference/v1/generate");
    let answer = client
        .call(call, route, body.to_string().into(), timeout)
        .await?;
    let malformed = |problem: String| EngineError::Malformed { call, problem };
    let answered: Answered =
        serde_json::from_slice(&answer).map_err(|error| malformed(error.to_string()))?;
    named.check_model(answered.model.as_deref())?;
    scored_logprobs(&answer, token_ids).map_err(malformed)
}
