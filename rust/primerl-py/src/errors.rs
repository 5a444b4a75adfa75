//! The exception tree. `PrimerlError` is its root; each subclass is also the built-in that callers would expect.

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use std::error::Error;

pyo3::create_exception!(
    primerl,
    PrimerlError,
    PyException,
    "Base of the errors that primerl raises."
);

static RENDER_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
static FORK_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// `primerl.RenderError(PrimerlError, ValueError)`.
pub fn render_error(py: Python<'_>, message: String) -> PyErr {
    match render_error_type(py) {
        Ok(class) => PyErr::from_type(class.clone(), (message,)),
        Err(error) => error,
    }
}

/// `primerl.NotExtendableError(RenderError)`, with the reason in one word as its attribute `reason`.
pub fn fork_error(py: Python<'_>, message: String, reason: &str) -> PyErr {
    let error = fork_error_type(py).and_then(|class| {
        let error = PyErr::from_type(class.clone(), (message,));
        error.value(py).setattr("reason", reason)?;
        Ok(error)
    });
    error.unwrap_or_else(|error| error)
}

/// The messages of an error and of everything that caused it.
pub fn with_causes(error: &dyn Error) -> String {
    let mut message = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let words = error.to_string();
        // Wrappers that already quote their cause say enough.
        if !message.contains(&words) {
            message.push_str(": ");
            message.push_str(&words);
        }
        cause = error.source();
    }
    message
}

pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("PrimerlError", py.get_type::<PrimerlError>())?;
    module.add("RenderError", render_error_type(py)?)?;
    module.add("NotExtendableError", fork_error_type(py)?)
}

// Two base classes: the `create_exception` macro takes one.
fn render_error_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let class = RENDER_ERROR.get_or_try_init(py, || {
        let bases = (py.get_type::<PrimerlError>(), py.get_type::<PyValueError>());
        let doc = "A model folder, conversation or text that cannot be rendered.";
        new_type(py, "RenderError", bases.into_pyobject(py)?, doc)
    })?;
    Ok(class.bind(py))
}

fn fork_error_type(py: Python<'_>) -> PyResult<&Bound<'_, PyType>> {
    let class = FORK_ERROR.get_or_try_init(py, || {
        let bases = PyTuple::new(py, [render_error_type(py)?])?;
        let doc = "New messages that cannot be appended to recorded tokens: render the conversation in full.";
        new_type(py, "NotExtendableError", bases, doc)
    })?;
    Ok(class.bind(py))
}

fn new_type(
    py: Python<'_>,
    name: &str,
    bases: Bound<'_, PyTuple>,
    doc: &str,
) -> PyResult<Py<PyType>> {
    let body = PyDict::new(py);
    body.set_item("__module__", "primerl")?;
    body.set_item("__doc__", doc)?;
    let class = py.get_type::<PyType>().call1((name, bases, body))?;
    Ok(class.cast_into::<PyType>()?.unbind())
}
