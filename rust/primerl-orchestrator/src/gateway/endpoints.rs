//! Chat completions and model cards.

use super::answer::{Answer, error_events, unix_time};
use super::body::{DeliveredBody, Delivery};
use super::dialect::{AnswerForm, ChatRequest};
use super::rollouts::Rollout;
use super::turn::{self, Digests};
use crate::app::App;
use crate::http::{ApiError, JSON, RawBody, encoded};
use crate::telemetry::Outcome;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stream's headers wait this long for the answer, so that quick failures keep their status; after that a comment is
/// sent as often.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Rendering a body larger than this would hold up other requests of its thread.
const LARGE_BODY: usize = 64 << 10;
const LONGEST_SESSION: usize = 256;

type Turn = BoxFuture<'static, Result<Arc<Answer>, ApiError>>;

pub async fn chat_completions(
    State(app): State<Arc<App>>,
    Path(rollout): Path<String>,
    headers: HeaderMap,
    RawBody(body): RawBody,
) -> Result<Response, ApiError> {
    let result = chat(&app, &rollout, &headers, body).await;
    app.telemetry.request(match &result {
        Ok((_, outcome)) => *outcome,
        Err(error) if error.status == StatusCode::GONE => Outcome::Gone,
        Err(error) if error.status.is_client_error() => Outcome::Refused,
        Err(_) => Outcome::Failed,
    });
    result.map(|(response, _)| response)
}

async fn chat(
    app: &Arc<App>,
    rollout: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<(Response, Outcome), ApiError> {
    let arrived = Instant::now();
    let rollout = app.gateway.rollouts.find(rollout)?;
    let session = session_of(headers)?;
    let is_retry =
        header_text(headers, "x-stainless-retry-count").is_some_and(|count| count != "0");
    let prepared = prepare(app, &rollout, session, is_retry, body).await?;
    let (request, prompt) = match prepared {
        Prepared::Replay(answer, form) => {
            return Ok((respond(&rollout, &answer, form), Outcome::Replayed));
        }
        Prepared::Turn(turn) => *turn,
    };
    let max_tokens = turn::room(app, &rollout, &request, &prompt)?;
    app.telemetry
        .prepare_time
        .observe(arrived.elapsed().as_secs_f64());
    if !request.form.stream {
        let answer = turn::take(app, &rollout, &request, prompt, max_tokens).await?;
        return Ok((respond(&rollout, &answer, request.form), Outcome::Answered));
    }
    let form = request.form;
    let work: Turn = {
        let (app, rollout) = (Arc::clone(app), Arc::clone(&rollout));
        Box::pin(async move { turn::take(&app, &rollout, &request, prompt, max_tokens).await })
    };
    stream_answer(rollout, work, form)
        .await
        .map(|response| (response, Outcome::Answered))
}

enum Prepared {
    Turn(Box<(ChatRequest, turn::Prompt)>),
    /// A marked retry of a request whose answer was never taken.
    Replay(Arc<Answer>, AnswerForm),
}

async fn prepare(
    app: &Arc<App>,
    rollout: &Arc<Rollout>,
    session: Arc<str>,
    is_retry: bool,
    body: Bytes,
) -> Result<Prepared, ApiError> {
    let large = body.len() > LARGE_BODY;
    let (app, rollout) = (Arc::clone(app), Arc::clone(rollout));
    let work = move || {
        let request = ChatRequest::parse(&body, &rollout.sampling)?;
        let digests = Digests::of(&request);
        if is_retry && let Some(answer) = take_undelivered(&rollout, &session, digests.context) {
            return Ok(Prepared::Replay(answer, request.form));
        }
        let prompt = turn::prepare(
            &app.gateway.renderer,
            &rollout,
            &session,
            &request,
            &digests,
        )?;
        Ok(Prepared::Turn(Box::new((request, prompt))))
    };
    if !large {
        return work();
    }
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| ApiError::internal(error.to_string()))?
}

