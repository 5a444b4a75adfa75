//! How a request is served, in any dialect; model cards.

use super::answer::{Answer, Reply, unix_time};
use super::begin::{Found, Prepared, begin, find};
use super::body::{DeliveredBody, Delivery};
use super::client_type;
use super::dialect::Dialect;
use super::events::{Streaming, all_at_once, stream_body};
use super::headers::Call;
use super::live::Following;
use super::prompt::{self, Prompt};
use super::request::{Input, TurnRequest};
use super::rollouts::Rollout;
use super::structure;
use super::text::Reading;
use super::turn::{self, Notes, Task};
use crate::app::App;
use crate::http::{ApiError, JSON, RawBody, encoded};
use crate::telemetry::Outcome;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stream's headers wait this long for the first token, so that quick failures keep their status; after that a comment
/// is sent as often.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Rendering a body larger than this would hold up other requests of its thread.
const LARGE_BODY: usize = 64 << 10;

/// One request, in the dialect of its route.
pub(super) async fn serve(
    app: Arc<App>,
    dialect: Dialect,
    rollout: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Response {
    let result = respond(&app, dialect, rollout, headers, body).await;
    app.telemetry.request(match &result {
        Ok((_, outcome)) => *outcome,
        Err(error) if error.status == StatusCode::GONE => Outcome::Gone,
        Err(error) if error.status.is_client_error() => Outcome::Refused,
        Err(_) => Outcome::Failed,
    });
    match result {
        Ok((response, _)) => response,
        Err(error) => {
            // Many an agent hides why its call failed.
            let (status, message) = (error.status.as_u16(), &error.message);
            if error.status == StatusCode::GONE {
                // Every rollout that is ended from here comes to this, and why was said.
                tracing::debug!(rollout, ?dialect, status, message, "request refused");
            } else if error.status.is_client_error() {
                tracing::info!(rollout, ?dialect, status, message, "request refused");
            }
            if let Ok(open) = app.gateway.rollouts.find(rollout) {
                open.refuse(&error);
            }
            dialect.refusal(&error)
        }
    }
}

pub async fn chat_completions(
    State(app): State<Arc<App>>,
    Path(rollout): Path<String>,
    headers: HeaderMap,
    RawBody(body): RawBody,
) -> Response {
    serve(app, Dialect::Chat, &rollout, &headers, body).await
}

/// An error of the body is told in the dialect's shape, too.
pub async fn messages(
    State(app): State<Arc<App>>,
    Path(rollout): Path<String>,
    headers: HeaderMap,
    body: Result<RawBody, ApiError>,
) -> Response {
    match body {
        Ok(RawBody(body)) => serve(app, Dialect::Messages, &rollout, &headers, body).await,
        Err(error) => Dialect::Messages.refusal(&error),
    }
}

pub async fn responses(
    State(app): State<Arc<App>>,
    Path(rollout): Path<String>,
    headers: HeaderMap,
    RawBody(body): RawBody,
) -> Response {
    serve(app, Dialect::Responses, &rollout, &headers, body).await
}

pub async fn completions(
    State(app): State<Arc<App>>,
    Path(rollout): Path<String>,
    headers: HeaderMap,
    RawBody(body): RawBody,
) -> Response {
    serve(app, Dialect::Completions, &rollout, &headers, body).await
}

async fn respond(
    app: &Arc<App>,
    dialect: Dialect,
    rollout: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<(Response, Outcome), ApiError> {
    let arrived = Instant::now();
    let rollout = app.gateway.rollouts.find(rollout)?;
    let call = Call::of(headers)?;
    let session = Arc::clone(&call.session);
    let prepared = match prepare(app, &rollout, call, dialect, body).await {
        Ok(prepared) => prepared,
        Err(error) => {
            rollout.note_refusal(app, &session, &error).await;
            return Err(error);
        }
    };
    app.telemetry
        .prepare_time
        .observe(arrived.elapsed().as_secs_f64());
    match prepared {
        Prepared::Recorded {
            answer,
            reply,
            reading,
            delivery,
        } => {
            let response = whole_or_events(app, &answer, reply.as_ref(), &reading, delivery);
            Ok((response, Outcome::Replayed))
        }
        Prepared::Running(following, reply, delivery) => {
            let response = follow(app, following, reply, delivery).await?;
            Ok((response, Outcome::Replayed))
        }
        Prepared::New {
            task,
            following,
            reply,
            delivery,
        } => {
            let run = turn::run(Arc::clone(app), Arc::clone(&rollout), *task);
            app.engines.spawn(run);
            let response = follow(app, following, reply, delivery).await?;
            Ok((response, Outcome::Answered))
        }
    }
}

async fn prepare(
    app: &Arc<App>,
    rollout: &Arc<Rollout>,
    call: Call,
    dialect: Dialect,
    body: Bytes,
) -> Result<Prepared, ApiError> {
    let size = body.len();
    let session = Arc::clone(&call.session);
    let is_marked = call.repeat.is_marked();
    let step = {
        let (app, rollout) = (Arc::clone(app), Arc::clone(rollout));
        compute(size, move || {
            prepare_now(&app, &rollout, &call, dialect, &body)
        })
        .await?
    };
    let (request, reply) = match step {
        Step::Prepared(prepared) => return Ok(prepared),
        Step::Unrendered(request, reply) => (request, reply),
    };
    let prompt = client_type::prompt(app, rollout, &session, &request).await?;
    start(app, rollout, *request, prompt, reply, is_marked)
}

/// How far a request came without waiting for anybody.
enum Step {
    Prepared(Prepared),
    /// Its prompt is rendered by somebody else.
    Unrendered(Box<TurnRequest>, Box<dyn Reply>),
}

/// Work on a body of this size, on another thread where it may take long.
pub(super) async fn compute<T: Send + 'static>(
    size: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if size <= LARGE_BODY {
        return work();
    }
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|error| ApiError::internal(error.to_string()))?
}

