//! Masks of recorded answers for Python: conversions of `primerl_grammar`.

use primerl_grammar::{Spec, Vocabulary, after, replay};
use primerl_render::Tokenizer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::path::PathBuf;

/// The tokens of a model's tokenizer, from which a grammar computes the masks of an answer. Methods release the GIL.
#[pyclass(frozen, module = "primerl._core")]
pub struct GrammarMasks(Vocabulary);

fn refused(error: impl std::fmt::Display) -> PyErr {
    PyValueError::new_err(error.to_string())
}

#[pymethods]
impl GrammarMasks {
    #[new]
    fn new(py: Python<'_>, model: PathBuf, vocabulary_size: u32) -> PyResult<Self> {
        py.detach(|| {
            let tokenizer = Tokenizer::load(&model.join("tokenizer.json")).map_err(refused)?;
            Vocabulary::new(&tokenizer, vocabulary_size)
                .map(GrammarMasks)
                .map_err(refused)
        })
    }

    /// Identifies vocabulary and library: equal ones give equal masks.
    #[getter]
    fn identity(&self) -> &str {
        self.0.identity()
    }

    /// The mask of the token that follows these.
    fn after<'py>(
        &self,
        py: Python<'py>,
        spec: &str,
        token_ids: Vec<u32>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let mask = py.detach(|| {
            let spec: Spec = serde_json::from_str(spec).map_err(refused)?;
            after(&self.0, &spec, &token_ids).map_err(refused)
        })?;
        let bytes: Vec<u8> = mask.iter().flat_map(|word| word.to_le_bytes()).collect();
        Ok(PyBytes::new(py, &bytes))
    }

    /// The different masks of an answer one after another, and the index of each token's mask among them.
    fn replay<'py>(
        &self,
        py: Python<'py>,
        spec: &str,
        token_ids: Vec<u32>,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<u32>)> {
        let (masks, index) = py.detach(|| {
            let spec: Spec = serde_json::from_str(spec).map_err(refused)?;
            let replayed = replay(&self.0, &spec, &token_ids).map_err(refused)?;
            let words = replayed.masks.iter().flat_map(|mask| mask.iter());
            let bytes: Vec<u8> = words.flat_map(|word| word.to_le_bytes()).collect();
            Ok::<_, PyErr>((bytes, replayed.index))
        })?;
        Ok((PyBytes::new(py, &masks), index))
    }
}
