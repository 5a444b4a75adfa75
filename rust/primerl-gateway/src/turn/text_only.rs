//! Turns of rollouts that another server answers, with text. An evaluation records them as text and measures them. If
//! the server is the policy's teacher, they are also recorded as the policy would have written them, which is what it
//! learns.

use super::record::keep;
use super::{Task, awaited};
use crate::Service;
use crate::answer::Choice;
use crate::client_type::{response_format, write_taught};
use crate::prompt::Prompt;
use crate::request::{Parse, TurnRequest, answer_key};
use crate::rollouts::Rollout;
use crate::sampling::{Demanded, TurnSampling};
use crate::text::cut_message;
use primerl_core::turn::{FinishReason, TextAnswer, VersionRuns};
use primerl_core::{Event, Turn};
use primerl_engines::ChatMessages;
use primerl_engines::clients::{ChatAnswer, ChatRequest, Endpoint, EndpointError, Pending};
use primerl_service::http::ApiError;
use primerl_service::waits::Overdue;
use serde_json::{Map, Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The log names a rollout that waits longer.
const PATIENCE: Duration = Duration::from_secs(25);
/// A slow server needs at most this time for each token.
const EACH_TOKEN: Duration = Duration::from_millis(100);
/// Requests in a row that may be refused because of their content: one, and its second attempt.
const REFUSALS_OF_ONE: u32 = 2;
/// Pause before a server that refuses everyone is asked again.
const BETWEEN_REFUSALS: Duration = Duration::from_secs(5);
/// Extra time before checking whether the server has been silent for too long.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// One answer, recorded as a turn.
pub(super) async fn choice(
    service: &Service,
    rollout: &Rollout,
    endpoint: &Endpoint,
    task: &Task,
    max_tokens: u32,
    index: u32,
) -> Result<Choice, ApiError> {
    let sampling = &task.request.sampling;
    let none = ChatMessages::default();
    let chat = task.prompt.chat.as_deref().unwrap_or(&none);
    let request = ChatRequest {
        model: endpoint.model(),
        messages: &chat.messages,
        // Some models accept no other value, and refuse any that is sent.
        temperature: Some(sampling.temperature).filter(|temperature| *temperature != 1.0),
        max_completion_tokens: max_tokens,
        stop: &sampling.stop,
        others: other_fields(endpoint, sampling, chat)?,
    };
    let answer = ask(service, rollout, endpoint, task, &request).await?;
    let place = (task.attempt.number, index);
    let mut turn = take_in(&task.request, &task.prompt, place, answer)?;
    let choice = Choice::of_text(&turn)?;
    if rollout.is_taught() {
        let renderer = &service.gateway.renderer;
        let (request, prompt) = (&task.request, &task.prompt);
        let taught = write_taught(renderer, request, prompt, &choice.message, &mut turn);
        taught.map_err(|error| unwritable(service, rollout, &error))?;
    }
    keep(service, rollout, task, turn, None).await?;
    Ok(choice)
}

/// Fields that are sent only if they have a value.
fn other_fields(
    endpoint: &Endpoint,
    sampling: &TurnSampling,
    chat: &ChatMessages,
) -> Result<Map<String, Value>, ApiError> {
    let kwargs = Some(&chat.template_kwargs).filter(|kwargs| !kwargs.is_empty());
    let outputs = sampling.structured_outputs.as_ref();
    let fields = [
        ("tools", chat.tools.clone().map(Value::from)),
        ("chat_template_kwargs", kwargs.cloned().map(Value::from)),
        ("top_p", Some(json!(sampling.truncation)["top_p"].take())),
        (
            "response_format",
            response_format(endpoint.name(), outputs)?,
        ),
        (
            "tool_choice",
            sampling.demanded.as_ref().map(Demanded::choice),
        ),
    ];
    let given = fields.into_iter().filter_map(|(name, value)| {
        Some((name.to_owned(), value.filter(|value| !value.is_null())?))
    });
    Ok(given.collect())
}

/// In a run that also trains, an evaluation's rollout fails with the server. But without its teacher no training
/// rollout would ever finish, and a run that only evaluates would measure the outage. There the server is asked until
/// the rollout's time is up; if it answers no one, or refuses everyone, the run ends, and the same command resumes it.
async fn ask(
    service: &Service,
    rollout: &Rollout,
    endpoint: &Endpoint,
    task: &Task,
    request: &ChatRequest<'_>,
) -> Result<ChatAnswer, ApiError> {
    let who = format!("rollout {}", rollout.id);
    let waiting_for = format!("an answer of {} ({})", endpoint.name(), endpoint.url());
    let waits = &service.waits;
    let _waiting = waits.begin(who, waiting_for, PATIENCE, Overdue::IsNamed);
    let pending = endpoint.outage().begin(Instant::now());
    let outage = OutageOf {
        service,
        rollout,
        endpoint,
        pending: &pending,
        limit: service.no_engine,
        // A server that has not failed may only be slow.
        patience: EACH_TOKEN * request.max_completion_tokens,
    };
    awaited(rollout, task, outage.answer(request)).await?
}

/// A server while one request waits for its answer.
struct OutageOf<'a> {
    service: &'a Service,
    rollout: &'a Rollout,
    endpoint: &'a Endpoint,
    pending: &'a Pending<'a>,
    /// Longest silence of a server if some of its requests failed.
    limit: Duration,
    /// Longest silence if none failed and this is longer than `limit`.
    patience: Duration,
}

