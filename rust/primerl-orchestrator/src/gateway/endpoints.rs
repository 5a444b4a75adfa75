//! How a request is served, in any dialect; model cards.

use super::answer::{Answer, Head, Reply, unix_time};
use super::body::{DeliveredBody, Delivery};
use super::client_type;
use super::dialect::Dialect;
use super::events::{Streaming, all_at_once, stream_body};
use super::live::{Following, Live};
use super::prompt::{self, Prompt};
use super::request::{Input, TurnRequest};
use super::rollouts::{DeliveryState, Rollout};
use super::text::Reading;
use super::turn::{self, Task};
use crate::app::App;
use crate::http::{ApiError, JSON, RawBody, encoded};
use crate::telemetry::Outcome;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use bytes::Bytes;
use primerl_core::TurnIndex;
use primerl_core::conversation::{digest_next, message_hash};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stream's headers wait this long for the first token, so that quick failures keep their status; after that a comment
/// is sent as often.
pub(super) const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Rendering a body larger than this would hold up other requests of its thread.
const LARGE_BODY: usize = 64 << 10;
const LONGEST_SESSION: usize = 256;
const LONGEST_IDEMPOTENCY_KEY: usize = 512;

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
        Err(error) => dialect.refusal(&error),
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
    let call = Call {
        session: session_of(headers)?,
        repeat: Repeat::of(headers)?,
    };
    let prepared = prepare(app, &rollout, call, dialect, body).await?;
    app.telemetry
        .prepare_time
        .observe(arrived.elapsed().as_secs_f64());
    match prepared {
        Prepared::Recorded {
            answer,
            reply,
            reading,
        } => {
            let delivery = Delivery::begin(&rollout, reading.request_digest, &answer.head.id);
            let response = whole_or_events(app, &answer, reply.as_ref(), &reading, delivery);
            Ok((response, Outcome::Replayed))
        }
        Prepared::Running { live, reply } => {
            let response = follow(app, &rollout, Following::new(&live), reply).await?;
            Ok((response, Outcome::Replayed))
        }
        Prepared::New { task, reply } => {
            let following = Following::new(&task.live);
            let run = turn::run(Arc::clone(app), Arc::clone(&rollout), *task);
            app.engines.spawn(run);
            let response = follow(app, &rollout, following, reply).await?;
            Ok((response, Outcome::Answered))
        }
    }
}

/// What the headers say.
struct Call {
    session: Arc<str>,
    repeat: Repeat,
}

/// Whether a request may be one that came before.
enum Repeat {
    /// The client says nothing: only an answer that it never got is given again.
    Unmarked,
    /// SDKs count their attempts.
    Retry,
    /// The same key is the same request, whatever its body.
    Key(u128),
}

impl Repeat {
    fn of(headers: &HeaderMap) -> Result<Repeat, ApiError> {
        if let Some(key) = headers.get("idempotency-key") {
            if key.len() > LONGEST_IDEMPOTENCY_KEY {
                let message =
                    format!("Idempotency-Key is longer than {LONGEST_IDEMPOTENCY_KEY} bytes");
                return Err(ApiError::invalid(message).param("Idempotency-Key"));
            }
            return Ok(Repeat::Key(message_hash(key.as_bytes())));
        }
        let count = headers.get("x-stainless-retry-count");
        Ok(match count {
            Some(count) if count.as_bytes() != b"0" => Repeat::Retry,
            _ => Repeat::Unmarked,
        })
    }

    fn digest(&self, dialect: Dialect, session: &str, body: u128) -> u128 {
        let route = message_hash(format!("{dialect:?} {session}").as_bytes());
        match self {
            Repeat::Key(key) => digest_next(digest_next(route, *key), 1),
            Repeat::Unmarked | Repeat::Retry => digest_next(route, body),
        }
    }

    fn may_join(&self) -> bool {
        !matches!(self, Repeat::Unmarked)
    }

    fn may_repeat(&self, delivery: DeliveryState) -> bool {
        match self {
            Repeat::Key(_) | Repeat::Retry => true,
            Repeat::Unmarked => delivery == DeliveryState::Failed,
        }
    }
}

/// How far a request came without waiting for anybody.
enum Begun {
    Prepared(Prepared),
    /// Its prompt is rendered by somebody else.
    Unrendered(Box<TurnRequest>, Box<dyn Reply>),
}

