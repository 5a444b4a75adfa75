//! Custom advantages: Python functions for `primerl_orchestrator`. `primerl.advantages` defines their arguments and
//! results; columns cross as bytes, one call per group.

use parking_lot::Mutex;
use primerl_core::effect::AdvantagesRequest;
use primerl_core::sample::Sample;
use primerl_orchestrator::CustomAdvantages;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use std::collections::BTreeMap;
use std::sync::Arc;

const MODULE: &str = "primerl.advantages";

/// Functions of this interpreter.
pub fn functions() -> Arc<dyn CustomAdvantages> {
    Arc::new(PythonFunctions::default())
}

#[derive(Default)]
struct PythonFunctions {
    /// Functions by path. Written before the run, read by its one thread.
    loaded: Mutex<BTreeMap<String, Py<PyAny>>>,
}

impl CustomAdvantages for PythonFunctions {
    fn load(&self, path: &str) -> Result<(), String> {
        Python::attach(|py| {
            let function = py.import(MODULE)?.call_method1("load", (path,))?;
            self.loaded
                .lock()
                .insert(path.to_owned(), function.unbind());
            Ok(())
        })
        .map_err(|error: PyErr| error.to_string())
    }

    fn compute(
        &self,
        request: &AdvantagesRequest,
        environment: &str,
    ) -> Result<Vec<Vec<f32>>, String> {
        Python::attach(|py| {
            let loaded = self
                .loaded
                .lock()
                .get(&request.path)
                .map(|function| function.clone_ref(py));
            let Some(function) = loaded else {
                return Err(format!("{} was not loaded", request.path));
            };
            answer(py, &function, request, environment).map_err(|error| {
                if let Some(Ok(traceback)) = error.traceback(py).map(|traceback| traceback.format())
                {
                    tracing::warn!(function = request.path, "{error}\n{traceback}");
                }
                error.to_string()
            })
        })
    }
}

fn answer(
    py: Python<'_>,
    function: &Py<PyAny>,
    request: &AdvantagesRequest,
    environment: &str,
) -> PyResult<Vec<Vec<f32>>> {
    let traces = PyList::empty(py);
    for (trace, rollout) in request.traces.iter().zip(&request.rollouts) {
        let metrics = PyDict::new(py);
        for (name, value) in &trace.metrics {
            metrics.set_item(name, value)?;
        }
        traces.append((
            rollout.0,
            trace.reward,
            metrics,
            trace.truncated,
            trace.turns,
            &trace.seat,
        ))?;
    }
    let samples = PyList::empty(py);
    for (trace, sample) in &request.samples {
        samples.append(columns(py, *trace, sample)?)?;
    }
    let arguments = (function, environment, request.example.0, traces, samples);
    let answers: Vec<PyBackedBytes> = py
        .import(MODULE)?
        .call_method1("compute", arguments)?
        .extract()?;
    let floats = |bytes: &PyBackedBytes| {
        let values = bytes.chunks_exact(4);
        values
            .map(|value| f32::from_le_bytes([value[0], value[1], value[2], value[3]]))
            .collect()
    };
    Ok(answers.iter().map(floats).collect())
}

/// Trace, token ids (i32), loss mask (u8), log-probabilities (f32), little-endian.
fn columns<'py>(py: Python<'py>, trace: usize, sample: &Sample) -> PyResult<Bound<'py, PyTuple>> {
    let token_ids: Vec<u8> = sample
        .token_ids()
        .iter()
        .flat_map(|token| (*token as i32).to_le_bytes())
        .collect();
    let logprobs: Vec<u8> = sample
        .logprobs()
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    (
        trace,
        PyBytes::new(py, &token_ids),
        PyBytes::new(py, &sample.loss_mask()),
        PyBytes::new(py, &logprobs),
    )
        .into_pyobject(py)
}
