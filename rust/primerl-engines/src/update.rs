//! What every way of updating an engine needs.

use super::error::EngineError;
use super::logprob_kind::{LogprobKindError, prove_processed};
use super::pool::Engines;
use super::probe::ProbeError;
use super::served_version::Named;
use super::state::Engine;
use primerl_core::{Event, PolicyVersion};
use std::path::Path;
use std::time::Duration;

#[derive(Debug, thiserror::Error)]
pub(super) enum UpdateError {
    #[error(transparent)]
    Engine(#[from] EngineError),
    #[error("the update did not end within {0:?}")]
    Timeout(Duration),
    #[error("cannot be resumed: {0}")]
    Resume(EngineError),
    #[error(transparent)]
    Meaning(#[from] LogprobKindError),
    #[error(transparent)]
    Probe(#[from] ProbeError),
}

/// What is to end within the time of an update.
pub(super) async fn within<T>(
    pool: &Engines,
    call: impl Future<Output = Result<T, EngineError>>,
) -> Result<T, UpdateError> {
    let limit = pool.config.update_timeout;
    let ended = tokio::time::timeout(limit, call).await;
    Ok(ended.map_err(|_| UpdateError::Timeout(limit))??)
}

/// A process does not change what its log-probabilities are of, so it is asked once.
pub(super) async fn check_logprob_kind(
    pool: &Engines,
    engine: &Engine,
    named: &Named,
) -> Result<(), LogprobKindError> {
    if !pool.config.needs_processed || engine.state.lock().is_processed {
        return Ok(());
    }
    let proved = prove_processed(&engine.client, &pool.config, named).await;
    let mut state = engine.state.lock();
    state.is_processed = proved.is_ok();
    // It has been through its start-up: there is nothing more to wait for than with others.
    state.was_known = true;
    proved
}

pub(super) fn note_proved(pool: &Engines, engine: &Engine, version: PolicyVersion) {
    pool.driver.send(Event::EngineProved {
        engine: engine.id,
        version,
    });
}

/// What engines are given in place of the manifest's own path.
pub(super) fn folder_of(manifest: &str) -> String {
    let folder = Path::new(manifest)
        .parent()
        .unwrap_or_else(|| Path::new("."));
    folder.to_string_lossy().into_owned()
}
