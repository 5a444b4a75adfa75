//! The environment workers' endpoints (`docs/architecture.md`).

use crate::app::App;
use crate::envs::joining::Difference;
use crate::envs::wire::{
    ENVIRONMENT_UNKNOWN, EXAMPLES_DIFFER, GROUP_TOO_LARGE, HeartbeatAnswer, HeartbeatRequest,
    Lease, LeaseAnswer, LeaseRequest, LeaveAnswer, LeaveRequest, LeftRollout, RegisterAnswer,
    RegisterRequest, ResultAnswer, ResultRequest, WHOLE_GROUPS_DIFFER, WORKER_BLOCKED,
    WORKER_UNKNOWN, WorkerRole,
};
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::Response;
use primerl_core::config::Role;
use primerl_core::effect::LeasedRollout;
use primerl_core::event::{BLOCKED_AFTER, Block};
use primerl_core::{EnvironmentId, Event, WorkerId};
use primerl_service::http::{ApiError, Wire};
use primerl_service::inbox::LeaseReply;
use std::sync::Arc;
use std::time::Duration;

/// Heartbeats within one worker timeout: two may be lost.
const HEARTBEATS_PER_TIMEOUT: f64 = 4.0;
/// Bytes that are kept of an environment's error message.
const LONGEST_ERROR: usize = 16 * 1024;
/// Characters that are kept of where a worker is blocked, or of how it ended.
const LONGEST_PLACE: usize = 300;
/// No worker needs more at once, and a mistyped number must not empty the queue.
const MAX_LEASES: u32 = 4096;

fn worker_unknown(app: &App, worker: WorkerId) -> ApiError {
    match app.workers.why_it_ends(worker) {
        Some(reason) => ApiError::gone(WORKER_BLOCKED, reason),
        None => ApiError::gone(
            WORKER_UNKNOWN,
            format!("worker {worker} is not known (any more); register again"),
        ),
    }
}

/// Every call of a worker is a sign of life; it is reported to the core as often as a heartbeat would be.
fn check_known(app: &App, worker: WorkerId) -> Result<(), ApiError> {
    let interval = Duration::from_secs_f64(app.config.timeouts.worker_s / HEARTBEATS_PER_TIMEOUT);
    let due = app
        .workers
        .seen(worker, interval)
        .ok_or_else(|| worker_unknown(app, worker))?;
    if due {
        app.driver.send(Event::WorkerSeen { worker });
    }
    Ok(())
}

pub async fn register(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<RegisterRequest>,
) -> Result<Response, ApiError> {
    let environment = environment_of(&app, &body)?;
    check(&app, environment, &body)?;
    app.refusals.forget(environment);
    let (worker, predecessor) = app.workers.register(&body.name, environment);
    if let Some(worker) = predecessor {
        let reason = None;
        app.driver.send(Event::WorkerLeft { worker, reason });
    }
    report_joined(&app, worker, environment, &body);
    tracing::info!(%worker, name = body.name, environment = body.environment, examples = body.examples, whole_groups = body.whole_groups, "worker joined");
    let heartbeat_s = app.config.timeouts.worker_s / HEARTBEATS_PER_TIMEOUT;
    Ok(encoding.ok(&RegisterAnswer {
        worker,
        environment,
        model: app.config.model.name(),
        heartbeat_s,
        leased_together: leased_together(&app, environment, &body),
        long_poll_s: app.config.timeouts.long_poll_s,
        demonstration: app.config.demonstration_key(environment),
    }))
}

/// A refusal is noted: the environment may wait for a worker that can be accepted.
fn check(app: &App, environment: EnvironmentId, request: &RegisterRequest) -> Result<(), ApiError> {
    let checked = check_room(app, environment, request)
        .and_then(|()| check_listed(app, environment, request));
    checked.inspect_err(|refusal| {
        let (name, reason) = (&request.name, &refusal.message);
        tracing::warn!(name, reason, "a worker was refused");
        app.refusals.note(environment, name, reason);
    })
}

fn report_joined(
    app: &App,
    worker: WorkerId,
    environment: EnvironmentId,
    request: &RegisterRequest,
) {
    app.driver.send(Event::EnvironmentReady {
        environment,
        examples: request.examples,
        whole_groups: request.whole_groups,
    });
    app.driver.send(Event::WorkerJoined {
        worker,
        environment,
        name: request.name.clone(),
    });
}

fn environment_of(app: &App, request: &RegisterRequest) -> Result<EnvironmentId, ApiError> {
    environment_named(app, &request.environment, Some(request.role))
        .map(|(environment, _)| environment)
}

