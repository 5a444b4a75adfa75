//! One turn: from messages to a prompt, from the engine's tokens to a recorded turn and an answer.

use super::Gateway;
use super::answer::{Answer, answer_id, unix_time};
use super::dialect::ChatRequest;
use super::rollouts::{Rollout, Session};
use crate::app::App;
use crate::engines::{GenerateError, Resident, SampleRequest, Sampled};
use crate::http::ApiError;
use primerl_core::conversation::{
    History, Plan, digest_messages, digest_next, digest_start, message_hash,
};
use primerl_core::turn::ForkReason;
use primerl_core::{Event, Turn, TurnIndex};
use primerl_render::{ExtensionContext, RenderError, Renderer, canonical, canonical_json};
use std::sync::Arc;
use std::time::Instant;

/// The prompt of one request, and where it hangs in the conversation.
pub(super) struct Prompt {
    pub session: Arc<str>,
    /// Digest of tools and template arguments.
    start: u128,
    pub context_digest: u128,
    parent: Option<TurnIndex>,
    fork: Option<ForkReason>,
    /// The whole prompt; its last `suffix` ids are this turn's own.
    pub ids: Vec<u32>,
    suffix: usize,
    resident: Option<Resident>,
}

/// What the conversation says about a request's messages; taken under the lock.
struct Planned {
    plan: Plan,
    history: History,
    resident: Option<Resident>,
}

/// Digests of a request: the start, one hash a message, the whole.
pub(super) struct Digests {
    start: u128,
    messages: Vec<u128>,
    pub context: u128,
}

impl Digests {
    pub fn of(request: &ChatRequest) -> Digests {
        let options = &request.options;
        let tools = serde_json::json!([options.tools, options.template_kwargs]);
        let start = digest_start(canonical_json(&tools).as_bytes());
        let messages: Vec<u128> = request
            .messages
            .iter()
            .map(|message| message_hash(&canonical(message)))
            .collect();
        let context = digest_messages(start, &messages);
        Digests {
            start,
            messages,
            context,
        }
    }
}

/// Make the prompt: recorded ids and the new messages' suffix, or everything rendered. Computes only; no lock is held
/// while it renders.
pub(super) fn prepare(
    renderer: &Renderer,
    rollout: &Rollout,
    session: &Arc<str>,
    request: &ChatRequest,
    digests: &Digests,
) -> Result<Prompt, ApiError> {
    let is_assistant: Vec<bool> = request
        .messages
        .iter()
        .map(|message| message.is_assistant())
        .collect();
    let planned = plan(rollout, session, digests, &is_assistant);
    let mut prompt = Prompt {
        session: Arc::clone(session),
        start: digests.start,
        context_digest: digests.context,
        parent: None,
        fork: None,
        ids: Vec::new(),
        suffix: 0,
        resident: planned.resident,
    };
    let fork = match planned.plan {
        Plan::Fork { reason } => reason,
        Plan::Extend {
            parent,
            first_new_message,
        } => {
            let ids = planned.history.to_vec();
            let context = ExtensionContext {
                answer: &request.messages[first_new_message - 1],
                sampled: &ids[ids.len().saturating_sub(1)..],
                options: &request.options,
            };
            match renderer.extend(&context, &request.messages[first_new_message..]) {
                Ok(suffix) => {
                    prompt.parent = Some(parent);
                    prompt.suffix = suffix.len();
                    prompt.ids = ids;
                    prompt.ids.extend(suffix);
                    return Ok(prompt);
                }
                Err(reason) => {
                    tracing::debug!(rollout = %rollout.id, %reason, "fork: the template does not extend");
                    ForkReason::TemplateNotExtendable
                }
            }
        }
    };
    prompt.ids = renderer
        .render(&request.messages, &request.options)
        .map_err(refuse)?;
    prompt.suffix = prompt.ids.len();
    prompt.fork = Some(fork);
    Ok(prompt)
}

fn refuse(error: RenderError) -> ApiError {
    ApiError::invalid(error.to_string()).param("messages")
}

fn plan(
    rollout: &Rollout,
    session: &Arc<str>,
    digests: &Digests,
    is_assistant: &[bool],
) -> Planned {
    let state = rollout.state.lock();
    let Some(Session {
        conversation,
        resident,
    }) = state.sessions.get(session)
    else {
        let plan = Plan::Fork {
            reason: ForkReason::FirstTurn,
        };
        return Planned {
            plan,
            history: History::default(),
            resident: None,
        };
    };
    let plan = conversation.plan(digests.start, &digests.messages, is_assistant);
    let history = match plan {
        Plan::Extend { parent, .. } => conversation.history(parent),
        Plan::Fork { .. } => History::default(),
    };
    Planned {
        plan,
        history,
        resident: *resident,
    }
}

/// Tokens left for the answer, or the error that environments know as an overflow.
pub(super) fn room(
    app: &App,
    rollout: &Rollout,
    request: &ChatRequest,
    prompt: &Prompt,
) -> Result<u32, ApiError> {
    let gateway = &app.gateway;
    let context = app
        .engines
        .max_model_len()
        .or(gateway.renderer.max_positions())
        .unwrap_or(u32::MAX);
    // A training sample longer than seq_len could not be trained.
    let limit = if rollout.evaluation {
        context
    } else {
        context.min(gateway.seq_len)
    };
    let length = prompt.ids.len() as u32;
    if length >= limit {
        let message = format!(
            "This model's maximum context length is {limit} tokens. However, your prompt contains {length} tokens; \
             shorten the messages."
        );
        return Err(ApiError::invalid(message)
            .param("messages")
            .code("context_length_exceeded"));
    }
    Ok(request.max_tokens.min(limit - length))
}

