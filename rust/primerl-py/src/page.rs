//! The page of a run from its files: conversions of `primerl_orchestrator::page`.

use crate::errors::{PrimerlError, with_causes};
use parking_lot::Mutex;
use primerl_orchestrator::page;
use primerl_record::page::curves::{Curves, Wanted};
use primerl_record::page::health;
use pyo3::prelude::*;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// Time for answers in progress at the end.
const DRAIN: Duration = Duration::from_millis(500);

/// The page's own files, for other pages that look alike: kind and content by name, and the policy they are served with.
#[pyfunction]
pub fn page_files() -> (
    HashMap<&'static str, (&'static str, &'static str)>,
    &'static str,
) {
    let files = page::ASSETS.iter();
    let by_name = files.map(|(name, kind, content)| (*name, (*kind, *content)));
    (by_name.collect(), page::POLICY)
}

/// Serves the page until it is stopped.
#[pyclass(frozen, module = "primerl._core")]
pub struct PageServer {
    url: String,
    stop: CancellationToken,
    runtime: Mutex<Option<Runtime>>,
}

/// Curves and evaluations of a run, read on from its files with every question. Answers are JSON text: they are passed
/// to a browser as they are.
#[pyclass(frozen, module = "primerl._core")]
pub struct RunCurves(Mutex<Curves>);

impl RunCurves {
    fn read(
        &self,
        py: Python<'_>,
        answer: impl Send + FnOnce(&Curves) -> Value,
    ) -> PyResult<String> {
        py.detach(|| {
            let mut curves = self.0.lock();
            curves.refresh()?;
            Ok(answer(&curves).to_string())
        })
    }
}

#[pymethods]
impl RunCurves {
    #[new]
    fn new(output_dir: PathBuf) -> RunCurves {
        RunCurves(Mutex::new(Curves::new(&output_dir)))
    }

    #[pyo3(signature = (names, *, first = 0, last = u64::MAX, points = 500))]
    fn curves(
        &self,
        py: Python<'_>,
        names: Vec<String>,
        first: u64,
        last: u64,
        points: usize,
    ) -> PyResult<String> {
        let wanted = Wanted {
            names,
            from: first,
            to: last,
            points,
        };
        self.read(py, |curves| {
            let mut answer = curves.answer(&wanted);
            answer["damaged"] = json!(curves.damaged());
            answer["last"] = json!(curves.last_steps());
            answer
        })
    }

    #[pyo3(signature = (limit = 1_000))]
    fn evaluations(&self, py: Python<'_>, limit: usize) -> PyResult<String> {
        self.read(py, |curves| curves.evaluations(None, limit))
    }

    fn health(&self, py: Python<'_>) -> PyResult<String> {
        self.read(
            py,
            |curves| json!({"steps": curves.steps(), "findings": health::findings(curves)}),
        )
    }
}

fn refuse(error: &(dyn std::error::Error + 'static)) -> PyErr {
    PrimerlError::new_err(with_causes(error))
}

#[pymethods]
impl PageServer {
    #[new]
    #[pyo3(signature = (output_dir, model = None, *, port = 0))]
    fn new(
        py: Python<'_>,
        output_dir: PathBuf,
        model: Option<PathBuf>,
        port: u16,
    ) -> PyResult<Self> {
        py.detach(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()?;
            let prepared = page::Prepared::new(&output_dir, model.as_deref());
            let prepared = prepared.map_err(|error| refuse(&error))?;
            let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", port)))?;
            let url = format!("http://{}", listener.local_addr()?);
            let stop = CancellationToken::new();
            runtime.spawn(prepared.serve(listener, stop.clone()));
            Ok(PageServer {
                url,
                stop,
                runtime: Mutex::new(Some(runtime)),
            })
        })
    }

    #[getter]
    fn url(&self) -> &str {
        &self.url
    }

    fn stop(&self, py: Python<'_>) {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.lock().take() {
            py.detach(|| runtime.shutdown_timeout(DRAIN));
        }
    }
}
