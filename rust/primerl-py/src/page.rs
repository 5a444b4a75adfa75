//! The page of a run from its files: conversions of `primerl_orchestrator::page`.

use crate::errors::{PrimerlError, with_causes};
use parking_lot::Mutex;
use primerl_orchestrator::page;
use pyo3::prelude::*;
use std::path::PathBuf;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

/// Time for answers in progress at the end.
const DRAIN: Duration = Duration::from_millis(500);

/// Serves the page until it is stopped.
#[pyclass(frozen, module = "primerl._core")]
pub struct PageServer {
    url: String,
    stop: CancellationToken,
    runtime: Mutex<Option<Runtime>>,
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
