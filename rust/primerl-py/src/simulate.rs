//! The capacity planner for Python: conversions of `primerl_simulate`.

use crate::errors::PrimerlError;
use crate::interrupt::interruptible;
use primerl_simulate::{Plan, PlanError, Report, WhatIf};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;

/// The result of `simulate`.
#[derive(Serialize)]
struct Simulated {
    report: Report,
    what_if: Vec<WhatIf>,
    /// The report and the changes, as text.
    table: String,
    /// SVG.
    picture: String,
}

/// Plays a plan in virtual time. Releases the GIL meanwhile; Ctrl-C ends it.
#[pyfunction]
#[pyo3(signature = (plan, what_if = true))]
pub fn simulate<'py>(
    py: Python<'py>,
    plan: &Bound<'py, PyDict>,
    what_if: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let plan: Plan = pythonize::depythonize(plan)
        .map_err(|error| PyValueError::new_err(format!("plan: {error}")))?;
    let simulated = interruptible(py, move || run(&plan, what_if))?
        .map_err(|error| PyValueError::new_err(error.to_string()))?;
    let result = pythonize::pythonize(py, &simulated);
    result.map_err(|error| PrimerlError::new_err(error.to_string()))
}

fn run(plan: &Plan, with_what_if: bool) -> Result<Simulated, PlanError> {
    let (report, world) = primerl_simulate::simulate(plan)?;
    let what_if = match with_what_if && report.completed {
        true => primerl_simulate::what_if(plan, &report),
        false => Vec::new(),
    };
    let table = format!(
        "{}{}",
        primerl_simulate::table(&report),
        primerl_simulate::what_if_table(&what_if)
    );
    Ok(Simulated {
        picture: primerl_simulate::picture(&world, &report),
        table,
        what_if,
        report,
    })
}
