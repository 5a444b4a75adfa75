//! One turn: from a prompt to a recorded answer.

mod record;
mod text_only;

pub(crate) use record::{answer_id, recorded, take_in};

use super::answer::{Answer, Choice};
use super::budget::Grant;
use super::live::Live;
use super::prompt::Prompt;
use super::request::TurnRequest;
use super::rollout_limits::Limit;
use super::rollouts::Rollout;
use super::structure::Structure;
use super::text::StopFinder;
use crate::Service;
use futures_util::future::try_join_all;
use primerl_core::failure::Overflow;
use primerl_core::turn::FinishReason;
use primerl_core::{Event, RolloutId};
use primerl_engines::{GenerateError, Generated, Progress, SampleRequest, Sampled, TokenLogprob};
use primerl_render::Renderer;
use primerl_service::http::ApiError;
use record::record;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

/// The parts of a request that its task needs.
#[derive(Debug)]
pub(super) struct Task {
    pub attempt: Attempt,
    pub request: TurnRequest,
    pub prompt: Prompt,
    /// The structure that the answer must follow.
    pub structure: Option<Structure>,
    /// Tokens left for the answer.
    pub max_tokens: u32,
    pub live: Arc<Live>,
    /// Whether clients want to see the answer while it is sampled.
    pub shown: bool,
    pub request_id: String,
    /// The rollout, if this is its first turn.
    pub first_of: Option<RolloutId>,
    /// Notes for the journal: when the request has begun, and when it is answered.
    pub notes: Notes,
}

#[derive(Debug, Default)]
pub(super) struct Notes {
    pub at_begin: Option<Arc<str>>,
    pub with_turn: Option<Arc<str>>,
}

/// Counts a request among those that are being answered; dropping it ends the count.
#[derive(Debug)]
pub(super) struct Attempt {
    pub rollout: Arc<Rollout>,
    pub digest: u128,
    pub number: u32,
    pub choices: u32,
    /// Number of those that were recorded.
    pub recorded: AtomicU32,
}

impl Attempt {
    pub(super) fn new(rollout: &Arc<Rollout>, digest: u128, number: u32, choices: u32) -> Attempt {
        Attempt {
            rollout: Arc::clone(rollout),
            digest,
            number,
            choices,
            recorded: AtomicU32::new(0),
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        let recorded = *self.recorded.get_mut();
        let failed = self.choices.saturating_sub(recorded);
        self.rollout.allowance.give_back(failed);
        self.rollout.is_answered();
        let attempts = &mut self.rollout.state.lock().attempts;
        attempts.ended(self.digest, self.number, self.choices);
    }
}

/// Tokens left for the answer, or the error that environments recognise as an overflow.
pub(super) fn room(
    service: &Service,
    rollout: &Rollout,
    request: &TurnRequest,
    prompt: &Prompt,
) -> Result<u32, ApiError> {
    if rollout.endpoint.is_some() && !rollout.is_taught() {
        // Only that server knows how long the prompt is.
        rollout.budget.check()?;
        return Ok(request.sampling.max_tokens);
    }
    let limit = service.context_limit(rollout.evaluation);
    let length = prompt.ids().len() as u32;
    if length == 0 {
        return Err(ApiError::invalid("the prompt is empty").param("prompt"));
    }
    if length >= limit {
        return Err(overflow(length, limit));
    }
    rollout.budget.check()?;
    Ok(request.sampling.max_tokens.min(limit - length))
}

fn overflow(length: u32, limit: u32) -> ApiError {
    // OpenAI's wording and Anthropic's: agents recognise an overflow by one of them.
    let message = format!(
        "This model's maximum context length is {limit} tokens. However, your prompt contains {length} tokens \
         (prompt is too long: {length} tokens > {limit} maximum); shorten the messages."
    );
    let error = ApiError::invalid(message)
        .param("messages")
        .code("context_length_exceeded");
    ApiError {
        overflow: Some(Overflow {
            prompt_tokens: length,
            most: limit,
        }),
        ..error
    }
}

/// Samples all choices, and records and sends them; stops when no client waits any more or the rollout is over.
pub(super) async fn run(service: Arc<Service>, rollout: Arc<Rollout>, task: Task) {
    let (live, number) = (Arc::clone(&task.live), task.attempt.number);
    let began = Instant::now();
    rollout.state.lock().unanswered.begin(number, began);
    let outcome = answer(&service, &rollout, &task).await;
    let given_up = live.abandoned().is_cancelled() || rollout.over.is_cancelled();
    {
        let unanswered = &mut rollout.state.lock().unanswered;
        match outcome.is_err() && given_up {
            true => unanswered.abandoned(number),
            false => unanswered.told(number),
        }
    }
    if let Err(error) = &outcome {
        rollout
            .note_refusal(&service, &task.prompt.session, error)
            .await;
    }
    // Before a client learns that the request ended, and asks again.
    drop(task);
    live.finish(outcome);
}

async fn answer(
    service: &Service,
    rollout: &Rollout,
    task: &Task,
) -> Result<Arc<Answer>, ApiError> {
    if let Some(note) = &task.notes.at_begin {
        let noted = service.driver.noted(rollout.id, Arc::clone(note));
        noted.await.map_err(|_| service.run.over())?;
    }
    let grant = grant(rollout, task).await?;
    let choices = 0..task.request.choices;
    let choices = choices.map(|index| choice(service, rollout, task, grant.each, index));
    let choices = try_join_all(choices).await?;
    let is_cut = |choice: &Choice| choice.finish == FinishReason::Length;
    if grant.each < task.max_tokens && choices.iter().any(is_cut) {
        rollout
            .note_limit(service, &task.prompt.session, Limit::Tokens)
            .await;
    }
    let mut head = task.live.head.clone();
    if let Some(text) = choices.first().and_then(|choice| choice.text.as_ref()) {
        head.prompt_tokens = text.prompt_tokens as usize;
    }
    Ok(Arc::new(Answer { head, choices }))
}

/// The tokens that the choices may have, of those that are left to the rollout.
async fn grant<'a>(rollout: &'a Rollout, task: &Task) -> Result<Grant<'a>, ApiError> {
    let deadline = tokio::time::Instant::from_std(rollout.deadline);
    let grant = rollout.budget.take(task.request.choices, task.max_tokens);
    let grant = awaited(rollout, task, tokio::time::timeout_at(deadline, grant)).await?;
    grant.map_err(|_| {
        let message =
            "the rollout's deadline passed while other requests held the rest of its tokens";
        ApiError::unavailable("deadline_passed", message)
    })?
}

