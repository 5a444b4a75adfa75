//! One turn: from a prompt to an answer that is recorded.

use super::Gateway;
use super::answer::{Answer, Choice};
use super::client_type::text_only;
use super::live::Live;
use super::prompt::Prompt;
use super::request::{Input, TurnRequest, answer_key};
use super::rollouts::{Answered, DeliveryState, Rollout};
use super::text::{Reading, StopFinder};
use crate::app::App;
use crate::engines::{
    GenerateError, Generated, Progress, Resident, SampleRequest, Sampled, TokenLogprob,
};
use crate::http::ApiError;
use futures_util::future::try_join_all;
use primerl_core::{Event, RolloutId, Turn, TurnIndex};
use primerl_render::{RenderError, Renderer};
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Instant;

/// Everything about a request that its task needs.
#[derive(Debug)]
pub(super) struct Task {
    pub request: TurnRequest,
    pub prompt: Prompt,
    /// Tokens left for the answer.
    pub max_tokens: u32,
    pub live: Arc<Live>,
    /// Whether clients want to see the answer while it is sampled.
    pub shown: bool,
    pub request_id: String,
    /// The rollout whose first turn this is.
    pub first_of: Option<RolloutId>,
}

/// Tokens left for the answer, or the error that environments know as an overflow.
pub(super) fn room(
    app: &App,
    rollout: &Rollout,
    request: &TurnRequest,
    prompt: &Prompt,
) -> Result<u32, ApiError> {
    if rollout.endpoint.is_some() {
        // Only that server knows how long the prompt is.
        return Ok(request.sampling.max_tokens.min(left_of_budget(rollout)?));
    }
    let limit = app.gateway.context_limit(app, rollout.evaluation);
    let length = prompt.ids().len() as u32;
    if length == 0 {
        return Err(ApiError::invalid("the prompt is empty").param("prompt"));
    }
    if length >= limit {
        // OpenAI's words and Anthropic's: agents know an overflow by either.
        let message = format!(
            "This model's maximum context length is {limit} tokens. However, your prompt contains {length} tokens \
             (prompt is too long: {length} tokens > {limit} maximum); shorten the messages."
        );
        return Err(ApiError::invalid(message)
            .param("messages")
            .code("context_length_exceeded"));
    }
    let budget = left_of_budget(rollout)?;
    Ok(request.sampling.max_tokens.min(limit - length).min(budget))
}

/// Tokens that the whole rollout may still sample.
fn left_of_budget(rollout: &Rollout) -> Result<u32, ApiError> {
    let Some(budget) = rollout.sampling.rollout_max_tokens else {
        return Ok(u32::MAX);
    };
    let state = rollout.state.lock();
    let sampled: usize = state.turns.iter().map(Turn::answer_tokens).sum();
    match budget.saturating_sub(sampled as u32) {
        // Agents end in order at a full context, and this is as final.
        0 => Err(ApiError::invalid(format!(
            "the rollout has sampled {sampled} tokens, and may sample {budget} in all              (sampling.rollout_max_tokens): it has to end, as at the maximum context length"
        ))
        .code("context_length_exceeded")),
        left => Ok(left),
    }
}

/// Sample all choices, record and tell; until nobody waits any more, or the rollout is over.
pub(super) async fn run(app: Arc<App>, rollout: Arc<Rollout>, task: Task) {
    let live = Arc::clone(&task.live);
    let outcome = tokio::select! {
        outcome = answer(&app, &rollout, &task) => outcome,
        () = rollout.over.cancelled() => Err(rollout.gone()),
        // Nobody is there to be told.
        () = live.abandoned().cancelled() => Err(ApiError::internal("nobody waits for this answer")),
    };
    let mut state = rollout.state.lock();
    let digest = task.request.digest;
    if state
        .running
        .get(&digest)
        .is_some_and(|running| running.as_ptr() == Arc::as_ptr(&live))
    {
        state.running.remove(&digest);
    }
    drop(state);
    live.finish(outcome);
}

