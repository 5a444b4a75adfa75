//! Python bindings of primerl. This crate is a list: every class and function is a thin conversion of something that
//! lives in a Rust crate.
mod advantages;
mod clients;
mod engine;
mod envs;
mod errors;
mod grammar;
mod inspect;
mod interrupt;
mod json;
mod orchestrator;
mod page;
mod render;
mod simulate;

use pyo3::prelude::*;
use pyo3::types::PyTuple;

// As in the native orchestrator; Python's own allocations are not touched.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[pymodule]
mod _core {
    use super::*;

    #[pymodule_export]
    use clients::ask_models;

    #[pymodule_export]
    use engine::{EngineError, InferenceEngine};

    #[pymodule_export]
    use envs::{
        Answered, Cancelled, Ended, EnvClient, Lease, Leased, LeasesVoid, Problem, Registered,
    };

    #[pymodule_export]
    use grammar::GrammarMasks;

    #[pymodule_export]
    use inspect::{
        EvaluatedRollouts, evaluated_rollouts, inspect_buffer, inspect_run, inspect_samples,
        run_health,
    };

    #[pymodule_export]
    use orchestrator::{Orchestrator, check_config, orchestrate};

    #[pymodule_export]
    use page::{PageServer, RunCurves, page_files};

    #[pymodule_export]
    use render::{AnswerStream, ParsedAnswer, Renderer, check_parser};

    #[pymodule_export]
    use simulate::simulate;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        errors::register(module)?;
        let names = |names| PyTuple::new(module.py(), names);
        let parsers: Vec<_> = primerl_render::tool_parsers().collect();
        module.add("TOOL_PARSERS", names(parsers)?)?;
        let parsers: Vec<_> = primerl_render::reasoning_parsers().collect();
        module.add("REASONING_PARSERS", names(parsers)?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
