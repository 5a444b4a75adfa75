//! Python bindings of primerl. This crate is a list: every class and function is a thin conversion of something that lives in a Rust crate.
mod envs;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use envs::{Answered, Cancelled, Ended, EnvClient, Lease, Leased, LeasesVoid, Problem, Registered};

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