impl OutageOf<'_> {
    async fn answer(&self, request: &ChatRequest<'_>) -> Result<ChatAnswer, ApiError> {
        if self.rollout.is_taught() || self.service.only_evaluates {
            return tokio::select! {
                answer = self.required_answer(request) => answer,
                never = self.is_watched() => match never {},
            };
        }
        self.attempt(request).await.map_err(|error| {
            if !error.is_outage() {
                self.pending.answered(Instant::now());
            }
            self.failed(&error)
        })
    }

    /// Asks until the server answers, or refuses this request alone.
    async fn required_answer(&self, request: &ChatRequest<'_>) -> Result<ChatAnswer, ApiError> {
        loop {
            let error = match self.attempt(request).await {
                Ok(answer) => return Ok(answer),
                Err(error) => error,
            };
            // A server may have reasons to refuse one request while it answers others.
            let is_shut = error.is_shut()
                || (error.may_be_shut() && self.pending.shut_out() > REFUSALS_OF_ONE);
            if !error.is_outage() && !is_shut {
                if !error.may_be_shut() {
                    self.pending.answered(Instant::now());
                }
                return Err(self.failed(&error));
            }
            self.pending.failed(&error);
            self.end_if_silent(self.limit);
            if matches!(error, EndpointError::Deadline { .. }) {
                return Err(self.failed(&error));
            }
            if is_shut {
                tokio::time::sleep((self.limit / 8).min(BETWEEN_REFUSALS)).await;
            }
        }
    }

    async fn attempt(&self, request: &ChatRequest<'_>) -> Result<ChatAnswer, EndpointError> {
        let asked = self.endpoint.ask(request, self.rollout.deadline).await;
        asked.inspect(|_| self.pending.answered(Instant::now()))
    }

    /// Ends the run if the server answers no one, also while no request fails.
    async fn is_watched(&self) -> Infallible {
        loop {
            let limit = self.longest_silence();
            let left = limit.saturating_sub(self.pending.silence(Instant::now()));
            tokio::time::sleep(left + LOOK_AGAIN).await;
            self.end_if_silent(self.longest_silence());
        }
    }

    fn longest_silence(&self) -> Duration {
        match self.pending.last() {
            Some(_) => self.limit,
            None => self.limit.max(self.patience),
        }
    }

    fn end_if_silent(&self, limit: Duration) {
        let endpoint = self.endpoint;
        let who = match self.rollout.is_taught() {
            true => "the teacher",
            false => "the server that is measured",
        };
        let who = format!("{who} ({} at {})", endpoint.model(), endpoint.url());
        // `primerl eval` has its own key for this limit.
        let key = match self.service.only_evaluates {
            true => "timeouts.outage_s",
            false => "timeouts.no_engine_s",
        };
        let last = self.pending.last().unwrap_or_else(|| {
            format!("it takes requests and says nothing (raise {key} if its answers take so long)")
        });
        let now = Instant::now();
        let end = self
            .pending
            .given_up(now, limit, who, endpoint.name(), &last);
        if let Some(end) = end {
            self.service.run.fail(end);
        }
    }

    fn failed(&self, error: &EndpointError) -> ApiError {
        let message = format!("{}: {error}", self.endpoint.name());
        turn_failed(self.service, self.rollout, &message);
        match error.is_refusal() {
            true => ApiError::invalid(message).code("endpoint_refused"),
            false => ApiError::unavailable("endpoint_unavailable", message),
        }
    }
}

fn unwritable(service: &Service, rollout: &Rollout, problem: &str) -> ApiError {
    let message = format!("the policy cannot learn the teacher's answer: {problem}");
    turn_failed(service, rollout, &message);
    ApiError::unavailable("answer_not_learnable", message)
}

fn turn_failed(service: &Service, rollout: &Rollout, message: &str) {
    tracing::warn!(rollout = %rollout.id, message, "turn failed");
    service.driver.send(Event::TurnFailed {
        rollout: rollout.id,
        message: message.to_owned(),
    });
}

/// The turn that is recorded.
fn take_in(
    request: &TurnRequest,
    prompt: &Prompt,
    (number, index): (u32, u32),
    mut answer: ChatAnswer,
) -> Result<Turn, ApiError> {
    // Servers end before a stop sequence; an answer that goes past one is truncated as an engine's answer would be.
    let cut = cut_message(&mut answer.message, &request.sampling.stop);
    let stop = cut.or(answer.stop);
    if let (Parse::Message { one_call: true }, Some(calls)) =
        (request.parse, &mut answer.message.tool_calls)
    {
        calls.truncate(1);
    }
    let message = serde_json::to_string(&answer.message)
        .map_err(|error| ApiError::internal(error.to_string()))?;
    Ok(Turn {
        session: Arc::clone(&prompt.session),
        parent: prompt.parent,
        fork: prompt.fork,
        prompt_suffix: Arc::default(),
        observed: Vec::new(),
        sampled: Arc::default(),
        logprobs: Arc::default(),
        versions: VersionRuns::default(),
        temperature: request.sampling.temperature as f32,
        truncation: request.sampling.truncation,
        grammar: None,
        experts: None,
        finish: match stop {
            Some(_) => FinishReason::StopSequence,
            None => answer.finish,
        },
        start_digest: prompt.start_digest,
        context_digest: prompt.context_digest,
        answer: answer_key(&answer.message),
        request_digest: request.digest,
        request: number,
        choice: index,
        text: Some(Arc::new(TextAnswer {
            model: answer.model.into(),
            message: message.into(),
            stop: stop.map(Into::into),
            prompt_tokens: answer.prompt_tokens,
            completion_tokens: answer.completion_tokens,
        })),
    })
}

#[cfg(test)]
mod tests;
