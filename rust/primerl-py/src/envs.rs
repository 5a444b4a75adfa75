//! The env worker's lease client for Python: conversions of `primerl_orchestrator::envs::client`.

use primerl_core::RolloutId;
use primerl_core::event::Outcome;
use primerl_orchestrator::envs::client::{
    Answer, Call, CallError, End, EnvClient as Client, Notice, Options, StartError,
};
use primerl_orchestrator::envs::wire::{self, RegisterAnswer, RegisterRequest, WorkerRole};
use primerl_service::secret::Secret;
use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use pyo3::{PyClass, PyClassInitializer};
use std::time::Duration;

/// Exit code of a worker that was given up because its environment blocked it.
const BLOCKED: i32 = 4;
/// Exit handlers of a process may wait for what its main thread holds.
const EXIT_WITHIN: Duration = Duration::from_secs(5);

/// Without Python: the code that blocks may hold the GIL.
fn end_process(reason: &str) {
    eprintln!("error: {reason}");
    std::thread::spawn(|| {
        std::thread::sleep(EXIT_WITHIN);
        std::process::abort();
    });
    std::process::exit(BLOCKED);
}

fn start_error(error: StartError) -> PyErr {
    match error {
        StartError::Url(_) | StartError::NoCapacity => PyValueError::new_err(error.to_string()),
        other => PyOSError::new_err(other.to_string()),
    }
}

fn seconds(name: &str, value: f64) -> PyResult<Duration> {
    Duration::try_from_secs_f64(value).map_err(|_| {
        PyValueError::new_err(format!(
            "{name} must be a number of seconds from 0, not {value}"
        ))
    })
}

/// A rollout to run.
#[pyclass(frozen, get_all, module = "primerl._core")]
pub struct Lease {
    rollout: u64,
    group: u64,
    example: u32,
    base_url: String,
    api_key: String,
    sampling: Py<PyDict>,
    deadline_s: f64,
}

#[pyclass(frozen, get_all, module = "primerl._core")]
pub struct Registered {
    worker: u64,
    environment: u32,
    model: String,
    heartbeat_s: f64,
    demonstration: Option<String>,
}

#[pyclass(frozen, get_all, module = "primerl._core")]
pub struct Leased {
    leases: Py<PyList>,
}

#[pyclass(frozen, get_all, module = "primerl._core")]
pub struct Cancelled {
    rollouts: Vec<u64>,
}

#[pyclass(frozen, module = "primerl._core")]
pub struct LeasesVoid;

/// `status` is 0 and `error` is set when no answer came; `timed_out` says whether that was the deadline.
#[pyclass(frozen, get_all, module = "primerl._core")]
pub struct Answered {
    call: u64,
    status: u16,
    body: Py<PyBytes>,
    error: Option<String>,
    timed_out: bool,
}

#[pyclass(frozen, get_all, module = "primerl._core")]
pub struct Problem {
    message: String,
}

/// `kind` is "finished", "unreachable" or "refused".
#[pyclass(frozen, get_all, module = "primerl._core")]
pub struct Ended {
    kind: &'static str,
    message: String,
}

fn lease(py: Python<'_>, lease: wire::Lease) -> PyResult<Py<Lease>> {
    let sampling = pythonize::pythonize(py, &lease.sampling)?
        .cast_into::<PyDict>()?
        .unbind();
    let wire::Lease {
        rollout,
        group,
        example,
        base_url,
        api_key,
        deadline_s,
        ..
    } = lease;
    Py::new(
        py,
        Lease {
            rollout: rollout.0,
            group: group.0,
            example: example.0,
            base_url,
            api_key: api_key.reveal().to_owned(),
            sampling,
            deadline_s,
        },
    )
}

fn notice(py: Python<'_>, notice: Notice) -> PyResult<Py<PyAny>> {
    match notice {
        Notice::Registered(answer) => object(py, registered(answer)),
        Notice::Leased(leases) => object(py, leased(py, leases)?),
        Notice::Cancelled(rollouts) => {
            let rollouts = rollouts.into_iter().map(|id| id.0).collect();
            object(py, Cancelled { rollouts })
        }
        Notice::LeasesVoid => object(py, LeasesVoid),
        Notice::Answered { call, answer } => object(py, answered(py, call, answer)),
        Notice::Problem(message) => object(py, Problem { message }),
        Notice::Ended(end) => object(py, ended(&end)),
    }
}

