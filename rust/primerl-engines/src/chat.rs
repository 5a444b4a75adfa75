//! Engines that render messages themselves: vLLM's `/tokenize` and `/v1/chat/completions`.
//!
//! ```text
//! messages ─ /tokenize ─> prompt's ids ─> room, parent or fork ─┐
//!              label ─ /v1/chat/completions ─ label <───────────┘  prompt_token_ids must be those ids
//! ```
//! The ids come first, so that a prompt that is too long is refused in the same way as with our own ids, and the
//! answer's length fits the remaining context. The chat route does not say which weights sampled which token. So an
//! engine is only updated when its requests have ended (or its patience has), and its label is read before and after
//! each answer: if an update came in between, the answer is sampled again. Nothing of it is shown before that is known.

use super::PromptIds;
use super::client::{EngineClient, parse};
use super::config::EnginesConfig;
use super::error::{EngineError, STANDS_STILL};
use super::generate::{
    Applied, Choice, Generated, Logprobs, Progress, TokenLogprob, TopLogprob, VersionSpan,
};
use super::request::{ChatMessages, SampleRequest};
use super::served_version::Named;
use super::slot::Slot;
use super::weights::in_time;
use bytes::Bytes;
use primerl_core::PolicyVersion;
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::atomic::Ordering;
use std::time::Duration;

/// A cold engine may compile something for its first answer.
const PROOF_TIMEOUT: Duration = Duration::from_secs(60);
/// Estimated size of a token id in a JSON list.
const BYTES_AN_ID: usize = 16;
/// How vLLM writes a token when ids are requested.
const TOKEN_PREFIX: &str = "token_id:";

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u32>,
}

#[derive(Deserialize)]
struct ChatBody {
    model: Option<String>,
    prompt_token_ids: Option<Vec<u32>>,
    choices: Vec<ChatChoice>,
}

#[derive(Deserialize)]
struct ChatChoice {
    token_ids: Option<Vec<u32>>,
    finish_reason: Option<String>,
    logprobs: Option<ChatLogprobs>,
    grammar: Option<Applied>,
}

#[derive(Deserialize)]
struct ChatLogprobs {
    content: Option<Vec<ChatToken>>,
}

#[derive(Deserialize)]
struct ChatToken {
    token: String,
    logprob: f32,
    #[serde(default)]
    top_logprobs: Vec<ChatTop>,
}

#[derive(Deserialize)]
struct ChatTop {
    token: String,
    logprob: f32,
}

fn malformed(problem: impl Into<String>) -> EngineError {
    EngineError::Malformed {
        call: "chat",
        problem: problem.into(),
    }
}

/// The prompt's ids, as the engine renders them.
pub(super) async fn tokenize(
    client: &EngineClient,
    model: &str,
    chat: &ChatMessages,
    timeout: Duration,
) -> Result<Vec<u32>, EngineError> {
    let body = chat.with(&chat.fields(model));
    let body = body.map_err(|error| malformed(error.to_string()))?;
    let answer = client.call("tokenize", "/tokenize", body, timeout).await?;
    let Tokenized { tokens } = parse("tokenize", &answer)?;
    Ok(tokens)
}