/// Waits until no client waits for the answer any more, the rollout's time is up, or it is over.
pub(super) async fn awaited<T>(
    rollout: &Rollout,
    task: &Task,
    wait: impl Future<Output = T>,
) -> Result<T, ApiError> {
    tokio::select! {
        done = wait => Ok(done),
        () = rollout.over.cancelled() => Err(rollout.gone()),
        refusal = rollout.out_of_time() => Err(refusal),
        // No client is left to get this error.
        () = task.live.abandoned().cancelled() => Err(ApiError::internal("no client waits for this answer any more")),
    }
}

async fn choice(
    service: &Service,
    rollout: &Rollout,
    task: &Task,
    max_tokens: u32,
    index: u32,
) -> Result<Choice, ApiError> {
    if let Some(endpoint) = &rollout.endpoint {
        return text_only::choice(service, rollout, endpoint, task, max_tokens, index).await;
    }
    let sampled = sample(service, rollout, task, max_tokens, index).await?;
    check_grammar(rollout, task, &sampled.generated)?;
    // From here on it runs to its end even if no client waits: the answer may already be in the journal.
    record(service, rollout, task, index as usize, sampled).await
}

/// Training needs to know which tokens were allowed: without that, the trainer would treat the answer as a sample of
/// the policy's own distribution.
fn check_grammar(rollout: &Rollout, task: &Task, generated: &Generated) -> Result<(), ApiError> {
    let is_structured = task.structure.is_some();
    if rollout.evaluation || is_structured == generated.grammar.is_some() {
        return Ok(());
    }
    let message = "structured outputs and required tool calls cannot be trained with this engine: it does not report \
                   which tokens its grammar allows, so the sampled distribution cannot be recorded; use the embedded \
                   engine, omit them, or use them in an evaluation only";
    let refused = ApiError::invalid(message)
        .param("structured_outputs")
        .code("structured_outputs_not_recorded");
    rollout.refuse(&refused);
    Err(refused)
}