fn object<T>(py: Python<'_>, value: T) -> PyResult<Py<PyAny>>
where
    T: PyClass + Into<PyClassInitializer<T>>,
{
    Ok(Py::new(py, value)?.into_any())
}

fn registered(answer: RegisterAnswer) -> Registered {
    Registered {
        worker: answer.worker.0,
        environment: answer.environment.0,
        model: answer.model,
        heartbeat_s: answer.heartbeat_s,
        demonstration: answer.demonstration,
    }
}

fn leased(py: Python<'_>, leases: Vec<wire::Lease>) -> PyResult<Leased> {
    let leases = leases.into_iter().map(|one| lease(py, one));
    let leases: Vec<_> = leases.collect::<PyResult<_>>()?;
    Ok(Leased {
        leases: PyList::new(py, leases)?.unbind(),
    })
}

fn ended(end: &End) -> Ended {
    let kind = match end {
        End::Finished(_) => "finished",
        End::Unreachable { .. } => "unreachable",
        End::Refused { .. } => "refused",
    };
    Ended {
        kind,
        message: end.to_string(),
    }
}

fn answered(py: Python<'_>, call: u64, answer: Result<Answer, CallError>) -> Answered {
    let timed_out = matches!(answer, Err(CallError::Timeout { .. }));
    let (status, body, error) = match answer {
        Ok(answer) => (answer.status, PyBytes::new(py, &answer.body).unbind(), None),
        Err(error) => (0, PyBytes::new(py, b"").unbind(), Some(error.to_string())),
    };
    Answered {
        call,
        status,
        body,
        error,
        timed_out,
    }
}

fn role_of(role: &str) -> PyResult<WorkerRole> {
    match role {
        "train" => Ok(WorkerRole::Train),
        "eval" => Ok(WorkerRole::Eval),
        other => Err(PyValueError::new_err(format!(
            "role must be \"train\" or \"eval\", not {other:?}"
        ))),
    }
}

/// Registers with an orchestrator and holds its leases, on a separate thread.
#[pyclass(frozen, module = "primerl._core")]
pub struct EnvClient {
    client: Client,
}

#[pymethods]
impl EnvClient {
    #[new]
    #[expect(
        clippy::too_many_arguments,
        reason = "Python passes them by name, and one by one"
    )]
    #[pyo3(signature = (*, orchestrator_url, api_key, environment, role, name, examples, listing, max_concurrent, give_up_s, whole_groups = false))]
    fn new(
        orchestrator_url: String,
        api_key: Option<String>,
        environment: String,
        role: &str,
        name: String,
        examples: u32,
        listing: &Bound<'_, PyAny>,
        max_concurrent: u32,
        give_up_s: f64,
        whole_groups: bool,
    ) -> PyResult<Self> {
        let registration = RegisterRequest {
            environment,
            role: role_of(role)?,
            name,
            pid: std::process::id(),
            examples,
            whole_groups,
            max_concurrent: Some(max_concurrent),
            listing: Some(pythonize::depythonize(listing)?),
        };
        let give_up = seconds("give_up_s", give_up_s)?;
        let options = Options {
            orchestrator_url,
            api_key: api_key.map(Secret::new),
            registration,
            max_concurrent,
            give_up,
            end_process,
        };
        Client::start(options)
            .map(|client| Self { client })
            .map_err(start_error)
    }

    /// Readable while `notices` has something to give: for `loop.add_reader`.
    fn fileno(&self) -> i32 {
        self.client.descriptor()
    }

    fn notices(&self, py: Python<'_>) -> PyResult<Vec<Py<PyAny>>> {
        self.client
            .take_notices()
            .into_iter()
            .map(|one| notice(py, one))
            .collect()
    }

    fn report(&self, rollout: u64, outcome: &Bound<'_, PyAny>) -> PyResult<()> {
        let outcome: Outcome = pythonize::depythonize(outcome)?;
        self.client.report(RolloutId(rollout), outcome);
        Ok(())
    }

    /// The event loop has turned: call this about once a second.
    fn turned(&self) {
        self.client.turned();
    }

    /// Where the event loop is held up, and by which rollout: reported by a watcher thread while the loop does not
    /// turn.
    #[pyo3(signature = (at, rollout))]
    fn held(&self, at: Option<String>, rollout: Option<u64>) {
        self.client.held(at, rollout.map(RolloutId));
    }

    fn release(&self, rollout: u64) {
        self.client.release(RolloutId(rollout));
    }

    fn call(
        &self,
        url: String,
        api_key: String,
        session: String,
        body: &[u8],
        timeout_s: f64,
    ) -> PyResult<u64> {
        let timeout = seconds("timeout_s", timeout_s)?;
        Ok(self.client.call(Call {
            url,
            api_key: Secret::new(api_key),
            session,
            body: body.to_vec().into(),
            timeout,
        }))
    }

    fn abort(&self, call: u64) {
        self.client.abort(call);
    }

    fn leave(&self, py: Python<'_>, patience_s: f64) -> PyResult<()> {
        let patience = seconds("patience_s", patience_s)?;
        py.detach(|| self.client.leave(patience));
        Ok(())
    }
}