async fn answer(app: &App, rollout: &Rollout, task: &Task) -> Result<Arc<Answer>, ApiError> {
    let choices = (0..task.request.choices).map(|index| choice(app, rollout, task, index));
    let choices = try_join_all(choices).await?;
    let (choices, turns): (Vec<Choice>, SmallVec<[TurnIndex; 1]>) = choices.into_iter().unzip();
    let answered = Answered {
        id: Arc::clone(&task.live.head.id),
        turns,
        delivery: DeliveryState::Pending,
    };
    rollout
        .state
        .lock()
        .answered
        .insert(task.request.digest, answered);
    let mut head = task.live.head.clone();
    if let Some(text) = choices.first().and_then(|choice| choice.text.as_ref()) {
        head.prompt_tokens = text.prompt_tokens as usize;
    }
    Ok(Arc::new(Answer { head, choices }))
}

async fn choice(
    app: &App,
    rollout: &Rollout,
    task: &Task,
    index: u32,
) -> Result<(Choice, TurnIndex), ApiError> {
    if let Some(endpoint) = &rollout.endpoint {
        return text_only::choice(app, rollout, endpoint, task).await;
    }
    let sampled = sample(app, rollout, task, index).await?;
    record(app, rollout, task, index as usize, sampled).await
}

async fn sample(
    app: &App,
    rollout: &Rollout,
    task: &Task,
    index: u32,
) -> Result<Sampled, ApiError> {
    let sampling = &task.request.sampling;
    let request_id = format!("{}-{index}", task.request_id);
    let request = SampleRequest {
        request_id: &request_id,
        prompt: task.prompt.ids(),
        chat: task.prompt.chat.as_deref(),
        temperature: sampling.temperature,
        truncation: sampling.truncation,
        max_tokens: task.max_tokens,
        top_logprobs: sampling.logprobs.unwrap_or(0),
        structured_outputs: sampling.structured_outputs.as_ref(),
        resident: task.prompt.resident,
        first_of: task.first_of.filter(|_| index == 0),
        deadline: rollout.deadline,
    };
    app.telemetry
        .prompt_tokens
        .inc_by(task.prompt.ids().len() as u64);
    let started = Instant::now();
    let mut watch = Watch::new(&app.gateway.renderer, task, index as usize);
    let progress = watch.as_mut().map(|watch| watch as &mut dyn Progress);
    let sampled = app.engines.generate(&request, progress).await;
    app.telemetry
        .engine_time
        .observe(started.elapsed().as_secs_f64());
    sampled.map_err(|error| failed(app, rollout, &error))
}

/// Follows one choice: shows its tokens, and ends it at a stop sequence.
struct Watch<'a> {
    task: &'a Task,
    renderer: &'a Renderer,
    choice: usize,
    stop: StopFinder<'a>,
    /// Tokens so far.
    seen: usize,
}

impl<'a> Watch<'a> {
    /// `None` where nobody needs to see a token before the last.
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

impl Progress for Watch<'_> {
    fn tokens(&mut self, ids: &[u32], logprobs: &[TokenLogprob]) -> Option<usize> {
        let sampling = &self.task.request.sampling;
        let before = self.seen;
        self.seen += ids.len();
        // What cannot be decoded now cannot be decoded at the end: the error comes then.
        let end = match sampling.stop.is_empty() {
            true => None,
            false => self.stop.push(ids).ok().flatten(),
        };
        if self.task.shown {
            let kept = end.map_or(ids.len(), |end| end - before);
            self.task.live.change(|state| {
                let partial = &mut state.choices[self.choice];
                partial.ids.extend(&ids[..kept]);
                let logprobs = &logprobs[..kept];
                partial
                    .logprobs
                    .extend(logprobs.iter().map(|token| token.logprob));
                if let Some(count @ 1..) = sampling.logprobs {
                    partial
                        .top
                        .extend(logprobs.iter().map(|token| token.top(count)));
                }
            });
        }
        end
    }

