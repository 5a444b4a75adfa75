//! Structured outputs on the wire: from a request's schema to the masks of its answers.

use super::App;
use super::error::ApiError;
use super::wire::GenerateRequest;
use crate::grammar::{Grammar, Workers};
use crate::request::SamplingParams;
use crate::sequence::Completion;
use primerl_grammar::{GrammarError, Masks, Spec, Vocabulary};
use serde::Serialize;
use std::sync::Arc;
use tokio::sync::OnceCell;

pub const PARAMETER: &str = "structured_outputs";

/// Built at the first request that needs it.
#[derive(Default)]
pub struct Structured(OnceCell<Arc<Loaded>>);

struct Loaded {
    vocabulary: Vocabulary,
    workers: Workers,
}

/// The masks of a request's answers.
pub(super) struct Compiled {
    masks: Masks,
    loaded: Arc<Loaded>,
    pub applied: Applied,
}

/// Reported with an answer: everything that its masks depend on.
#[derive(Clone, Debug, Serialize)]
pub struct Applied {
    /// Vocabulary and library.
    pub masks: Arc<str>,
    pub spec: Arc<Spec>,
}

impl Loaded {
    fn compile(self: Arc<Self>, spec: Spec) -> Result<Compiled, GrammarError> {
        let spec = Arc::new(spec);
        Ok(Compiled {
            masks: self.vocabulary.compile(&spec)?,
            applied: Applied {
                masks: Arc::clone(self.vocabulary.identity()),
                spec,
            },
            loaded: self,
        })
    }
}

impl Compiled {
    /// One choice.
    pub fn begin(&self) -> Grammar {
        self.loaded.workers.begin(self.masks.fork())
    }
}

/// `None`: the request asks for no structure. Off the threads that serve: a large schema takes some hundred
/// milliseconds.
pub(super) async fn compile(
    app: &App,
    request: &GenerateRequest,
    sampling: &SamplingParams,
) -> Result<Option<Compiled>, ApiError> {
    let Some(spec) = spec(request, sampling)? else {
        return Ok(None);
    };
    let loaded = app.structured.0.get_or_try_init(|| load(app)).await?;
    let loaded = Arc::clone(loaded);
    let compiled = tokio::task::spawn_blocking(move || loaded.compile(spec));
    let compiled = compiled
        .await
        .map_err(|error| ApiError::internal(error.to_string()))?;
    compiled.map(Some).map_err(refused)
}

fn spec(request: &GenerateRequest, sampling: &SamplingParams) -> Result<Option<Spec>, ApiError> {
    let body = &request.sampling_params;
    let outputs = body.structured_outputs.as_ref();
    let Some(outputs) = outputs.filter(|outputs| !outputs.is_null()) else {
        return Ok(None);
    };
    if sampling.min_tokens > 0 || body.ignore_eos == Some(true) {
        let message = "structured_outputs end an answer where the grammar ends: leave out min_tokens and ignore_eos.";
        return Err(ApiError::bad_request(message, Some(PARAMETER)));
    }
    let mut ends: Vec<u32> = sampling.stop_token_ids.clone();
    ends.extend(sampling.eos_token_id);
    ends.sort_unstable();
    ends.dedup();
    Ok(Some(Spec {
        structured_outputs: outputs.clone(),
        reasoning: body.structured_reasoning.clone(),
        ends,
    }))
}

async fn load(app: &App) -> Result<Arc<Loaded>, ApiError> {
    let renderer = app.rendering.renderer().await?;
    let size = app.model.vocab_size;
    let loaded = tokio::task::spawn_blocking(move || Vocabulary::new(renderer.tokenizer(), size));
    let loaded = loaded
        .await
        .map_err(|error| ApiError::internal(error.to_string()))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(Arc::new(Loaded {
        vocabulary: loaded.map_err(refused)?,
        workers: Workers::start(threads.min(4))
            .map_err(|error| ApiError::internal(format!("cannot compute masks: {error}")))?,
    }))
}

fn refused(error: GrammarError) -> ApiError {
    ApiError::bad_request(error.to_string(), Some(PARAMETER))
}

/// Why an answer is none; it would fail in the same way on any engine.
pub fn failure(completion: &Completion) -> Option<ApiError> {
    let failure = completion.failure.as_ref()?;
    Some(ApiError::bad_request(
        format!("{PARAMETER}: {failure}"),
        Some(PARAMETER),
    ))
}
