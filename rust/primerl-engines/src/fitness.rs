//! What a run needs of an engine that someone else may have started: checked at the first look, and reported all at
//! once, with the settings to change. vLLM by itself serves only the model.

use super::client::EngineClient;
use super::config::EnginesConfig;
use super::error::EngineError;
use super::logprob_kind;
use crate::clients::ModelCard;
use serde::Deserialize;
use serde_json::json;
use std::time::Duration;

/// Timeout of one generated token; a cold engine may compile something for it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);
const TIMEOUT: Duration = Duration::from_secs(10);
const EXTENSION: &str = "it has no `primerl_weight_digest`, by which weights are loaded and proved: start vLLM with \
     `--worker-extension-cls primerl.inference.vllm.worker.WorkerExtension --weight-transfer-config \
     '{\"backend\":\"primerl\"}'`, and PYTHONPATH set to the folder that holds the package primerl";

const NO_ADMINISTRATION: &str = "it has no administrative routes (/pause, /update_weights, /collective_rpc): start vLLM \
     with the environment variable VLLM_SERVER_DEV_MODE=1";

#[derive(Deserialize)]
struct Paused {
    is_paused: bool,
}

/// Every reason why the engine cannot serve this run; empty if there is none.
///
/// # Errors
/// The engine does not answer (yet): nothing is known.
pub(super) async fn lacking(
    client: &EngineClient,
    config: &EnginesConfig,
    card: &ModelCard,
) -> Result<Vec<String>, EngineError> {
    let mut lacking = Vec::from_iter(context(config, card));
    // Such an engine need not accept token ids.
    if !config.engines_render {
        lacking.extend(tokens_route(client).await?);
    }
    let paused = client.get("is_paused", "/is_paused").await;
    let Some(answer) = known_missing(paused, &[404, 405])? else {
        lacking.push(NO_ADMINISTRATION.into());
        return Ok(lacking);
    };
    lacking.extend(extension(client).await?);
    let is_paused = serde_json::from_slice(&answer).is_ok_and(|Paused { is_paused }| is_paused);
    // An engine that an earlier orchestrator left paused would not answer.
    if lacking.is_empty() && !is_paused {
        lacking.extend(of_answers(client, config).await?);
    }
    Ok(lacking)
}

async fn of_answers(
    client: &EngineClient,
    config: &EnginesConfig,
) -> Result<Option<String>, EngineError> {
    if config.needs_processed
        && let Some(problem) = alternatives(client, config).await?
    {
        return Ok(Some(problem));
    }
    match config.returns_experts {
        true => experts(client, config).await,
        false => Ok(None),
    }
}

fn context(config: &EnginesConfig, card: &ModelCard) -> Option<String> {
    let context = card.max_model_len?;
    (context <= config.max_tokens).then(|| {
        format!(
            "its context of {context} tokens has no room for a prompt and an answer of sampling.max_tokens = {}: start \
             it with a larger `--max-model-len` (seq_len is {}), or lower sampling.max_tokens",
            config.max_tokens, config.seq_len
        )
    })
}

/// `None` for an answer with one of these codes.
fn known_missing(
    answer: Result<bytes::Bytes, EngineError>,
    missing: &[u16],
) -> Result<Option<bytes::Bytes>, EngineError> {
    match answer {
        Ok(answer) => Ok(Some(answer)),
        Err(EngineError::Status { status, .. }) if missing.contains(&status) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Aborting an unknown request does nothing, and is refused if the routes for token ids exist.
async fn tokens_route(client: &EngineClient) -> Result<Option<String>, EngineError> {
    let body = json!({"request_ids": ["primerl-look"]}).to_string();
    let path = "/inference/v1/abort_requests";
    Ok(match client.call("abort_requests", path, body.into(), TIMEOUT).await {
        Err(EngineError::Status { status: 403, .. }) => Some(
            "its /inference/v1/generate is disabled: start vLLM with `--enable-scale-out`".into(),
        ),
        Err(EngineError::Status { status: 404 | 405, .. }) => Some(
            "it has no /inference/v1/generate, which takes and gives token ids: it has to be vLLM 0.32 or later, started \
             with `--enable-scale-out`"
                .into(),
        ),
        answer => answer.map(|_| None)?,
    })
}

/// Without the workers' extension it is unknown what an engine serves: it cannot be proved, so it gets no traffic.
async fn extension(client: &EngineClient) -> Result<Option<String>, EngineError> {
    match client.weight_digests().await {
        // In vLLM's words: the method is not implemented, or it has no engine for weights with a digest.
        Err(EngineError::Status {
            status: 400..,
            message,
            ..
        }) if message.contains("primerl_weight_digest") || message.contains("'digest'") => {
            Ok(Some(EXTENSION.into()))
        }
        Err(EngineError::Malformed { .. }) => Ok(Some(EXTENSION.into())),
        answer => answer.map(|_| None),
    }
}

/// The log-probabilities of the most likely tokens show which distribution they come from.
async fn alternatives(
    client: &EngineClient,
    config: &EnginesConfig,
) -> Result<Option<String>, EngineError> {
    let body = json!({
        "request_id": "primerl-look", "model": config.model, "token_ids": logprob_kind::PROMPTS[0], "stream": false,
        "sampling_params": {"max_tokens": 1, "logprobs": logprob_kind::ALTERNATIVES, "detokenize": false},
    });
    let path = "/inference/v1/generate";
    Ok(
        match client
            .call("generate", path, body.to_string().into(), ANSWER_TIMEOUT)
            .await
        {
            Err(EngineError::Status {
                status: 400,
                message,
                ..
            }) if message.contains("logprobs") => Some(format!(
                "it does not give as many log-probabilities as it is asked for ({message}): start vLLM with `--max-logprobs 20`"
            )),
            answer => answer.map(|_| None)?,
        },
    )
}

#[derive(Deserialize)]
struct Chosen {
    choices: Vec<ChosenExperts>,
}

#[derive(Deserialize)]
struct ChosenExperts {
    routed_experts: Option<String>,
}

/// An engine that does not report its experts answers all the same.
async fn experts(
    client: &EngineClient,
    config: &EnginesConfig,
) -> Result<Option<String>, EngineError> {
    let body = json!({
        "request_id": "primerl-look", "model": config.model, "token_ids": logprob_kind::PROMPTS[0], "stream": false,
        "sampling_params": {"max_tokens": 1, "detokenize": false, "routed_experts_prompt_start": 0},
    });
    let path = "/inference/v1/generate";
    let answer = client.call("generate", path, body.to_string().into(), ANSWER_TIMEOUT);
    let answer: Chosen = super::client::parse("generate", &answer.await?)?;
    let reports = (answer.choices.iter()).any(|choice| choice.routed_experts.is_some());
    Ok((!reports).then(|| {
        "it does not report which experts it chose, which router_replay (trainer.enable_router_replay) needs: start vLLM \
         0.32 or later with `--enable-return-routed-experts`, where the model is a mixture, or omit it"
            .into()
    }))
}