/// The environment of this name, and of this role if one is given.
pub(super) fn environment_named(
    app: &App,
    name: &str,
    asked: Option<WorkerRole>,
) -> Result<(EnvironmentId, WorkerRole), ApiError> {
    let role = |environment: &primerl_core::config::Environment| match environment.role {
        Role::Train => WorkerRole::Train,
        Role::Evaluate(_) => WorkerRole::Eval,
    };
    let known = &app.core_config.environments;
    let found = known.iter().position(|environment| {
        environment.name == name && asked.is_none_or(|asked| asked == role(environment))
    });
    found
        .map(|index| (EnvironmentId(index as u32), role(&known[index])))
        .ok_or_else(|| environment_unknown(app, name, asked))
}

fn environment_unknown(app: &App, name: &str, asked: Option<WorkerRole>) -> ApiError {
    let known = app.core_config.environments.iter();
    let names: Vec<&str> = known.map(|environment| environment.name.as_str()).collect();
    let asked = asked.map(|role| format!("{role:?} ")).unwrap_or_default();
    ApiError::not_found(
        ENVIRONMENT_UNKNOWN,
        format!("the run has no {asked}environment `{name}`; it has {names:?}"),
    )
}

fn leased_together(app: &App, environment: EnvironmentId, request: &RegisterRequest) -> u32 {
    match request.whole_groups {
        true => app.core_config.rollouts_per_group(environment) as u32,
        false => 1,
    }
}

/// A whole group has to fit into the worker and into the run.
fn check_room(
    app: &App,
    environment: EnvironmentId,
    request: &RegisterRequest,
) -> Result<(), ApiError> {
    let together = leased_together(app, environment, request);
    let limit = app.core_config.max_in_flight();
    let (name, worker) = (&request.environment, &request.name);
    let message = match request.max_concurrent {
        Some(most) if most < together => format!(
            "environment `{name}` rewards whole groups of {together} rollouts, and worker {worker:?} runs at most {most} at \
             once; raise its max_concurrent to at least {together}, or make groups smaller (group_size, \
             rollouts_per_example)"
        ),
        _ if together as usize > limit => format!(
            "environment `{name}` rewards whole groups of {together} rollouts, and at most {limit} may be in flight in this \
             run; raise oversampling_factor or batch_size, or lower rollouts_per_example"
        ),
        _ => return Ok(()),
    };
    Err(ApiError::conflict(GROUP_TOO_LARGE, message))
}

/// Workers are leased indices, so all must list the same examples, with the same code. A group goes to any of them, so
/// all must take it whole, or none. A worker that passes, and came before all others, is the one with which these are
/// compared.
fn check_listed(
    app: &App,
    environment: EnvironmentId,
    request: &RegisterRequest,
) -> Result<(), ApiError> {
    if request.examples == 0 {
        return Err(ApiError::invalid(format!(
            "environment `{}` has no examples",
            request.environment
        ))
        .param("examples"));
    }
    let admitted = app
        .first_workers
        .admit(environment, request, &app.config.output_dir);
    admitted.map_err(|difference| differs(request, difference))
}

fn differs(request: &RegisterRequest, difference: Difference) -> ApiError {
    let (name, worker) = (&request.environment, &request.name);
    match difference {
        Difference::WholeGroups(first) => {
            let message = format!(
                "environment `{name}`: worker {worker:?} registers with whole_groups = {}, the first one with {first}, \
                 and all must agree; give it the first one's version of the environment, or begin a new run in another \
                 output_dir if the first one was wrong",
                request.whole_groups
            );
            ApiError::conflict(WHOLE_GROUPS_DIFFER, message)
        }
        Difference::Examples(difference) => {
            let message = format!(
                "environment `{name}`: worker {worker:?} {difference}, and all must list the same; give it the first \
                 one's version, arguments, data and seed, or begin a new run in another output_dir if the first one was \
                 wrong"
            );
            ApiError::conflict(EXAMPLES_DIFFER, message)
        }
    }
}

pub async fn lease(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    Wire { body, encoding }: Wire<LeaseRequest>,
) -> Result<Response, ApiError> {
    check_known(&app, body.worker)?;
    if body.max == 0 {
        return Err(ApiError::invalid("max is 0; ask for at least one rollout").param("max"));
    }
    let root = root_url(&app, &headers);
    let max = body.max.min(MAX_LEASES);
    let reply = app.driver.lease(body.worker, max).await?;
    Ok(encoding.ok(&lease_answer(&app, &root, reply)))
}

