//! Serves a request of any dialect, and the model cards.

use super::answer::{Answer, Reply, unix_time};
use super::begin::{Exchange, Found, Prepared, begin, find};
use super::body::{DeliveredBody, Delivery};
use super::client_type;
use super::dialect::{Asked, Dialect};
use super::events::{KEEP_ALIVE, Streaming, all_at_once, stream_body};
use super::headers::Call;
use super::live::Following;
use super::prompt::{self, Prompt};
use super::request::TurnRequest;
use super::rollouts::Rollout;
use super::structure;
use super::text::Reading;
use super::turn;
use crate::Service;
use crate::metrics::Outcome;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use axum::routing::{MethodRouter, post};
use bytes::Bytes;
use primerl_service::http::{ApiError, JSON, RawBody, encoded};
use std::sync::Arc;
use std::time::Instant;

/// Rendering a body larger than this would delay other requests on its thread.
const LARGE_BODY: usize = 64 << 10;

/// The route of a dialect's requests.
pub(super) fn route_of(dialect: &'static dyn Dialect) -> MethodRouter<Arc<Service>> {
    post(
        move |State(service): State<Arc<Service>>,
              Path(rollout): Path<String>,
              headers: HeaderMap,
              body: Result<RawBody, ApiError>| async move {
            match body {
                Ok(RawBody(body)) => serve(service, dialect, &rollout, &headers, body).await,
                Err(error) => dialect.refusal(&error),
            }
        },
    )
}

/// Serves one request, in the dialect of its route.
async fn serve(
    service: Arc<Service>,
    dialect: &'static dyn Dialect,
    rollout: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Response {
    let result = respond(&service, dialect, rollout, headers, body).await;
    service.metrics.request(match &result {
        Ok((_, outcome)) => *outcome,
        Err(error) if error.status == StatusCode::GONE => Outcome::Gone,
        Err(error) if error.status.is_client_error() => Outcome::Refused,
        Err(_) => Outcome::Failed,
    });
    match result {
        Ok((response, _)) => response,
        Err(error) => {
            log_refusal(rollout, dialect, &error);
            if let Ok(open) = service.gateway.rollouts.find(rollout) {
                open.refuse(&error);
            }
            dialect.refusal(&error)
        }
    }
}

/// Many agents hide why their call failed.
fn log_refusal(rollout: &str, dialect: &dyn Dialect, error: &ApiError) {
    let (status, message) = (error.status.as_u16(), &error.message);
    let dialect = dialect.name();
    if error.status == StatusCode::GONE {
        // Every rollout that is ended from here gets this error, and the reason was logged.
        tracing::debug!(rollout, %dialect, status, message, "request refused");
    } else if error.status.is_client_error() {
        tracing::info!(rollout, %dialect, status, message, "request refused");
    }
}

async fn respond(
    service: &Arc<Service>,
    dialect: &'static dyn Dialect,
    rollout: &str,
    headers: &HeaderMap,
    body: Bytes,
) -> Result<(Response, Outcome), ApiError> {
    let arrived = Instant::now();
    let rollout = service.gateway.rollouts.find(rollout)?;
    let call = Call::of(headers)?;
    let session = Arc::clone(&call.session);
    let prepared = match prepare(service, &rollout, call, dialect, body).await {
        Ok(prepared) => prepared,
        Err(error) => {
            rollout.note_refusal(service, &session, &error).await;
            return Err(error);
        }
    };
    service
        .metrics
        .prepare_time
        .observe(arrived.elapsed().as_secs_f64());
    match prepared {
        Prepared::Recorded {
            answer,
            reply,
            reading,
            delivery,
        } => {
            let response = whole_or_events(service, &answer, reply.as_ref(), &reading, delivery);
            Ok((response, Outcome::Replayed))
        }
        Prepared::Running(following, reply, delivery) => {
            let response = follow(service, following, reply, delivery).await?;
            Ok((response, Outcome::Replayed))
        }
        Prepared::New {
            task,
            following,
            reply,
            delivery,
        } => {
            let run = turn::run(Arc::clone(service), Arc::clone(&rollout), *task);
            service.engines.spawn(run);
            let response = follow(service, following, reply, delivery).await?;
            Ok((response, Outcome::Answered))
        }
    }
}

async fn prepare(
    service: &Arc<Service>,
    rollout: &Arc<Rollout>,
    call: Call,
    dialect: &'static dyn Dialect,
    body: Bytes,
) -> Result<Prepared, ApiError> {
    let size = body.len();
    let session = Arc::clone(&call.session);
    let step = {
        let (service, rollout) = (Arc::clone(service), Arc::clone(rollout));
        compute(size, move || {
            prepare_now(&service, &rollout, &call, dialect, &body)
        })
        .await?
    };
    let exchange = match step {
        Step::Prepared(prepared) => return Ok(prepared),
        Step::Unrendered(exchange) => *exchange,
    };
    let prompt = client_type::prompt(service, rollout, &session, &exchange.request).await?;
    start(service, rollout, exchange, prompt)
}

/// How far a request came without waiting for another process.
enum Step {
    Prepared(Prepared),
    /// The engine or another server renders its prompt.
    Unrendered(Box<Exchange>),
}

/// Work on a body of this size; long work is moved to another thread.
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
    service: &Service,
    rollout: &Arc<Rollout>,
    call: &Call,
    dialect: &dyn Dialect,
    body: &Bytes,
) -> Result<Step, ApiError> {
    let exchange = read(rollout, call, dialect, body)?;
    let found = find(rollout, &mut rollout.state.lock(), &exchange);
    if let Found::Known(known) = found {
        let known = known.prepared(&service.gateway, rollout, exchange);
        return known.map(Step::Prepared);
    }
    if !client_type::renders_here(&service.gateway, rollout) {
        return Ok(Step::Unrendered(Box::new(exchange)));
    }
    let prompt = prompt_here(service, rollout, &call.session, &exchange.request)?;
    start(service, rollout, exchange, prompt).map(Step::Prepared)
}

