//! The endpoints of the page.

use super::{Page, assets};
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use primerl_core::RolloutId;
use primerl_record::page::curves::{Curves, MOST_CURVES, MOST_POINTS, Wanted};
use primerl_record::page::health;
use primerl_record::page::index::Filter;
use primerl_record::page::over;
use primerl_record::page::rollout::{MOST_TOKENS, line};
use primerl_service::http::Routes;
use primerl_service::http::{ApiError, JSON};
use serde::Deserialize;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a request waits for data that was not read yet; then it is answered with the known data.
pub const PATIENCE: Duration = Duration::from_millis(500);
/// How long a request waits for earlier ones.
const QUEUE: Duration = Duration::from_secs(10);
const ROLLOUTS: usize = 50;
const MOST_ROLLOUTS: usize = 500;
const EVALUATIONS: usize = 1_000;

/// All routes except those of the run's current state, which the run itself answers.
pub fn routes<S: Clone + Send + Sync + 'static>(page: Arc<Page>) -> Routes<S> {
    assets::routes()
        .route("/page/curves", get(curves))
        .route("/page/health", get(healthy))
        .route("/page/evaluations", get(evaluations))
        .route("/page/rollouts", get(rollouts))
        .route("/page/rollouts/{rollout}", get(rollout))
        .route("/page/rollouts/{rollout}/turns/{turn}", get(turn))
        .with_state(page)
}

/// Reads from the run's files, one request after the other and not on a thread that serves the run.
async fn reading<T: Send + 'static>(
    page: Arc<Page>,
    read: impl FnOnce(&Page) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let turn = Arc::clone(&page.turn).acquire_owned();
    let Ok(Ok(turn)) = tokio::time::timeout(QUEUE, turn).await else {
        return Err(ApiError::unavailable(
            "page_busy",
            "others look at this page; ask again",
        ));
    };
    let read = move || {
        let _turn = turn;
        read(&page)
    };
    let answer = tokio::task::spawn_blocking(read).await;
    answer.map_err(|error| ApiError::internal(error.to_string()))?
}

