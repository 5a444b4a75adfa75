//! The model's tokenizer and chat template, for the routes that take messages.

use super::error::ApiError;
use primerl_render::{Message, RenderOptions, Renderer};
use std::path::PathBuf;
use std::sync::Arc;
use tokio::sync::OnceCell;

/// Loaded at the first request that needs it: most engines are only ever given ids.
pub struct Rendering {
    folder: Option<PathBuf>,
    renderer: OnceCell<Arc<Renderer>>,
}

impl Rendering {
    pub fn new(folder: Option<PathBuf>) -> Self {
        Rendering {
            folder,
            renderer: OnceCell::new(),
        }
    }

    /// A model folder that cannot be read is tried again at the next request.
    pub async fn renderer(&self) -> Result<Arc<Renderer>, ApiError> {
        let Some(folder) = self.folder.clone() else {
            let message = "This engine was started without a model folder (chat_model), so it cannot render messages. \
                           Give it one, or send token ids to /inference/v1/generate.";
            return Err(ApiError::bad_request(message, Some("messages")));
        };
        let load = || async {
            let shown = folder.display().to_string();
            tokio::task::spawn_blocking(move || Renderer::load(&folder))
                .await
                .map_err(|error| error.to_string())
                .and_then(|loaded| loaded.map_err(|error| error.to_string()))
                .map(Arc::new)
                .map_err(|error| ApiError::internal(format!("cannot render with {shown}: {error}")))
        };
        self.renderer.get_or_try_init(load).await.cloned()
    }
}

/// Off the threads that serve: a long conversation takes milliseconds.
pub async fn render(
    renderer: &Arc<Renderer>,
    messages: Vec<Message>,
    options: RenderOptions,
) -> Result<Vec<u32>, ApiError> {
    let renderer = Arc::clone(renderer);
    let rendered = tokio::task::spawn_blocking(move || {
        let messages: Vec<Message> = messages
            .into_iter()
            .map(|message| renderer.with_renderable_content(message))
            .collect();
        renderer.render(&messages, &options)
    });
    match rendered.await {
        Ok(Ok(ids)) => Ok(ids),
        Ok(Err(error)) => Err(ApiError::bad_request(error.to_string(), Some("messages"))),
        Err(error) => Err(ApiError::internal(error.to_string())),
    }
}
