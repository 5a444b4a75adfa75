//! The page of a run that is over, or that another process runs: from its files alone.

use super::{Page, endpoints};
use axum::Router;
use axum::extract::State;
use axum::response::Response;
use axum::routing::get;
use primerl_record::inspect::InspectError;
use primerl_record::journal;
use primerl_render::Renderer;
use primerl_service::http::ApiError;
use std::io;
use std::path::Path;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// A run with its files.
pub struct Prepared(Arc<Page>);

impl Prepared {
    /// The tokenizer in `model` gives the tokens' text; without one, or if it cannot be read, they are shown by their
    /// ids.
    ///
    /// # Errors
    /// The folder holds no journal, or a damaged one.
    pub fn new(output_dir: &Path, model: Option<&Path>) -> Result<Prepared, InspectError> {
        let folder = output_dir.join("journal");
        if !journal::exists(&folder) {
            let folder = output_dir.to_owned();
            return Err(InspectError::NoJournal { folder });
        }
        let oldest = journal::oldest(&folder)?;
        let renderer = model.and_then(|model| match Renderer::load(model) {
            Ok(renderer) => Some(Arc::new(renderer)),
            Err(error) => {
                tracing::warn!(%error, "tokens are shown by their ids");
                None
            }
        });
        let config = oldest.core.config();
        Ok(Prepared(Page::of_files(output_dir, renderer, config)))
    }

    /// Serves until `stop`. It does not ask for a key: `listener` should be on loopback.
    ///
    /// # Errors
    /// The listener fails.
    pub async fn serve(self, listener: TcpListener, stop: CancellationToken) -> io::Result<()> {
        let Prepared(page) = self;
        let router: Router = endpoints::routes(Arc::clone(&page)).into_router();
        let now = Router::new().route("/page/now", get(now)).with_state(page);
        let server = axum::serve(listener, router.merge(now));
        let stopped = async move { stop.cancelled().await };
        server.with_graceful_shutdown(stopped).await
    }
}

async fn now(State(page): State<Arc<Page>>) -> Result<Response, ApiError> {
    endpoints::now_of_files(page).await
}
