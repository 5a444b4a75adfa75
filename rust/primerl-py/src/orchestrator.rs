//! The orchestrator for Python: conversions of `primerl_orchestrator`.

use crate::advantages::functions;
use crate::errors::{PrimerlError, with_causes};
use crate::interrupt::SIGNALS;
use parking_lot::Mutex;
use primerl_orchestrator::Config;
use primerl_orchestrator::in_process::{InProcess, InProcessError, Pending};
use primerl_service::config_error::ConfigError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// An orderly end takes up to five seconds and a farewell.
const LONGEST_END: Duration = Duration::from_secs(12);

fn run_error(error: &(dyn std::error::Error + 'static)) -> PyErr {
    PrimerlError::new_err(with_causes(error))
}

/// Run the command `primerl-orchestrate` and return its exit code.
#[pyfunction]
pub fn orchestrate(py: Python<'_>, argv: Vec<String>) -> i32 {
    let code = py.detach(|| primerl_orchestrator::run_command(argv, Some(functions())));
    // The command's own orderly stop has handled a Ctrl-C; Python must not raise it a second time.
    let _ = py.check_signals();
    code
}

/// A run in this process. Methods release the GIL while they wait.
#[pyclass(frozen, module = "primerl._core")]
pub struct Orchestrator {
    config: Config,
    run: Mutex<Option<Arc<InProcess>>>,
    pid: u32,
}

impl Drop for Orchestrator {
    /// A forked child has none of the threads that the end of a run waits for.
    fn drop(&mut self) {
        if std::process::id() != self.pid {
            std::mem::forget(self.run.get_mut().take());
        }
    }
}

impl Orchestrator {
    /// A forked child has the object but none of the threads: calls would wait forever.
    fn check_process(&self) -> PyResult<()> {
        if std::process::id() == self.pid {
            return Ok(());
        }
        Err(PrimerlError::new_err(format!(
            "this Orchestrator belongs to process {}; it cannot be used after a fork (in a DataLoader's worker, for \
             example): call it from the process that made it",
            self.pid
        )))
    }

    fn running(&self) -> PyResult<Arc<InProcess>> {
        self.check_process()?;
        let run = self.run.lock().clone();
        run.ok_or_else(|| {
            PrimerlError::new_err("the orchestrator was not started; call start() first")
        })
    }
}

/// A key that is None is not given: TOML has no word for it.
fn without_none<'py>(value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = value.py();
    if let Ok(table) = value.cast::<PyDict>() {
        let given = PyDict::new(py);
        for (key, inner) in table.iter().filter(|(_, inner)| !inner.is_none()) {
            given.set_item(key, without_none(&inner)?)?;
        }
        return Ok(given.into_any());
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let inner = value.try_iter()?.map(|inner| without_none(&inner?));
        return Ok(PyList::new(py, inner.collect::<PyResult<Vec<_>>>()?)?.into_any());
    }
    Ok(value.clone())
}

fn read(config: &Bound<'_, PyDict>) -> PyResult<Result<Config, ConfigError>> {
    let given = without_none(config)?;
    let table = pythonize::depythonize(&given)
        .map_err(|error| PrimerlError::new_err(format!("config: {error}")))?;
    Ok(Config::from_table(table, "config"))
}

fn words(error: &ConfigError) -> String {
    match error {
        ConfigError::Parse { .. } | ConfigError::Located { .. } => error.to_string(),
        _ => format!("config: {}", with_causes(error)),
    }
}

/// What an orchestrator's config is refused for before its model is read: the key to change first, if it is about one,
/// and the message.
#[pyfunction]
pub fn check_config(config: &Bound<'_, PyDict>) -> PyResult<Option<(Option<String>, String)>> {
    let refused = read(config)?.err();
    Ok(refused.map(|error| (error.key().map(str::to_owned), words(&error))))
}

fn wait<T: Send>(py: Python<'_>, mut pending: Pending<Result<T, InProcessError>>) -> PyResult<T> {
    loop {
        match py.detach(|| pending.wait(SIGNALS)) {
            Some(Some(answer)) => return answer.map_err(|error| run_error(&error)),
            Some(None) => return Err(PrimerlError::new_err("the run has stopped")),
            None => py.check_signals()?,
        }
    }
}

#[pymethods]
impl Orchestrator {
    #[new]
    fn new(config: &Bound<'_, PyDict>) -> PyResult<Self> {
        let config = read(config)?.map_err(|error| PrimerlError::new_err(words(&error)))?;
        Ok(Orchestrator {
            config,
            run: Mutex::new(None),
            pid: std::process::id(),
        })
    }

    fn start(slf: &Bound<'_, Self>) -> PyResult<()> {
        let py = slf.py();
        let this = slf.get();
        this.check_process()?;
        if this.run.lock().is_some() {
            return Err(PrimerlError::new_err(
                "the orchestrator was started already",
            ));
        }
        let config = this.config.clone();
        let run = py
            .detach(|| InProcess::start(config, Some(functions())))
            .map_err(|error| run_error(&error))?;
        *this.run.lock() = Some(Arc::new(run));
        // The journal and the spool are closed before the interpreter ends.
        let shutdown = slf.getattr("shutdown")?;
        py.import("atexit")?
            .call_method1("register", (shutdown, "the interpreter exits"))?;
        Ok(())
    }

    #[getter]
    fn url(&self) -> PyResult<String> {
        Ok(self.running()?.url().to_owned())
    }

    fn next_batch<'py>(
        &self,
        py: Python<'py>,
        step: u64,
        rank: u32,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let pending = self.running()?.next_batch(step, rank);
        Ok(wait(py, pending)?.map(|bytes| PyBytes::new(py, &bytes)))
    }

    fn publish_weights(
        &self,
        py: Python<'_>,
        version: u64,
        manifest_path: PathBuf,
    ) -> PyResult<()> {
        let pending = self.running()?.publish_weights(version, manifest_path);
        wait(py, pending)
    }

    fn resume_after(&self, py: Python<'_>, step: u64) -> PyResult<()> {
        let pending = self.running()?.resume_after(step);
        wait(py, pending)
    }

    #[pyo3(signature = (step, saved = None))]
    fn checkpoint_saved(&self, py: Python<'_>, step: u64, saved: Option<u64>) -> PyResult<()> {
        let pending = self.running()?.checkpoint_saved(step, saved);
        wait(py, pending)
    }

    fn status<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let run = self.running()?;
        let status = py.detach(|| run.status());
        pythonize::pythonize(py, &status).map_err(|error| PrimerlError::new_err(error.to_string()))
    }

    #[pyo3(signature = (reason = "shutdown was called"))]
    fn shutdown(&self, py: Python<'_>, reason: &str) -> PyResult<()> {
        if std::process::id() != self.pid {
            return Ok(()); // A forked child has nothing to stop.
        }
        let Some(run) = self.run.lock().clone() else {
            return Ok(());
        };
        run.request_shutdown(reason.to_owned());
        py.detach(|| run.wait_for_end(LONGEST_END));
        Ok(())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, py: Python<'_>, _exception: &Bound<'_, PyTuple>) -> PyResult<()> {
        self.shutdown(py, "the orchestrator's block was left")
    }
}