/// The body of the chat route. It names every sampling setting: for omitted ones vLLM uses the model's
/// `generation_config.json`, and then it would not sample the policy that the run describes.
fn body(
    chat: &ChatMessages,
    request: &SampleRequest<'_>,
    config: &EnginesConfig,
    named: &Named,
) -> Result<Bytes, serde_json::Error> {
    let mut fields = chat.fields(&named.model);
    if chat.tools.is_some() {
        // Rendered, but not looked for in the answer: our own code does that, in the same way for all engines.
        fields.insert("tool_choice".into(), "none".into());
    }
    let neutral = json!({"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0, "ignore_eos": false});
    for given in [neutral, serde_json::to_value(request.truncation)?] {
        if let Value::Object(given) = given {
            fields.extend(given);
        }
    }
    let own = json!({
        "request_id": request.request_id,
        "temperature": request.temperature,
        "max_completion_tokens": request.max_tokens,
        "stop_token_ids": config.stop_token_ids,
        "logprobs": true,
        // vLLM counts the sampled token as one of k.
        "top_logprobs": match request.top_logprobs { 0 => 0, count => count + 1 },
        "return_token_ids": true,
        "return_tokens_as_token_ids": true,
        "cache_salt": named.version.to_string(),
    });
    if let Value::Object(own) = own {
        fields.extend(own);
    }
    if let Some(outputs) = request.structured_outputs {
        fields.insert("structured_outputs".into(), outputs.clone());
    }
    chat.with(&fields)
}

/// One answer of the engine in `slot`, whose prompt and weights are proved.
pub(super) async fn sample(
    slot: &Slot,
    chat: &ChatMessages,
    request: &SampleRequest<'_>,
    config: &EnginesConfig,
    timeout: Duration,
    progress: Option<&mut dyn Progress>,
) -> Result<Generated, EngineError> {
    let (client, named) = (&slot.engine.client, &slot.served.named);
    let body = body(chat, request, config, named);
    let body = body.map_err(|error| malformed(error.to_string()))?;
    let before = client.weight_label(STANDS_STILL).await?;
    let path = "/v1/chat/completions";
    let expected = request.prompt.history.prompt_with(request.prompt.suffix);
    let bounds = request.bounds(config);
    // It repeats the prompt's ids.
    let most = bounds.longest_answer() + BYTES_AN_ID * expected.len();
    let bytes = client.call_up_to("chat", path, body, timeout, most).await?;
    let after = client.weight_label(STANDS_STILL).await?;
    // The label alone would not show an update to other weights of the same version.
    if before != after || slot.engine.weights.load(Ordering::SeqCst) != slot.weights {
        return Err(EngineError::Crossed { before, after });
    }
    let choice = named.choice(read(&bytes, &expected, &after, named)?)?;
    let whole = slot.check_versions(choice.clone().check(&bounds, None)?)?;
    let Some(progress) = progress else {
        return Ok(whole);
    };
    let content = choice.logprobs.as_ref().map(|logprobs| &*logprobs.content);
    match progress.tokens(&choice.token_ids, content.unwrap_or_default()) {
        None => Ok(whole),
        ended => choice.check(&bounds, ended),
    }
}

/// The tokens sampled after exactly this prompt, by weights with this label.
fn read(bytes: &[u8], prompt: &[u32], label: &str, named: &Named) -> Result<Choice, EngineError> {
    let body: ChatBody = parse("chat", bytes)?;
    named.check_model(body.model.as_deref())?;
    let given = body
        .prompt_token_ids
        .ok_or_else(|| malformed("no prompt_token_ids, though return_token_ids was asked for"))?;
    let [choice] = <[ChatChoice; 1]>::try_from(body.choices)
        .map_err(|choices| malformed(format!("{} choices instead of one", choices.len())))?;
    let token_ids = choice.token_ids.ok_or_else(|| {
        malformed("no token_ids in the choice, though return_token_ids was asked for")
    })?;
    if given != prompt {
        return Err(EngineError::PromptDiffers {
            given: given.len(),
            expected: prompt.len(),
        });
    }
    let content = choice.logprobs.and_then(|logprobs| logprobs.content);
    let content = content.ok_or_else(|| malformed("no logprobs, though they were asked for"))?;
    let content: Result<Vec<TokenLogprob>, EngineError> = content.into_iter().map(token).collect();
    let span = VersionSpan {
        version: label.to_owned(),
        start: 0,
        end: token_ids.len(),
    };
    Ok(Choice {
        token_ids,
        finish_reason: choice.finish_reason,
        logprobs: Some(Logprobs { content: content? }),
        weight_versions: Some(vec![span]),
        grammar: choice.grammar,
        // Such turns have the experts of the trainer's own router.
        routed_experts: None,
    })
}

fn token(token: ChatToken) -> Result<TokenLogprob, EngineError> {
    let own = token_id(&token.token)?;
    let mut top = Vec::with_capacity(token.top_logprobs.len());
    for other in &token.top_logprobs {
        top.push((token_id(&other.token)?, other.logprob));
    }
    // The sampled token comes first, whatever its rank; ranks are not returned.
    top.sort_by(|a, b| b.1.total_cmp(&a.1));
    let ranked = top.into_iter().zip(1..);
    Ok(TokenLogprob {
        token_id: own,
        logprob: token.logprob,
        top_logprobs: ranked
            .map(|((token_id, logprob), rank)| TopLogprob {
                token_id,
                logprob,
                rank,
            })
            .collect(),
    })
}

fn token_id(text: &str) -> Result<u32, EngineError> {
    let id = text
        .strip_prefix(TOKEN_PREFIX)
        .and_then(|id| id.parse().ok());
    id.ok_or_else(|| {
        malformed(format!(
            "a token of the logprobs is {text:?} and not {TOKEN_PREFIX}<id>, though \
             return_tokens_as_token_ids was asked for"
        ))
    })
}

/// Whether the engine serves both routes with ids. The inner error is what it lacks, which does not change by itself.
pub(super) async fn prove(
    client: &EngineClient,
    config: &EnginesConfig,
) -> Result<Result<(), String>, EngineError> {
    // An earlier orchestrator that died in an update left the engine paused: it would never answer.
    in_time("resume", STANDS_STILL, client.resume()).await??;
    let missing = match sample_proof(client, config).await {
        Ok(_) => return Ok(Ok(())),
        Err(
            error @ (EngineError::Transport { .. } | EngineError::Status { status: 500.., .. }),
        ) => return Err(error),
        Err(EngineError::Status {
            call,
            status: 404 | 405,
            ..
        }) => format!("it serves no /{}", route(call)),
        Err(error) => error.to_string(),
    };
    Ok(Err(lacking(&missing)))
}

async fn sample_proof(
    client: &EngineClient,
    config: &EnginesConfig,
) -> Result<Generated, EngineError> {
    let chat = ChatMessages {
        messages: Bytes::from_static(br#"[{"role":"user","content":"a"}]"#),
        ..ChatMessages::default()
    };
    let ids = tokenize(client, &config.model, &chat, PROOF_TIMEOUT).await?;
    let history = Default::default();
    let prompt = PromptIds {
        history: &history,
        suffix: &ids,
    };
    let request = SampleRequest::one_token("proof", prompt);
    let named = Named::weights(&config.model, PolicyVersion(0));
    let body = body(&chat, &request, config, &named);
    let body = body.map_err(|error| malformed(error.to_string()))?;
    let bytes = client.call("chat", "/v1/chat/completions", body, PROOF_TIMEOUT);
    let choice = read(&bytes.await?, &ids, "0", &named)?;
    choice.check(&request.bounds(config), None)
}

fn lacking(missing: &str) -> String {
    format!(
        "client_type = \"openai_chat_completions_token\" needs engines that render: vLLM's /tokenize, and its \
         /v1/chat/completions with return_token_ids, logprobs and return_tokens_as_token_ids; this one does not do: \
         {missing}; use other engines, or client_type = \"renderer\""
    )
}

fn route(call: &str) -> &str {
    match call {
        "tokenize" => "tokenize",
        _ => "v1/chat/completions",
    }
}

#[cfg(test)]
mod tests;
