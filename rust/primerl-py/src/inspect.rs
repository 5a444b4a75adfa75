//! Reading a run's journal: conversions of `primerl_record::inspect`.

use crate::errors::{PrimerlError, with_causes};
use crate::interrupt::interruptible;
use primerl_core::{ExampleIndex, GroupId, RolloutId, Step};
use primerl_record::inspect::{self, InspectError, MeasuredRollout, Question};
use primerl_record::page::curves::Curves;
use primerl_record::page::health;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::path::PathBuf;

fn question(what: &str, number: Option<u64>) -> PyResult<Question> {
    let question = match (what, number) {
        ("summary", None) => Question::Summary,
        ("idle", None) => Question::Idle,
        ("dropped", None) => Question::Dropped,
        ("evaluated", None) => Question::Evaluated,
        ("check", None) => Question::Check,
        ("rollout", Some(number)) => Question::Rollout(RolloutId(number)),
        ("group", Some(number)) => Question::Group(GroupId(number)),
        ("step", Some(number)) => Question::Step(Step(number)),
        _ => {
            return Err(PyValueError::new_err(format!(
                "what = {what:?}: one of summary, idle, dropped, evaluated, check, or rollout, group, step with a number"
            )));
        }
    };
    Ok(question)
}

fn convert<'py>(
    py: Python<'py>,
    answer: Result<serde_json::Value, InspectError>,
) -> PyResult<Bound<'py, PyAny>> {
    let answer = answer.map_err(|error| PrimerlError::new_err(with_causes(&error)))?;
    pythonize::pythonize(py, &answer).map_err(|error| PrimerlError::new_err(error.to_string()))
}

/// What the journal in an output folder contains; writes nothing.
#[pyfunction]
#[pyo3(signature = (output_dir, what = "summary", number = None))]
pub fn inspect_run<'py>(
    py: Python<'py>,
    output_dir: PathBuf,
    what: &str,
    number: Option<u64>,
) -> PyResult<Bound<'py, PyAny>> {
    let question = question(what, number)?;
    let answer = interruptible(py, move || inspect::answer(&output_dir, question))?;
    convert(py, answer)
}

/// What rules find wrong with a run, by its metrics; writes nothing.
#[pyfunction]
pub fn run_health(py: Python<'_>, output_dir: PathBuf) -> PyResult<Bound<'_, PyAny>> {
    let found = interruptible(py, move || {
        let mut curves = Curves::new(&output_dir);
        curves.refresh().map(|()| health::findings(&curves))
    })?;
    let found = found.map_err(|error| PrimerlError::new_err(error.to_string()))?;
    pythonize::pythonize(py, &found).map_err(|error| PrimerlError::new_err(error.to_string()))
}

/// Rollouts that evaluations counted, each converted on access: its tokens need ten times the memory in Python.
#[pyclass]
pub struct EvaluatedRollouts {
    rollouts: std::vec::IntoIter<MeasuredRollout>,
}

#[pymethods]
impl EvaluatedRollouts {
    fn __iter__(this: PyRef<'_, Self>) -> PyRef<'_, Self> {
        this
    }

    fn __next__<'py>(&mut self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let convert = |rollout| pythonize::pythonize(py, &rollout);
        let converted = self.rollouts.next().map(convert).transpose();
        converted.map_err(|error| PrimerlError::new_err(error.to_string()))
    }
}

/// The results of the evaluations of the run in an output folder, rollout by rollout.
#[pyfunction]
pub fn evaluated_rollouts(py: Python<'_>, output_dir: PathBuf) -> PyResult<EvaluatedRollouts> {
    let found = interruptible(py, move || inspect::evaluated(&output_dir))?;
    let found = found.map_err(|error| PrimerlError::new_err(with_causes(&error)))?;
    Ok(EvaluatedRollouts {
        rollouts: found.rollouts.into_iter(),
    })
}

/// The difficulty buffer of a run, and the history of one example of it.
#[pyfunction]
#[pyo3(signature = (output_dir, environment = None, example = None))]
pub fn inspect_buffer<'py>(
    py: Python<'py>,
    output_dir: PathBuf,
    environment: Option<String>,
    example: Option<u32>,
) -> PyResult<Bound<'py, PyAny>> {
    let asked = match (environment, example) {
        (None, None) => None,
        (Some(environment), Some(example)) => Some((environment, ExampleIndex(example))),
        _ => {
            return Err(PyValueError::new_err(
                "environment and example belong together: give both, or none",
            ));
        }
    };
    let answer = interruptible(py, move || {
        let asked = asked.as_ref();
        let asked = asked.map(|(environment, example)| (environment.as_str(), *example));
        inspect::answer_buffer(&output_dir, asked)
    })?;
    convert(py, answer)
}

/// The samples of some steps, and the tokens of a share of them.
#[pyfunction]
#[pyo3(signature = (output_dir, steps, share = 1.0))]
pub fn inspect_samples<'py>(
    py: Python<'py>,
    output_dir: PathBuf,
    steps: Vec<u64>,
    share: f64,
) -> PyResult<Bound<'py, PyAny>> {
    let steps: Vec<Step> = steps.into_iter().map(Step).collect();
    let answer = interruptible(py, move || {
        inspect::answer_samples(&output_dir, &steps, share)
    })?;
    convert(py, answer)
}