    fn begin_again(&mut self) -> bool {
        self.stop = StopFinder::new(self.renderer, &self.task.request.sampling.stop);
        self.seen = 0;
        self.task
            .live
            .look(|state| state.choices[self.choice].ids.is_empty())
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

/// What is recorded of an answer, and what its client is told.
pub(super) fn take_in(
    gateway: &Gateway,
    request: &TurnRequest,
    prompt: &Prompt,
    reading: &Reading,
    index: usize,
    generated: Generated,
) -> Result<(Turn, Choice), ApiError> {
    let read = reading.read(&gateway.renderer, &generated.token_ids, index);
    let read = read.map_err(undecodable)?;
    let turn = Turn {
        session: Arc::clone(&prompt.session),
        parent: prompt.parent,
        fork: prompt.fork,
        prompt_suffix: Arc::clone(&prompt.suffix),
        sampled: generated.token_ids.into(),
        logprobs: generated.logprobs.into(),
        versions: generated.versions,
        temperature: request.sampling.temperature as f32,
        truncation: request.sampling.truncation,
        finish: generated.finish,
        start_digest: prompt.start_digest,
        context_digest: prompt.context_digest,
        answer: answer_key(&read.message),
        request_digest: request.digest,
        text: None,
    };
    let choice = Choice::new(&turn, read, generated.top);
    Ok((turn, choice))
}

async fn record(
    app: &App,
    rollout: &Rollout,
    task: &Task,
    index: usize,
    Sampled {
        generated,
        resident,
    }: Sampled,
) -> Result<(Choice, TurnIndex), ApiError> {
    let prompt = &task.prompt;
    let reading = &task.live.reading;
    let taken_in = take_in(
        &app.gateway,
        &task.request,
        prompt,
        reading,
        index,
        generated,
    );
    let (turn, choice) = taken_in?;
    app.telemetry
        .sampled_tokens
        .inc_by(turn.sampled.len() as u64);
    let index = keep(app, rollout, turn, Some(resident)).await?;
    Ok((choice, index))
}

/// Record a turn; resolves once it will not be lost.
pub(super) async fn keep(
    app: &App,
    rollout: &Rollout,
    turn: Turn,
    resident: Option<Resident>,
) -> Result<TurnIndex, ApiError> {
    app.telemetry.turn(turn.fork);
    let (index, written) = {
        let mut state = rollout.state.lock();
        if rollout.over.is_cancelled() {
            return Err(rollout.gone());
        }
        let index = state.record(&turn);
        if resident.is_some() {
            state.session(&turn.session).resident = resident;
        }
        // Under the lock: the core numbers a rollout's turns by the order of these events.
        (index, app.driver.turn_finished(rollout.id, turn))
    };
    // An agent that has seen the answer goes on from it: the turn must be there after a crash.
    written.await.map_err(|_| app.over())?;
    Ok(index)
}

fn undecodable(error: RenderError) -> ApiError {
    ApiError::internal(format!("cannot decode the answer: {error}"))
}

/// The choices that were recorded for this request, and how they are read.
pub(super) fn recorded(
    gateway: &Gateway,
    rollout: &Rollout,
    request: &TurnRequest,
    turns: &[TurnIndex],
) -> Result<(Vec<Choice>, Arc<Reading>), ApiError> {
    let state = rollout.state.lock();
    let recorded = turns
        .iter()
        .filter_map(|turn| state.turns.get(turn.0 as usize));
    let turns: Vec<Turn> = recorded.cloned().collect();
    drop(state);
    let options = match &request.input {
        Input::Messages { options, .. } => Some(options.read()?),
        Input::Text(_) | Input::Ids(_) => None,
    };
    let suffix = turns.first().map(|turn| &*turn.prompt_suffix);
    let suffix = suffix.unwrap_or_default();
    let reading = Reading::new(&gateway.renderer, request, options, suffix);
    let choice = |(index, turn): (usize, &Turn)| {
        if turn.text.is_some() {
            return text_only::of_turn(turn);
        }
        let read = reading.read(&gateway.renderer, &turn.sampled, index);
        Ok(Choice::new(turn, read.map_err(undecodable)?, Vec::new()))
    };
    let choices: Result<_, ApiError> = turns.iter().enumerate().map(choice).collect();
    Ok((choices?, Arc::new(reading)))
}

/// `number` tells it from other answers to equal requests.
pub(super) fn answer_id(rollout: &Rollout, request: u128, number: &str) -> Arc<str> {
    format!("{}-{:016x}-{number}", rollout.id, request as u64).into()
}

/// Take up the turns of a rollout as they were before a restart. Any of the last answers may never have arrived: a marked
/// retry gets them again.
pub(super) fn restore(rollout: &Rollout, turns: &[Turn]) {
    let mut state = rollout.state.lock();
    for turn in turns {
        let index = state.record(turn);
        let answered = state.answered.entry(turn.request_digest).or_default();
        answered.id = answer_id(rollout, turn.request_digest, &format!("t{index}"));
        answered.delivery = DeliveryState::Unknown;
        answered.turns.push(index);
    }
}