pub(super) fn take_undelivered(
    rollout: &Rollout,
    session: &str,
    context: u128,
) -> Option<Arc<Answer>> {
    let mut state = rollout.state.lock();
    let matches =
        |answer: &Arc<Answer>| *answer.session == *session && answer.context_digest == context;
    let position = state.undelivered.iter().position(matches)?;
    Some(state.undelivered.swap_remove(position))
}

fn respond(rollout: &Arc<Rollout>, answer: &Arc<Answer>, form: AnswerForm) -> Response {
    let (kind, bytes) = match form.stream {
        true => ("text/event-stream", answer.events(form)),
        false => (JSON, answer.whole(form)),
    };
    encoded(
        kind,
        Body::new(DeliveredBody::new(bytes, Delivery::begin(rollout, answer))),
    )
}

/// Wait a little for the answer; if it takes longer, begin the stream and keep it alive.
async fn stream_answer(
    rollout: Arc<Rollout>,
    mut work: Turn,
    form: AnswerForm,
) -> Result<Response, ApiError> {
    if let Ok(answer) = tokio::time::timeout(KEEP_ALIVE, &mut work).await {
        return answer.map(|answer| respond(&rollout, &answer, form));
    }
    let state = StreamState::Waiting(rollout, work);
    let events = stream::unfold(state, move |state| async move {
        match state {
            StreamState::Waiting(rollout, mut work) => {
                match tokio::time::timeout(KEEP_ALIVE, &mut work).await {
                    Err(_) => Some((
                        Bytes::from_static(b": keep-alive\n\n"),
                        StreamState::Waiting(rollout, work),
                    )),
                    Ok(Ok(answer)) => {
                        let delivery = Delivery::begin(&rollout, &answer);
                        Some((answer.events(form), StreamState::Ending(Some(delivery))))
                    }
                    Ok(Err(error)) => Some((error_events(&error), StreamState::Ending(None))),
                }
            }
            StreamState::Ending(delivery) => {
                if let Some(delivery) = delivery {
                    delivery.done();
                }
                None
            }
        }
    });
    let events = futures_util::StreamExt::map(events, Ok::<Bytes, Infallible>);
    Ok((
        [(header::CONTENT_TYPE, "text/event-stream")],
        Body::from_stream(events),
    )
        .into_response())
}

enum StreamState {
    Waiting(Arc<Rollout>, Turn),
    /// Polled once more, the connection has taken everything.
    Ending(Option<Delivery>),
}

fn header_text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

fn session_of(headers: &HeaderMap) -> Result<Arc<str>, ApiError> {
    let Some(session) = headers.get("x-session-id") else {
        return Ok("".into());
    };
    // Taken for no name at all, it would mix the turns of two conversations.
    let session = session.to_str().map_err(|_| {
        ApiError::invalid("X-Session-ID is not visible ASCII; encode it").param("X-Session-ID")
    })?;
    if session.len() > LONGEST_SESSION {
        let message = format!("X-Session-ID is longer than {LONGEST_SESSION} bytes");
        return Err(ApiError::invalid(message).param("X-Session-ID"));
    }
    Ok(session.into())
}

pub async fn models(State(app): State<Arc<App>>) -> Response {
    card(&app)
}

pub async fn rollout_models(
    State(app): State<Arc<App>>,
    Path(rollout): Path<String>,
) -> Result<Response, ApiError> {
    app.gateway.rollouts.find(&rollout)?;
    Ok(card(&app))
}

fn card(app: &App) -> Response {
    let context = app
        .engines
        .max_model_len()
        .or(app.gateway.renderer.max_positions());
    let limit = context.map_or(app.gateway.seq_len, |context| {
        context.min(app.gateway.seq_len)
    });
    let card = serde_json::json!({"object": "list", "data": [{
        "id": app.gateway.model, "object": "model", "created": unix_time(), "owned_by": "primerl",
        "max_model_len": limit,
    }]});
    encoded(JSON, card.to_string())
}