/// Sample, record, answer. Dropping the future aborts the engine request and records nothing.
pub(super) async fn take(
    app: &App,
    rollout: &Rollout,
    request: &ChatRequest,
    prompt: Prompt,
    max_tokens: u32,
) -> Result<Arc<Answer>, ApiError> {
    let (number, is_first) = {
        let mut state = rollout.state.lock();
        state.requests += 1;
        (state.requests, state.turns == 0)
    };
    let request_id = format!("rollout-{}-{number}", rollout.id);
    let sample = SampleRequest {
        request_id: &request_id,
        prompt: &prompt.ids,
        temperature: request.temperature,
        max_tokens,
        resident: prompt.resident,
        first_of: is_first.then_some(rollout.id),
        deadline: rollout.deadline,
    };
    app.telemetry.prompt_tokens.inc_by(prompt.ids.len() as u64);
    let started = Instant::now();
    let sampled = tokio::select! {
        sampled = app.engines.generate(&sample) => sampled,
        () = rollout.over.cancelled() => return Err(rollout.gone()),
    };
    app.telemetry
        .engine_time
        .observe(started.elapsed().as_secs_f64());
    match sampled {
        Ok(sampled) => record(app, rollout, request, prompt, sampled).await,
        Err(error) => Err(failed(app, rollout, &error)),
    }
}

fn failed(app: &App, rollout: &Rollout, error: &GenerateError) -> ApiError {
    let message = error.to_string();
    tracing::warn!(rollout = %rollout.id, message, "turn failed");
    app.driver.send(Event::TurnFailed {
        rollout: rollout.id,
        message: message.clone(),
    });
    match error {
        GenerateError::Refused(_) | GenerateError::Encode(_) => {
            ApiError::invalid(message).code("engine_refused")
        }
        _ => ApiError::unavailable("engine_unavailable", message),
    }
}

async fn record(
    app: &App,
    rollout: &Rollout,
    request: &ChatRequest,
    prompt: Prompt,
    Sampled {
        generated,
        resident,
    }: Sampled,
) -> Result<Arc<Answer>, ApiError> {
    let message = app
        .gateway
        .renderer
        .parse(&generated.token_ids)
        .map_err(|error| ApiError::internal(format!("cannot decode the answer: {error}")))?;
    let turn = Turn {
        session: Arc::clone(&prompt.session),
        parent: prompt.parent,
        fork: prompt.fork,
        prompt_suffix: prompt.ids[prompt.ids.len() - prompt.suffix..].into(),
        sampled: generated.token_ids.into(),
        logprobs: generated.logprobs.into(),
        versions: generated.versions,
        temperature: request.temperature as f32,
        finish: generated.finish,
        start_digest: prompt.start,
        context_digest: prompt.context_digest,
        answer_digest: digest_next(prompt.context_digest, message_hash(&canonical(&message))),
    };
    app.telemetry.turn(turn.fork);
    app.telemetry
        .sampled_tokens
        .inc_by(turn.sampled.len() as u64);
    let mut answer = Answer {
        id: String::new(),
        created: unix_time(),
        model: app.gateway.model.clone(),
        session: Arc::clone(&prompt.session),
        context_digest: prompt.context_digest,
        message,
        finish: turn.finish,
        prompt: prompt.ids,
        sampled: Arc::clone(&turn.sampled),
        logprobs: Arc::clone(&turn.logprobs),
    };
    let (answer, written) = {
        let mut state = rollout.state.lock();
        if rollout.over.is_cancelled() {
            return Err(rollout.gone());
        }
        let index = state.record(&turn);
        if let Some(session) = state.sessions.get_mut(&prompt.session) {
            session.resident = Some(resident);
        }
        answer.id = answer_id(rollout.id, index);
        let answer = Arc::new(answer);
        // For a client that hangs up before it gets it.
        state.undelivered.push(Arc::clone(&answer));
        // Under the lock: the core numbers a rollout's turns by the order of these events.
        (answer, app.driver.turn_finished(rollout.id, turn))
    };
    // An agent that has seen the answer goes on from it: the turn must be there after a crash.
    written.await.map_err(|_| app.over())?;
    rollout.state.lock().delivered(&answer);
    Ok(answer)
}

/// Take up the turns of a rollout as they were before a restart. Any of the last answers may never have arrived, so they
/// are kept for a client that asks again.
pub(super) fn restore(gateway: &Gateway, rollout: &Rollout, turns: &[Turn]) {
    let mut state = rollout.state.lock();
    for turn in turns {
        state.record(turn);
    }
    let is_extended = |index: usize| {
        let index = Some(TurnIndex(index as u32));
        turns.iter().any(|turn| turn.parent == index)
    };
    for (index, turn) in turns
        .iter()
        .enumerate()
        .filter(|(index, _)| !is_extended(*index))
    {
        // What could be decoded once can be again.
        let Ok(message) = gateway.renderer.parse(&turn.sampled) else {
            continue;
        };
        let session = &state.sessions[&turn.session];
        let answer = Answer {
            id: answer_id(rollout.id, index as u32),
            created: unix_time(),
            model: gateway.model.clone(),
            session: Arc::clone(&turn.session),
            context_digest: turn.context_digest,
            message,
            finish: turn.finish,
            prompt: session.conversation.prompt_of(TurnIndex(index as u32)),
            sampled: Arc::clone(&turn.sampled),
            logprobs: Arc::clone(&turn.logprobs),
        };
        state.undelivered.push(Arc::new(answer));
    }
}
