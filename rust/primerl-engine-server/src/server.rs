//! One engine as a service: `run(config, backend, listener, shutdown)`.

use crate::backend::{Backend, BackendError};
use crate::config::{Config, ConfigError};
use crate::engine::Engine;
use crate::handle::{Command, EngineHandle};
use crate::http::{self, App};
use crate::metrics::Metrics;
use std::future::IntoFuture;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

/// How long a dead engine keeps answering 500 and 503, so that its clients see why.
const LINGER: Duration = Duration::from_secs(1);
/// How long the step in progress and the last answers may take after a shutdown was asked for.
const SHUTDOWN_DEADLINE: Duration = Duration::from_millis(750);

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServerError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("the engine failed: {0}")]
    Backend(String),
    #[error("cannot serve on the port: {0}")]
    Serve(#[from] std::io::Error),
}

type EngineEnd = Result<(), BackendError>;

/// Serves until `shutdown` is cancelled; then requests in flight are answered with what they have.
///
/// # Errors
/// A bad configuration (before anything is served), or the reason for which the backend failed.
pub async fn run(
    config: Config,
    backend: impl Backend,
    listener: TcpListener,
    shutdown: CancellationToken,
) -> Result<(), ServerError> {
    config.validate(backend.info())?;
    let metrics = Arc::new(Metrics::new(&config));
    let model = backend.info().clone();
    let (engine, handle) = Engine::new(config.clone(), backend, metrics.clone());
    let (ended, mut engine_end) = oneshot::channel::<EngineEnd>();
    std::thread::Builder::new()
        .name("engine".into())
        .spawn(move || {
            // The receiver is gone only when the service was given up.
            let _ = ended.send(engine.run());
        })?;
    let stop = CancellationToken::new();
    let router = http::router(Arc::new(App::new(config, model, handle.clone(), metrics)));
    let server =
        axum::serve(listener, router).with_graceful_shutdown(stop.clone().cancelled_owned());
    let mut server = std::pin::pin!(server.into_future());
    let result = tokio::select! {
        served = &mut server => return served.map_err(ServerError::Serve),
        end = &mut engine_end => Err(engine_failed(&handle, end)),
        () = shutdown.cancelled() => Ok(()),
    };
    if result.is_ok() {
        stop_engine(&handle, &mut engine_end).await;
    } else {
        let _ = tokio::time::timeout(LINGER, &mut server).await;
    }
    stop.cancel();
    if tokio::time::timeout(SHUTDOWN_DEADLINE, &mut server)
        .await
        .is_err()
    {
        tracing::warn!("clients kept connections open after {SHUTDOWN_DEADLINE:?}: closing them");
    }
    result
}

async fn stop_engine(handle: &EngineHandle, end: &mut oneshot::Receiver<EngineEnd>) {
    // If the engine is gone already, there is nothing to stop.
    let _ = handle.tell(Command::Shutdown);
    let ended = tokio::time::timeout(SHUTDOWN_DEADLINE, end).await;
    if ended.is_err() {
        tracing::warn!("a step is still running after {SHUTDOWN_DEADLINE:?}: leaving it behind");
    }
}

fn engine_failed(
    handle: &EngineHandle,
    end: Result<EngineEnd, oneshot::error::RecvError>,
) -> ServerError {
    let reason = match end {
        Ok(Ok(())) => "the engine thread ended without being asked to".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the engine thread panicked".to_owned(),
    };
    handle.mark_failed(&reason);
    tracing::error!(%reason, "the engine failed");
    ServerError::Backend(reason)
}
