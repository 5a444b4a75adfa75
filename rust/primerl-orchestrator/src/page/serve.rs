//! The page of a run that is over, or that another process runs: from its files alone.

use super::{Page, endpoints};
use crate::http::ApiError;
use crate::inspect::InspectError;
use crate::journal;
use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use primerl_render::Renderer;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PageError {
    #[error(transparent)]
    Inspect(#[from] InspectError),
    #[error("the page is served on this machine only, not on {0}: it asks nobody for a key")]
    Exposed(std::net::SocketAddr),
    #[error("cannot serve the page: {0}")]
    Server(#[from] std::io::Error),
}

/// Serve the run in `output_dir` until `stop`. Tokens are written out by the tokenizer in `model`; without one, or where
/// it cannot be read, they are shown by their ids.
///
/// # Errors
/// There is no journal in the folder, or `listener` is not on loopback.
pub async fn serve(
    output_dir: &Path,
    model: Option<&Path>,
    listener: TcpListener,
    stop: CancellationToken,
) -> Result<(), PageError> {
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() {
        return Err(PageError::Exposed(address));
    }
    let output_dir = std::path::absolute(output_dir)?;
    if !journal::exists(&output_dir.join("journal")) {
        return Err(InspectError::NoJournal { folder: output_dir }.into());
    }
    let renderer = model.and_then(|model| match Renderer::load(model) {
        Ok(renderer) => Some(Arc::new(renderer)),
        Err(error) => {
            tracing::warn!(%error, "tokens are shown by their ids");
            None
        }
    });
    let newest = journal::oldest(&output_dir.join("journal")).map_err(InspectError::from)?;
    let page = Page::new(&output_dir, renderer, newest.core.config().data_ranks);
    let router: Router = endpoints::router(Arc::clone(&page));
    let now = Router::new().route("/page/now", get(now)).with_state(page);
    let server = axum::serve(listener, router.merge(now));
    Ok(server
        .with_graceful_shutdown(async move { stop.cancelled().await })
        .await?)
}

async fn now(State(page): State<Arc<Page>>) -> Result<Response, ApiError> {
    // What the launcher wrote at the end; of a run that was not started by it, there is none.
    let summary = page.output_dir.join("run/summary.json");
    let summary = tokio::fs::read(summary).await.unwrap_or_default();
    let summary: Value = serde_json::from_slice(&summary).unwrap_or_default();
    let status = summary.get("status").cloned().map(Arc::new);
    endpoints::now_with(page, status, false).await
}