fn lease_answer(app: &App, root: &str, reply: LeaseReply) -> LeaseAnswer {
    match reply {
        LeaseReply::Rollouts(rollouts) => LeaseAnswer {
            rollouts: rollouts
                .iter()
                .map(|rollout| to_wire(app, root, rollout))
                .collect(),
            finished: false,
            reason: String::new(),
        },
        LeaseReply::Nothing { reason, finished } => LeaseAnswer {
            rollouts: Vec::new(),
            finished,
            reason,
        },
    }
}

/// The address under which this worker reached the orchestrator: from another machine it differs from the address that
/// the server listens on.
fn root_url(app: &App, headers: &HeaderMap) -> String {
    match headers
        .get(header::HOST)
        .and_then(|host| host.to_str().ok())
    {
        Some(host) => format!("http://{host}"),
        None => app.url.clone(),
    }
}

fn to_wire(app: &App, root: &str, leased: &LeasedRollout) -> Lease {
    Lease {
        rollout: leased.rollout,
        group: leased.group,
        example: leased.example,
        base_url: format!("{root}/rollouts/{}/v1", leased.rollout),
        api_key: app.gateway.gateway.access.rollout_key(leased.rollout),
        sampling: app.samplings[leased.environment.0 as usize].to_wire(),
        deadline_s: leased.deadline.as_secs_f64(),
    }
}

pub async fn heartbeat(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<HeartbeatRequest>,
) -> Result<Response, ApiError> {
    let heartbeat = app
        .workers
        .heartbeat(body.worker, &body.running)
        .ok_or_else(|| worker_unknown(&app, body.worker))?;
    app.driver.send(Event::WorkerSeen {
        worker: body.worker,
    });
    tell_of_block(&app, &body);
    if !heartbeat.lost.is_empty() {
        tracing::warn!(worker = %body.worker, rollouts = ?heartbeat.lost, "the worker does not know of its leases");
        app.lease_lost(body.worker, &heartbeat.lost);
    }
    let finished = app.finished.borrow().is_some();
    Ok(encoding.ok(&HeartbeatAnswer {
        cancel: heartbeat.cancel,
        finished,
    }))
}

/// Whether its environment blocks the worker's event loop, if the core does not know yet.
fn tell_of_block(app: &App, body: &HeartbeatRequest) {
    let Some(still) = body.still_s.map(primerl_core::Duration::from_secs_f64) else {
        return;
    };
    let is_blocked = still >= BLOCKED_AFTER;
    if app.workers.note_block(body.worker, is_blocked) {
        let block = is_blocked.then(|| Block {
            lasted: still,
            at: body.held_at.as_deref().map(short),
            rollout: body.held_by,
        });
        app.driver.send(Event::WorkerBlocked {
            worker: body.worker,
            block,
        });
    }
}

/// A reference to a line of code is never longer.
fn short(place: &str) -> String {
    place.chars().take(LONGEST_PLACE).collect()
}

pub async fn result(
    State(app): State<Arc<App>>,
    Wire { mut body, encoding }: Wire<ResultRequest>,
) -> Result<Response, ApiError> {
    check_known(&app, body.worker)?;
    if let Some(error) = &mut body.outcome.error {
        shorten(&mut error.message);
    }
    if let Some(open) = app.gateway.gateway.rollouts.get(body.rollout) {
        open.mark(&mut body.outcome);
    }
    let accepted = app
        .driver
        .rollout_finished(body.worker, body.rollout, body.outcome)
        .await?;
    Ok(encoding.ok(&ResultAnswer { accepted }))
}

/// Journal and records keep this part; the worker's log has the whole text.
fn shorten(message: &mut String) {
    if message.len() > LONGEST_ERROR {
        let end = (0..=LONGEST_ERROR).rfind(|at| message.is_char_boundary(*at));
        message.truncate(end.unwrap_or(0));
        message.push_str(" ... (cut)");
    }
}

pub async fn leave(
    State(app): State<Arc<App>>,
    Wire { body, encoding }: Wire<LeaveRequest>,
) -> Result<Response, ApiError> {
    let Some(leased) = app.workers.remove(body.worker) else {
        return Ok(encoding.ok(&LeaveAnswer::default()));
    };
    tracing::info!(worker = %body.worker, "worker left");
    let open = leased
        .iter()
        .filter_map(|id| app.gateway.gateway.rollouts.get(*id));
    let rollouts = open.map(|open| LeftRollout {
        rollout: open.id,
        example: open.example,
    });
    let answer = LeaveAnswer {
        rollouts: rollouts.collect(),
    };
    app.driver.send(Event::WorkerLeft {
        worker: body.worker,
        reason: body.reason.as_deref().map(short),
    });
    Ok(encoding.ok(&answer))
}
