//! Python bindings of primerl. This crate is a list: every class and function is a thin conversion of something that lives in a Rust crate.
use pyo3::prelude::*;

#[pymodule]
mod _core {
    use super::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
