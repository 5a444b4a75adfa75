//! Servers that are not engines of the run: conversions of `primerl_engines::clients`.

use crate::errors::PrimerlError;
use crate::interrupt::interruptible;
use primerl_engines::clients::ClientConfig;
use primerl_engines::clients::{LookError, look};
use pyo3::exceptions::{PyConnectionError, PyTimeoutError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::time::Duration;

/// A server's list of models, whatever it is: `(status, body)`.
#[pyfunction]
#[pyo3(signature = (base_url, *, api_key_env = None, within_s))]
pub fn ask_models(
    py: Python<'_>,
    base_url: String,
    api_key_env: Option<String>,
    within_s: f64,
) -> PyResult<(u16, Py<PyBytes>)> {
    let within = Duration::try_from_secs_f64(within_s)
        .map_err(|error| PyValueError::new_err(format!("within_s = {within_s}: {error}")))?;
    let config = ClientConfig {
        base_urls: vec![base_url],
        model: String::new(),
        api_key_env,
        client_type: None,
        timeout_s: within_s,
    };
    let said =
        interruptible(py, move || look(&config, within))?.map_err(|error| raised(py, &error))?;
    Ok((said.status, PyBytes::new(py, &said.body).unbind()))
}

fn raised(py: Python<'_>, error: &LookError) -> PyErr {
    let message = error.to_string();
    match error {
        LookError::Config(found) => {
            let raised = PyValueError::new_err(message);
            match raised.value(py).setattr("key", found.key()) {
                Ok(()) => raised,
                Err(error) => error,
            }
        }
        LookError::Timeout(_) => PyTimeoutError::new_err(message),
        LookError::Unanswered(_) => PyConnectionError::new_err(message),
        _ => PrimerlError::new_err(message),
    }
}