enum Prepared {
    New {
        task: Box<Task>,
        reply: Box<dyn Reply>,
    },
    /// The same request is being answered.
    Running {
        live: Arc<Live>,
        reply: Box<dyn Reply>,
    },
    /// The same request was answered.
    Recorded {
        answer: Arc<Answer>,
        reply: Box<dyn Reply>,
        reading: Arc<Reading>,
    },
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
    let begun = {
        let (app, rollout) = (Arc::clone(app), Arc::clone(rollout));
        compute(size, move || {
            prepare_now(&app, &rollout, &call, dialect, &body)
        })
        .await?
    };
    let (mut request, reply) = match begun {
        Begun::Prepared(prepared) => return Ok(prepared),
        Begun::Unrendered(request, reply) => (request, reply),
    };
    let prompt = client_type::prompt(app, rollout, &session, &request).await?;
    request.input = Input::Ids(Vec::new());
    let task = Box::new(new_task(app, rollout, *request, prompt, reply.as_ref())?);
    Ok(Prepared::New { task, reply })
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
    rollout: &Rollout,
    call: &Call,
    dialect: Dialect,
    body: &Bytes,
) -> Result<Begun, ApiError> {
    let hashed = dialect.hash(body, rollout, &call.session);
    let digest = call.repeat.digest(dialect, &call.session, hashed.digest);
    let (mut request, reply) = dialect.read(body, rollout, &call.session, hashed.known, digest)?;
    let choices = request.choices as usize;
    let before = {
        let state = rollout.state.lock();
        let running = state
            .running
            .get(&digest)
            .and_then(std::sync::Weak::upgrade);
        let running =
            running.filter(|live| call.repeat.may_join() && !live.abandoned().is_cancelled());
        let answered = state.answered.get(&digest).cloned();
        let answered = answered.filter(|answered| {
            call.repeat.may_repeat(answered.delivery) && answered.turns.len() >= choices
        });
        (running, answered)
    };
    match before {
        (Some(live), _) => Ok(Begun::Prepared(Prepared::Running { live, reply })),
        (None, Some(answered)) => {
            let gateway = &app.gateway;
            let turns = &answered.turns[answered.turns.len() - choices..];
            let (choices, reading) = turn::recorded(gateway, rollout, &request, turns)?;
            let head = head_again(gateway, rollout, answered.id, turns, reply.as_ref());
            Ok(Begun::Prepared(Prepared::Recorded {
                answer: Arc::new(Answer { head, choices }),
                reply,
                reading,
            }))
        }
        (None, None) if !client_type::renders_here(&app.gateway, rollout) => {
            Ok(Begun::Unrendered(Box::new(request), reply))
        }
        (None, None) => {
            let prompt = prompt::prepare(
                &app.gateway.renderer,
                rollout,
                &call.session,
                &request.input,
            )?;
            // A history is not held for as long as an engine takes.
            request.input = Input::Ids(Vec::new());
            let task = new_task(app, rollout, request, prompt, reply.as_ref())?;
            Ok(Begun::Prepared(Prepared::New {
                task: Box::new(task),
                reply,
            }))
        }
    }
}

fn head_again(
    gateway: &super::Gateway,
    rollout: &Rollout,
    id: Arc<str>,
    turns: &[TurnIndex],
    reply: &dyn Reply,
) -> Head {
    let state = rollout.state.lock();
    let turn = turns.first().copied().unwrap_or(TurnIndex(0));
    let session = state.turns.get(turn.0 as usize).map(|turn| &turn.session);
    let prompt = session
        .and_then(|session| state.sessions.get(session))
        .map(|session| session.conversation.prompt_of(turn))
        .unwrap_or_default();
    let text = state.turns.get(turn.0 as usize);
    let text = text.and_then(|turn| turn.text.as_deref());
    Head {
        id,
        created: unix_time(),
        model: model_of(gateway, rollout).into(),
        prompt_tokens: text.map_or(prompt.len(), |text| text.prompt_tokens as usize),
        choices: turns.len() as u32,
        prompt: reply.shows_prompt().then(|| prompt.into()),
    }
}

/// The name that clients see.
fn model_of<'a>(gateway: &'a super::Gateway, rollout: &'a Rollout) -> &'a str {
    let endpoint = rollout.endpoint.as_deref();
    endpoint.map_or(&gateway.model, |endpoint| endpoint.model())
}

fn new_task(
    app: &App,
    rollout: &Rollout,
    request: TurnRequest,
    prompt: Prompt,
    reply: &dyn Reply,
) -> Result<Task, ApiError> {
    let max_tokens = turn::room(app, rollout, &request, &prompt)?;
    let renderer = &app.gateway.renderer;
    let reading = Reading::new(renderer, &request, prompt.options.clone(), &prompt.suffix);
    let shown = reply.shows_prompt();
    let mut state = rollout.state.lock();
    state.requests += 1;
    let number = state.requests;
    let head = Head {
        id: turn::answer_id(rollout, request.digest, &number.to_string()),
        created: unix_time(),
        model: model_of(&app.gateway, rollout).into(),
        prompt_tokens: prompt.ids().len(),
        choices: request.choices,
        prompt: shown.then(|| prompt.history.prompt_with(&prompt.suffix).into()),
    };
    let live = Live::new(head, Arc::new(reading));
    state.running.insert(request.digest, Arc::downgrade(&live));
    Ok(Task {
        request_id: format!("rollout-{}-{number}", rollout.id),
        first_of: state.turns.is_empty().then_some(rollout.id),
        request,
        prompt,
        max_tokens,
        live,
        shown: reply.streams(),
    })
}

async fn follow(
    app: &Arc<App>,
    rollout: &Arc<Rollout>,
    mut following: Following,
    reply: Box<dyn Reply>,
) -> Result<Response, ApiError> {
    let reading = Arc::clone(&following.live.reading);
    let id = &following.live.head.id;
    let delivery = Delivery::begin(rollout, reading.request_digest, id);
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

pub(super) fn session_of(headers: &HeaderMap) -> Result<Arc<str>, ApiError> {
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
    let card = serde_json::json!({"object": "list", "data": [{
        "id": app.gateway.model, "object": "model", "created": unix_time(), "owned_by": "primerl",
        "max_model_len": app.gateway.context_limit(app, false),
    }]});
    encoded(JSON, card.to_string())
}