fn answer(value: &Value) -> Response {
    let headers = [
        (header::CONTENT_TYPE, JSON),
        (header::CACHE_CONTROL, "no-store"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, value.to_string()).into_response()
}

/// The path or the query is invalid.
fn malformed(problem: impl std::fmt::Display) -> ApiError {
    ApiError::invalid(problem.to_string())
}

/// Current state of a run in progress: `status` is asked at most every half second, however many pages are open.
pub async fn now<E: Into<ApiError>>(
    page: Arc<Page>,
    status: impl Future<Output = Result<Value, E>>,
) -> Result<Response, ApiError> {
    let status = match page.fresh_status() {
        Some(status) => status,
        None => refreshed(&page, status).await?,
    };
    let value = reading(page, move |page| {
        Ok(told(page, &status, &Value::Null, true))
    });
    Ok(answer(&value.await?))
}

async fn refreshed<E: Into<ApiError>>(
    page: &Page,
    status: impl Future<Output = Result<Value, E>>,
) -> Result<Arc<Value>, ApiError> {
    let _asks = page.asks_status.lock().await;
    // Another request may have asked while this one waited.
    if let Some(status) = page.fresh_status() {
        return Ok(status);
    }
    let mut status = status.await.map_err(Into::into)?;
    // They have a separate endpoint, in pages.
    status["evaluations"] = Value::Null;
    let status = Arc::new(status);
    *page.status.lock() = Some((Instant::now(), Arc::clone(&status)));
    Ok(status)
}

/// Current state of a run that is over, or that another process runs.
pub(super) async fn now_of_files(page: Arc<Page>) -> Result<Response, ApiError> {
    let value = reading(page, |page| {
        let over::Summary { end, status } = over::Summary::read(&page.output_dir);
        let (core, seconds) = {
            let known = page.reader.known();
            let seconds = known.idle.as_ref().map(|idle| idle.seconds);
            (known.core.clone(), seconds)
        };
        let status = over::status(status, core.as_deref(), seconds);
        Ok(told(page, &status, &end, false))
    });
    Ok(answer(&value.await?))
}

/// The current state; `end` is how the run ended, if that is known.
fn told(page: &Page, status: &Value, end: &Value, is_live: bool) -> Value {
    let problem = page.curves.lock().refresh().err();
    let rows = page.curves.lock().rows();
    let known = page.reader.known();
    let folder = page.output_dir.file_name();
    json!({
        "is_live": is_live,
        "end": end,
        "folder": folder.map(|name| name.to_string_lossy()),
        "output_dir": page.output_dir,
        "rows": rows,
        "only_evaluates": page.only_evaluates,
        "environments": known.index.environments,
        "journal": {
            "events": known.events,
            "is_up_to_date": known.is_up_to_date,
            "problem": known.problem,
            "rollouts": known.index.count(),
        },
        "problem": problem.map(|problem| problem.to_string()),
        "idle": known.idle,
        "status": status,
    })
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CurvesQuery {
    /// Comma-separated; without it, only the names are returned.
    #[serde(default)]
    names: String,
    from: Option<u64>,
    to: Option<u64>,
    points: Option<usize>,
}

async fn curves(
    State(page): State<Arc<Page>>,
    query: Result<Query<CurvesQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query.map_err(malformed)?;
    let names = query.names.split(',').filter(|name| !name.is_empty());
    let names: Vec<String> = names.map(str::to_owned).collect();
    if names.len() > MOST_CURVES {
        let problem = format!(
            "{} curves were requested, at most {MOST_CURVES} are returned",
            names.len()
        );
        return Err(malformed(problem).param("names"));
    }
    let wanted = Wanted {
        names,
        from: query.from.unwrap_or(0),
        to: query.to.unwrap_or(u64::MAX),
        points: query.points.unwrap_or(MOST_POINTS / 2),
    };
    of_curves(page, move |curves| curves.answer(&wanted)).await
}

/// Reads curves of the lines that are written by now.
async fn of_curves(
    page: Arc<Page>,
    read: impl FnOnce(&Curves) -> Value + Send + 'static,
) -> Result<Response, ApiError> {
    let value = reading(page, move |page| {
        let mut curves = page.curves.lock();
        let refreshed = curves.refresh();
        refreshed.map_err(|error| {
            ApiError::internal(format!("cannot read the metrics or evals.jsonl: {error}"))
        })?;
        Ok(read(&curves))
    });
    Ok(answer(&value.await?))
}

/// What rules find wrong with the run.
async fn healthy(State(page): State<Arc<Page>>) -> Result<Response, ApiError> {
    of_curves(
        page,
        |curves| json!({"steps": curves.steps(), "findings": health::findings(curves)}),
    )
    .await
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PageQuery {
    cursor: Option<usize>,
    limit: Option<usize>,
}

async fn evaluations(
    State(page): State<Arc<Page>>,
    query: Result<Query<PageQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(query) = query.map_err(malformed)?;
    let limit = query.limit.unwrap_or(EVALUATIONS).clamp(1, EVALUATIONS);
    of_curves(page, move |curves| curves.evaluations(query.cursor, limit)).await
}

async fn rollouts(
    State(page): State<Arc<Page>>,
    query: Result<Query<Filter>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Query(filter) = query.map_err(malformed)?;
    let value = reading(page, move |page| {
        let known = page.reader.settled(PATIENCE);
        let limit = filter.limit.unwrap_or(ROLLOUTS).clamp(1, MOST_ROLLOUTS);
        let listed = known.index.list(&filter, limit);
        let lines = listed.rollouts.iter();
        Ok(json!({
            "rollouts": lines.map(|record| line(&known.index, record)).collect::<Vec<_>>(),
            "matching": listed.matching,
            "before": listed.before,
            "known": known.index.count(),
            "is_up_to_date": known.is_up_to_date,
            "problem": known.problem,
            "next": listed.next(),
            "previous": listed.previous(),
        }))
    });
    Ok(answer(&value.await?))
}

async fn rollout(
    State(page): State<Arc<Page>>,
    id: Result<Path<u64>, PathRejection>,
) -> Result<Response, ApiError> {
    let id = RolloutId(id.map_err(malformed)?.0);
    let value = reading(page, move |page| {
        let told = page.told(id)?;
        let known = page.reader.known();
        let record = known.index.get(id);
        let record = record.ok_or_else(|| super::unknown(id, &known))?;
        Ok(told.summary(&known.index, record))
    });
    Ok(answer(&value.await?))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TurnQuery {
    #[serde(default)]
    from: usize,
    limit: Option<usize>,
}

async fn turn(
    State(page): State<Arc<Page>>,
    path: Result<Path<(u64, usize)>, PathRejection>,
    query: Result<Query<TurnQuery>, QueryRejection>,
) -> Result<Response, ApiError> {
    let Path((id, number)) = path.map_err(malformed)?;
    let Query(query) = query.map_err(malformed)?;
    let value = reading(page, move |page| {
        let told = page.told(RolloutId(id))?;
        let limit = query.limit.unwrap_or(MOST_TOKENS);
        let tokens = told.tokens(page.renderer.as_deref(), number, query.from, limit);
        tokens.ok_or_else(|| {
            let problem = format!("rollout {id} has no turn {number}");
            ApiError::not_found("turn_unknown", problem)
        })
    });
    Ok(answer(&value.await?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use tokio::sync::Semaphore;

    #[tokio::test]
    async fn a_status_is_asked_for_by_one_at_a_time() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let page = Page::new(folder.path(), None, &primerl_core::testing::config());
        let (asked, may_answer) = (AtomicU32::new(0), Semaphore::new(0));
        let status = || async {
            asked.fetch_add(1, Ordering::Relaxed);
            let _may = may_answer.acquire().await;
            Ok::<_, ApiError>(json!({"run": {}}))
        };
        let (first, second, third, ()) = tokio::join!(
            refreshed(&page, status()),
            refreshed(&page, status()),
            refreshed(&page, status()),
            async {
                // The others were polled before this: all wait.
                assert_eq!(asked.load(Ordering::Relaxed), 1);
                may_answer.add_permits(3);
            }
        );
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        for answer in [first, second, third] {
            assert_eq!(answer.expect("answers")["run"], json!({}));
        }
    }
}
