//! The live page: a run's progress and its model's text, for people, at `/`.
//!
//! ```text
//! /                    the page; /page/assets/… its script and style (no data: no key is needed for them)
//! /page/now            the status, where the time went, how far the journal was read
//! /page/curves         named columns of metrics.jsonl and steps.jsonl, thinned to what can be drawn
//! /page/health         what rules find wrong with the run, in words
//! /page/evaluations    lines of evals.jsonl
//! /page/rollouts       the last rollouts, a line each, filtered, in pages
//! /page/rollouts/{id}  one of them: its turns; …/turns/{n}: the tokens of one
//! ```
//! Everything is read from the run's files, so the same page shows a run that is over ([`Prepared`]). Reading uses one
//! blocking thread at a time, and a separate thread follows the journal ([`Reader`]): requests of the run never wait
//! for the page.

mod assets;
mod endpoints;
mod serve;

pub(crate) use assets::is_asset;
pub use assets::{ASSETS, POLICY};
pub(crate) use endpoints::{now, routes};
pub use serve::Prepared;

use parking_lot::Mutex;
use primerl_record::page::curves::Curves;
use primerl_record::page::reader::{Known, Reader};
use primerl_record::page::rollout::{Shelf, Told};
use primerl_render::Renderer;
use primerl_service::http::ApiError;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;

/// How long a status is reused for all viewers.
const STATUS_LASTS: Duration = Duration::from_millis(500);

/// The page of one run.
pub struct Page {
    output_dir: PathBuf,
    /// Without it, tokens are shown by their ids.
    renderer: Option<Arc<Renderer>>,
    data_ranks: u32,
    /// Set in `primerl eval`: nothing is trained.
    only_evaluates: bool,
    reader: Reader,
    curves: Mutex<Curves>,
    shelf: Mutex<Shelf>,
    status: Mutex<Option<(Instant, Arc<Value>)>>,
    /// Held by the request that asks for the status; the others wait for its answer.
    asks_status: tokio::sync::Mutex<()>,
    /// Permits to read from the files.
    turn: Arc<Semaphore>,
}

impl Page {
    /// The page of a run that this process runs.
    pub(crate) fn new(
        output_dir: &Path,
        renderer: Option<Arc<Renderer>>,
        config: &primerl_core::Config,
    ) -> Arc<Page> {
        Page::with(Reader::new(output_dir, false), output_dir, renderer, config)
    }

    /// Its counts are read from its journal.
    fn of_files(
        output_dir: &Path,
        renderer: Option<Arc<Renderer>>,
        config: &primerl_core::Config,
    ) -> Arc<Page> {
        Page::with(Reader::new(output_dir, true), output_dir, renderer, config)
    }

    fn with(
        reader: Reader,
        output_dir: &Path,
        renderer: Option<Arc<Renderer>>,
        config: &primerl_core::Config,
    ) -> Arc<Page> {
        Arc::new(Page {
            output_dir: output_dir.to_owned(),
            renderer,
            data_ranks: config.run.data_ranks,
            only_evaluates: config.only_evaluates(),
            reader,
            curves: Mutex::new(Curves::new(output_dir)),
            shelf: Mutex::default(),
            status: Mutex::default(),
            asks_status: tokio::sync::Mutex::default(),
            turn: Arc::new(Semaphore::new(1)),
        })
    }

    fn fresh_status(&self) -> Option<Arc<Value>> {
        let status = self.status.lock();
        let (_, status) = status
            .as_ref()
            .filter(|(at, _)| at.elapsed() < STATUS_LASTS)?;
        Some(Arc::clone(status))
    }

    /// The events of one rollout, which are read if they were not read lately.
    fn told(&self, id: primerl_core::RolloutId) -> Result<Arc<Told>, ApiError> {
        let (record, places) = {
            let known = self.reader.settled(endpoints::PATIENCE);
            let record = known.index.get(id).ok_or_else(|| unknown(id, &known))?;
            (record.clone(), known.index.places(record))
        };
        if let Some(told) = self.shelf.lock().find(&record, places.len()) {
            return Ok(told);
        }
        let told = Told::read(&self.output_dir, self.data_ranks, &record, &places);
        let told = told.map_err(|error| {
            let problem = format!("the events of rollout {id} cannot be read any more: {error}");
            ApiError::not_found("rollout_gone", problem)
        })?;
        let told = Arc::new(told);
        self.shelf.lock().keep(Arc::clone(&told));
        Ok(told)
    }
}

fn unknown(id: primerl_core::RolloutId, known: &Known) -> ApiError {
    let first = known.index.first();
    let problem = match (&known.problem, first) {
        (Some(problem), _) => format!("the journal cannot be read: {problem}"),
        (None, _) if !known.is_up_to_date => {
            format!(
                "there is no rollout {id} in what was read so far; the journal is still being read"
            )
        }
        (None, Some(first)) => format!(
            "there is no rollout {id} among the {} that are known, from {first} on; `primerl trace` reads all of the journal",
            known.index.count()
        ),
        (None, None) => format!("there is no rollout {id}: none has begun"),
    };
    ApiError::not_found("rollout_unknown", problem)
}