fn prepare_now(
    app: &App,
    rollout: &Arc<Rollout>,
    call: &Call,
    dialect: Dialect,
    body: &Bytes,
) -> Result<Step, ApiError> {
    let hashed = dialect.hash(body, rollout, &call.session)?;
    let digest = call.repeat.digest(dialect, &call.session, hashed.digest);
    let (request, reply) = dialect.read(body, rollout, &call.session, hashed.known, digest)?;
    let is_marked = call.repeat.is_marked();
    let found = find(rollout, &mut rollout.state.lock(), &request, is_marked);
    if let Found::Known(known) = found {
        let known = known.prepared(&app.gateway, rollout, &request, reply);
        return known.map(Step::Prepared);
    }
    if !client_type::renders_here(&app.gateway, rollout) {
        return Ok(Step::Unrendered(Box::new(request), reply));
    }
    let renderer = &app.gateway.renderer;
    let mut prompt = prompt::prepare(renderer, rollout, &call.session, &request.input)?;
    if prompt.holds_control_tokens {
        app.telemetry.control_tokens(rollout.id);
    }
    if rollout.is_taught() {
        client_type::ask_teacher(rollout, &request, &mut prompt)?;
    }
    start(app, rollout, request, prompt, reply, is_marked).map(Step::Prepared)
}

/// A request whose prompt is known, as a new attempt.
fn start(
    app: &App,
    rollout: &Arc<Rollout>,
    mut request: TurnRequest,
    prompt: Prompt,
    reply: Box<dyn Reply>,
    is_marked: bool,
) -> Result<Prepared, ApiError> {
    let max_tokens = turn::room(app, rollout, &request, &prompt)?;
    let options = prompt.options.clone();
    let reading = Reading::new(&app.gateway.renderer, &request, options, &prompt.suffix);
    let structure = match &rollout.endpoint {
        // It is told in OpenAI's words.
        Some(_) => None,
        None => structure::of(&app.gateway.renderer, &request, &reading, &prompt.suffix)?,
    };
    let begun = begin(
        app,
        rollout,
        &request,
        &prompt,
        reading,
        reply.as_ref(),
        is_marked,
    )?;
    let begun = match begun {
        Ok(begun) => begun,
        // Another client was faster.
        Err(known) => return known.prepared(&app.gateway, rollout, &request, reply),
    };
    // A history is not held for as long as an engine takes.
    request.input = Input::Ids(Vec::new());
    let live = begun.following.live.clone();
    let number = begun.attempt.number;
    let task = Task {
        request_id: format!("rollout-{}-{number}", rollout.id),
        first_of: begun.is_first.then_some(rollout.id),
        notes: Notes {
            at_begin: begun.note,
            with_turn: reply.note(&live.head, number),
        },
        attempt: begun.attempt,
        request,
        prompt,
        structure,
        max_tokens,
        live,
        shown: reply.streams(),
    };
    Ok(Prepared::New {
        task: Box::new(task),
        following: begun.following,
        reply,
        delivery: begun.delivery,
    })
}

async fn follow(
    app: &Arc<App>,
    mut following: Following,
    reply: Box<dyn Reply>,
    delivery: Delivery,
) -> Result<Response, ApiError> {
    let reading = Arc::clone(&following.live.reading);
    if !reply.streams() {
        let answer = following.outcome().await?;
        return Ok(whole_or_events(
            app,
            &answer,
            reply.as_ref(),
            &reading,
            delivery,
        ));
    }
    following.begun(KEEP_ALIVE).await?;
    let streaming = Streaming {
        renderer: Arc::clone(&app.gateway.renderer),
        following,
        events: reply.events(),
        delivery,
    };
    Ok(encoded("text/event-stream", stream_body(streaming)))
}

fn whole_or_events(
    app: &App,
    answer: &Answer,
    reply: &dyn Reply,
    reading: &Arc<Reading>,
    delivery: Delivery,
) -> Response {
    let renderer = &app.gateway.renderer;
    let (kind, bytes) = match reply.streams() {
        true => (
            "text/event-stream",
            all_at_once(answer, reading, reply.events(), renderer),
        ),
        false => (JSON, reply.whole(answer, renderer.tokenizer())),
    };
    encoded(kind, Body::new(DeliveredBody::new(bytes, delivery)))
}

pub async fn models(State(app): State<Arc<App>>) -> Response {
    cards(&app)
}

pub async fn rollout_models(
    State(app): State<Arc<App>>,
    Path(rollout): Path<String>,
) -> Result<Response, ApiError> {
    app.gateway.rollouts.find(&rollout)?;
    Ok(cards(&app))
}

pub async fn rollout_model(
    State(app): State<Arc<App>>,
    Path((rollout, model)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    app.gateway.rollouts.find(&rollout)?;
    match *model == *app.gateway.model {
        true => Ok(encoded(JSON, card(&app).to_string())),
        false => {
            let message = format!("there is no model `{model}`, only `{}`", app.gateway.model);
            Err(ApiError::not_found("model_not_found", message).param("model"))
        }
    }
}

fn cards(app: &App) -> Response {
    let cards = serde_json::json!({"object": "list", "data": [card(app)]});
    encoded(JSON, cards.to_string())
}

fn card(app: &App) -> serde_json::Value {
    serde_json::json!({
        "id": app.gateway.model, "object": "model", "created": unix_time(), "owned_by": "primerl",
        "max_model_len": app.gateway.context_limit(app, false),
    })
}
