//! Records an answer, and makes the client's answer from what was recorded.

use super::Task;
use crate::answer::Choice;
use crate::prompt::Prompt;
use crate::request::{Input, TurnRequest, answer_key};
use crate::rollouts::Rollout;
use crate::text::Reading;
use crate::{Gateway, Service};
use primerl_core::{Event, Turn, TurnIndex};
use primerl_engines::{Generated, Resident, Sampled};
use primerl_render::RenderError;
use primerl_service::http::ApiError;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// What is recorded of an answer, and what its client gets. The answer is identified by its request's number and its
/// position among that request's answers.
pub(crate) fn take_in(
    gateway: &Gateway,
    request: &TurnRequest,
    prompt: &Prompt,
    reading: &Reading,
    (number, index): (u32, usize),
    generated: Generated,
) -> Result<(Turn, Choice), ApiError> {
    let read = reading.read(&gateway.renderer, &generated.token_ids, index);
    let read = read.map_err(undecodable)?;
    let turn = Turn {
        session: Arc::clone(&prompt.session),
        parent: prompt.parent,
        fork: prompt.fork,
        prompt_suffix: Arc::clone(&prompt.suffix),
        observed: prompt.observed.clone(),
        sampled: generated.token_ids.into(),
        logprobs: generated.logprobs.into(),
        versions: generated.versions,
        temperature: request.sampling.temperature as f32,
        truncation: request.sampling.truncation,
        grammar: generated.grammar,
        experts: generated.experts,
        finish: generated.finish,
        start_digest: prompt.start_digest,
        context_digest: prompt.context_digest,
        answer: answer_key(&read.message),
        request_digest: request.digest,
        text: None,
        request: number,
        choice: index as u32,
    };
    let choice = Choice::new(&turn, read, generated.top);
    Ok((turn, choice))
}

pub(super) async fn record(
    service: &Service,
    rollout: &Rollout,
    task: &Task,
    index: usize,
    sampled: Sampled,
) -> Result<Choice, ApiError> {
    let taken_in = take_in(
        &service.gateway,
        &task.request,
        &task.prompt,
        &task.live.reading,
        (task.attempt.number, index),
        sampled.generated,
    );
    let (turn, choice) = taken_in?;
    service
        .metrics
        .sampled_tokens
        .inc_by(turn.sampled.len() as u64);
    keep(service, rollout, task, turn, Some(sampled.resident)).await?;
    Ok(choice)
}

/// Records a turn; resolves once it is durable.
pub(crate) async fn keep(
    service: &Service,
    rollout: &Rollout,
    task: &Task,
    turn: Turn,
    resident: Option<Resident>,
) -> Result<(), ApiError> {
    service.metrics.turn(turn.fork);
    let written = {
        let mut state = rollout.state.lock();
        if rollout.over.is_cancelled() {
            return Err(rollout.gone());
        }
        let (attempt, tokens) = (&task.attempt, turn.answer_tokens());
        let index = state.record(&turn);
        if resident.is_some()
            && let Some(session) = state.sessions.get_mut(&turn.session)
        {
            session.resident = resident;
        }
        state
            .attempts
            .recorded(attempt.digest, attempt.number, turn.choice, index);
        attempt.recorded.fetch_add(1, Ordering::Relaxed);
        rollout.budget.sampled(tokens);
        if let Some(note) = &task.notes.with_turn {
            service.driver.send(Event::Noted {
                rollout: rollout.id,
                note: Arc::clone(note),
            });
        }
        // Under the lock: the core numbers a rollout's turns in the order of these events.
        service.driver.turn_finished(rollout.id, turn)
    };
    // An agent that has seen the answer continues from it, so the turn must survive a crash.
    written.await.map_err(|_| service.run.over())?;
    Ok(())
}

fn undecodable(error: RenderError) -> ApiError {
    ApiError::internal(format!("cannot decode the answer: {error}"))
}

/// The choices that were recorded for this request, and how they are parsed.
pub(crate) fn recorded(
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
    let numbered = turns.iter().enumerate();
    let choices = numbered.map(|(index, turn)| choice_again(gateway, &reading, turn, index));
    let choices: Result<_, ApiError> = choices.collect();
    Ok((choices?, Arc::new(reading)))
}

fn choice_again(
    gateway: &Gateway,
    reading: &Reading,
    turn: &Turn,
    index: usize,
) -> Result<Choice, ApiError> {
    if turn.text.is_some() {
        return Choice::of_text(turn);
    }
    let read = reading.read(&gateway.renderer, &turn.sampled, index);
    Ok(Choice::new(turn, read.map_err(undecodable)?, Vec::new()))
}

/// `number` is the request's number.
pub(crate) fn answer_id(rollout: &Rollout, request: u128, number: u32) -> Arc<str> {
    format!("{}-{:016x}-{number}", rollout.id, request as u64).into()
}
