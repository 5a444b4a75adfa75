//! The embedded engine: `primerl_engine_server::run` in this process, over a model that is a Python object.

use crate::errors::PrimerlError;
use primerl_engine_server::{Config, ServerError};
use pyo3::exceptions::{PyOSError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::net::SocketAddr;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};
use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

mod backend;

pyo3::create_exception!(
    primerl,
    EngineError,
    PrimerlError,
    "The engine failed while it was serving; the message is the reason."
);

/// Python signal handlers run at most this late while a thread waits here.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
const STOP_DEADLINE: Duration = Duration::from_secs(3);

type End = Result<(), ServerError>;

/// Threads of a running engine. `None` after it was stopped.
struct Running {
    runtime: Runtime,
    ended: Receiver<End>,
}

#[pyclass(frozen, module = "primerl._core")]
pub struct InferenceEngine {
    running: Mutex<Option<Running>>,
    shutdown: CancellationToken,
    address: SocketAddr,
    /// Threads do not survive a fork, so a child must not use the engine.
    process: u32,
}

#[pymethods]
impl InferenceEngine {
    #[new]
    #[pyo3(signature = (config, backend, *, host, port))]
    fn new(
        py: Python<'_>,
        config: &Bound<'_, PyDict>,
        backend: Py<PyAny>,
        host: &str,
        port: u16,
    ) -> PyResult<Py<Self>> {
        log_to_stderr();
        let config: Config = pythonize::depythonize(config)?;
        let backend = backend::PythonBackend::new(py, backend)?;
        config
            .validate(primerl_engine_server::Backend::info(&backend))
            .map_err(|error| PyValueError::new_err(error.to_string()))?;
        let shutdown = CancellationToken::new();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("engine-http")
            .enable_all()
            .build()?;
        let listener = runtime
            .block_on(TcpListener::bind((host, port)))
            .map_err(|error| {
                PyOSError::new_err(format!("port: cannot listen on {host}:{port}: {error}"))
            })?;
        let address = listener.local_addr()?;
        let (sender, ended) = channel();
        let stop = shutdown.clone();
        runtime.spawn(async move {
            // There is no receiver any more if the engine was stopped and abandoned.
            let _ = sender.send(primerl_engine_server::run(config, backend, listener, stop).await);
        });
        let engine = InferenceEngine {
            running: Mutex::new(Some(Running { runtime, ended })),
            shutdown,
            address,
            process: std::process::id(),
        };
        let engine = Py::new(py, engine)?;
        // An engine thread that asks for the GIL of a finalised interpreter would hang the exit.
        py.import("atexit")?
            .call_method1("register", (engine.getattr(py, "stop")?,))?;
        Ok(engine)
    }

    /// `http://host:port`, with the port that was bound.
    #[getter]
    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Waits until the engine has ended, at most `timeout_s`; returns whether it has. Handles signals meanwhile.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        self.check_process()?;
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|error| PyValueError::new_err(format!("timeout_s: {error}")))?;
        let deadline = Instant::now() + timeout;
        loop {
            let slice = deadline
                .saturating_duration_since(Instant::now())
                .min(SIGNAL_INTERVAL);
            match py.detach(|| self.wait_slice(slice)) {
                Waited::Ended(end) => {
                    return end
                        .map(|()| true)
                        .map_err(|error| EngineError::new_err(error.to_string()));
                }
                Waited::Stopped => return Ok(true),
                Waited::Running if Instant::now() >= deadline => return Ok(false),
                Waited::Running => py.check_signals()?,
            }
        }
    }

    /// Ends the engine: requests in flight are answered with the tokens they have. Stopping twice is harmless.
    fn stop(slf: &Bound<'_, Self>) -> PyResult<()> {
        let (py, engine) = (slf.py(), slf.get());
        engine.check_process()?;
        // The engine thread may need the GIL to finish its step.
        py.detach(|| engine.shut_down());
        py.import("atexit")?
            .call_method1("unregister", (slf.getattr("stop")?,))?;
        Ok(())
    }
}

enum Waited {
    Running,
    Stopped,
    Ended(End),
}

impl InferenceEngine {
    fn check_process(&self) -> PyResult<()> {
        if std::process::id() == self.process {
            return Ok(());
        }
        Err(PyRuntimeError::new_err(
            "this engine runs in the process that forked this one; create a separate engine in the child",
        ))
    }

    fn wait_slice(&self, slice: Duration) -> Waited {
        let Ok(mut running) = self.running.lock() else {
            return Waited::Stopped;
        };
        let Some(engine) = running.as_ref() else {
            return Waited::Stopped;
        };
        match engine.ended.recv_timeout(slice) {
            Ok(end) => {
                *running = None;
                Waited::Ended(end)
            }
            Err(RecvTimeoutError::Timeout) => Waited::Running,
            Err(RecvTimeoutError::Disconnected) => Waited::Stopped,
        }
    }

    fn shut_down(&self) {
        self.shutdown.cancel();
        let Ok(mut running) = self.running.lock() else {
            return;
        };
        if let Some(engine) = running.take() {
            // Its result no longer matters: it was asked to end.
            let _ = engine.ended.recv_timeout(STOP_DEADLINE);
            engine.runtime.shutdown_background();
        }
    }
}

impl Drop for InferenceEngine {
    fn drop(&mut self) {
        self.shutdown.cancel();
        if let Ok(running) = self.running.get_mut()
            && let Some(engine) = running.take()
        {
            engine.runtime.shutdown_background();
        }
    }
}

/// Prints Rust's log lines, unless the process has set up a destination for them already.
fn log_to_stderr() {
    let filter =
        tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .try_init();
}