fn read(
    rollout: &Rollout,
    call: &Call,
    dialect: &dyn Dialect,
    body: &Bytes,
) -> Result<Exchange, ApiError> {
    let hashed = dialect.hash(body, rollout, &call.session)?;
    let digest = call.repeat.digest(dialect, &call.session, hashed.digest);
    let (request, reply) = dialect.read(&Asked {
        rollout,
        session: &call.session,
        body,
        known: hashed.known,
        digest,
    })?;
    Ok(Exchange {
        request,
        reply,
        is_marked: call.repeat.is_marked(),
    })
}

/// The prompt of a request that the gateway renders.
fn prompt_here(
    service: &Service,
    rollout: &Rollout,
    session: &Arc<str>,
    request: &TurnRequest,
) -> Result<Prompt, ApiError> {
    let renderer = &service.gateway.renderer;
    let mut prompt = prompt::prepare(renderer, rollout, session, &request.input)?;
    if prompt.holds_control_tokens {
        service.metrics.control_tokens(rollout.id);
    }
    if rollout.is_taught() {
        client_type::ask_teacher(rollout, request, &mut prompt)?;
    }
    Ok(prompt)
}

/// Begins a new attempt for a request whose prompt is known.
fn start(
    service: &Service,
    rollout: &Arc<Rollout>,
    exchange: Exchange,
    prompt: Prompt,
) -> Result<Prepared, ApiError> {
    let (gateway, request) = (&service.gateway, &exchange.request);
    let max_tokens = turn::room(service, rollout, request, &prompt)?;
    let options = prompt.options.clone();
    let reading = Reading::new(&gateway.renderer, request, options, &prompt.suffix);
    let structure = match &rollout.endpoint {
        // The error is in OpenAI's format.
        Some(_) => None,
        None => structure::of(&gateway.renderer, request, &reading, &prompt.suffix)?,
    };
    match begin(service, rollout, &exchange, &prompt, reading)? {
        Ok(begun) => Ok(begun.prepared(exchange, prompt, structure, max_tokens)),
        // Another client was faster.
        Err(known) => known.prepared(gateway, rollout, exchange),
    }
}

async fn follow(
    service: &Arc<Service>,
    mut following: Following,
    reply: Box<dyn Reply>,
    delivery: Delivery,
) -> Result<Response, ApiError> {
    if !reply.streams() {
        let answer = following.outcome().await?;
        let reading = &following.live.reading;
        let response = whole_or_events(service, &answer, reply.as_ref(), reading, delivery);
        return Ok(response);
    }
    following.begun(KEEP_ALIVE).await?;
    let streaming = Streaming {
        renderer: Arc::clone(&service.gateway.renderer),
        following,
        events: reply.events(),
        delivery,
    };
    Ok(encoded("text/event-stream", stream_body(streaming)))
}

fn whole_or_events(
    service: &Service,
    answer: &Answer,
    reply: &dyn Reply,
    reading: &Arc<Reading>,
    delivery: Delivery,
) -> Response {
    let renderer = &service.gateway.renderer;
    let (kind, bytes) = match reply.streams() {
        true => (
            "text/event-stream",
            all_at_once(answer, reading, reply.events(), renderer),
        ),
        false => (JSON, reply.whole(answer, renderer.tokenizer())),
    };
    encoded(kind, Body::new(DeliveredBody::new(bytes, delivery)))
}

pub(crate) async fn models(State(service): State<Arc<Service>>) -> Response {
    cards(&service)
}

pub(crate) async fn rollout_models(
    State(service): State<Arc<Service>>,
    Path(rollout): Path<String>,
) -> Result<Response, ApiError> {
    service.gateway.rollouts.find(&rollout)?;
    Ok(cards(&service))
}

pub(crate) async fn rollout_model(
    State(service): State<Arc<Service>>,
    Path((rollout, model)): Path<(String, String)>,
) -> Result<Response, ApiError> {
    service.gateway.rollouts.find(&rollout)?;
    match *model == *service.gateway.model {
        true => Ok(encoded(JSON, card(&service).to_string())),
        false => {
            let message = format!(
                "there is no model `{model}`, only `{}`",
                service.gateway.model
            );
            Err(ApiError::not_found("model_not_found", message).param("model"))
        }
    }
}

fn cards(service: &Service) -> Response {
    let cards = serde_json::json!({"object": "list", "data": [card(service)]});
    encoded(JSON, cards.to_string())
}

fn card(service: &Service) -> serde_json::Value {
    serde_json::json!({
        "id": service.gateway.model, "object": "model", "created": unix_time(), "owned_by": "primerl",
        "max_model_len": service.context_limit(false),
    })
}