async fn sample(
    service: &Service,
    rollout: &Rollout,
    task: &Task,
    max_tokens: u32,
    index: u32,
) -> Result<Sampled, ApiError> {
    let metrics = &service.metrics;
    let request_id = format!("{}-{index}", task.request_id);
    let request = SampleRequest {
        max_tokens,
        first_of: task.first_of.filter(|_| index == 0),
        ..sample_request(rollout, task, &request_id)
    };
    metrics.prompt_tokens.inc_by(task.prompt.ids().len() as u64);
    let started = Instant::now();
    let mut watch = Watch::new(&service.gateway.renderer, task, index as usize);
    let progress = watch.as_mut().map(|watch| watch as &mut dyn Progress);
    let sampled = awaited(rollout, task, service.engines.generate(&request, progress)).await?;
    let seconds = started.elapsed().as_secs_f64();
    metrics.engine_time.observe(seconds);
    sampled.map_err(|error| failed(service, rollout, &error))
}

/// The request for any of the choices.
fn sample_request<'a>(rollout: &Rollout, task: &'a Task, request_id: &'a str) -> SampleRequest<'a> {
    let (sampling, structure) = (&task.request.sampling, task.structure.as_ref());
    SampleRequest {
        request_id,
        prompt: task.prompt.ids(),
        chat: task.prompt.chat.as_deref(),
        temperature: sampling.temperature,
        truncation: sampling.truncation,
        max_tokens: task.max_tokens,
        top_logprobs: sampling.logprobs.unwrap_or(0),
        structured_outputs: structure.map(|structure| &structure.outputs),
        structured_reasoning: structure.and_then(|structure| structure.reasoning.as_ref()),
        keeps_experts: !rollout.evaluation,
        resident: task.prompt.resident,
        first_of: task.first_of,
        deadline: rollout.deadline,
    }
}

/// Follows one choice: shows its tokens, and ends it at a stop sequence.
struct Watch<'a> {
    task: &'a Task,
    renderer: &'a Renderer,
    choice: usize,
    stop: StopFinder<'a>,
    /// Number of tokens so far.
    seen: usize,
}

impl<'a> Watch<'a> {
    /// `None` if no client needs to see tokens before the last one.
    fn new(renderer: &'a Renderer, task: &'a Task, choice: usize) -> Option<Watch<'a>> {
        let stop = &task.request.sampling.stop;
        (task.shown || !stop.is_empty()).then(|| Watch {
            task,
            renderer,
            choice,
            stop: StopFinder::new(renderer, stop),
            seen: 0,
        })
    }
}

impl Watch<'_> {
    fn show(&self, ids: &[u32], logprobs: &[TokenLogprob]) {
        self.task.live.change(|state| {
            let partial = &mut state.choices[self.choice];
            partial.ids.extend(ids);
            let values = logprobs.iter().map(|token| token.logprob);
            partial.logprobs.extend(values);
            if let Some(count @ 1..) = self.task.request.sampling.logprobs {
                let top = logprobs.iter().map(|token| token.top(count));
                partial.top.extend(top);
            }
        });
    }
}

impl Progress for Watch<'_> {
    fn tokens(&mut self, ids: &[u32], logprobs: &[TokenLogprob]) -> Option<usize> {
        let before = self.seen;
        self.seen += ids.len();
        // Text that cannot be decoded now cannot be decoded at the end: the error is reported then.
        let end = match self.task.request.sampling.stop.is_empty() {
            true => None,
            false => self.stop.push(ids).ok().flatten(),
        };
        if self.task.shown {
            let kept = end.map_or(ids.len(), |end| end - before);
            self.show(&ids[..kept], &logprobs[..kept]);
        }
        end
    }

    fn go_on(&mut self, kept: &[u32]) -> bool {
        self.stop = StopFinder::new(self.renderer, &self.task.request.sampling.stop);
        // None of them completes a sequence: otherwise the answer would have ended there.
        let _ = self.stop.push(kept);
        self.seen = kept.len();
        self.task
            .live
            .look(|state| state.choices[self.choice].ids.len() <= kept.len())
    }
}

fn failed(service: &Service, rollout: &Rollout, error: &GenerateError) -> ApiError {
    let message = error.to_string();
    tracing::warn!(rollout = %rollout.id, message, "turn failed");
    service.driver.send(Event::TurnFailed {
        rollout: rollout.id,
        message: message.clone(),
    });
    let told = match error {
        GenerateError::Refused(_) | GenerateError::Encode(_) => {
            ApiError::invalid(message).code("engine_refused")
        }
        GenerateError::Interrupted { .. } => ApiError::unavailable("answer_interrupted", message),
        _ => ApiError::unavailable("engine_unavailable", message),
    };
    // Once a stream has begun, the error is sent in the stream, if a client is left.
    rollout.refuse(&told);
    told
}
