//! A Python object as a [`Backend`]: columns cross as bytes in both directions, one call per step.
//!
//! The methods it must have are those of `primerl.inference.torch.step.TorchBackend`.

use primerl_engine_server::backend::TopToken;
use primerl_engine_server::batch::Batch;
use primerl_engine_server::experts::ExpertRows;
use primerl_engine_server::{
    Backend, BackendError, Checkpoint, Loadable, ModelInfo, ScoredToken, StepOutput,
};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyByteArray, PyTuple};
use std::path::{Path, PathBuf};

mod columns;

use columns::columns;

pub struct PythonBackend {
    object: Py<PyAny>,
    info: ModelInfo,
}

#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct PythonInfo {
    vocab_size: u32,
    max_model_len: u32,
    slots: u32,
    eos_token_ids: Vec<u32>,
    tensors: Vec<(String, Vec<u64>)>,
    dtypes: Vec<String>,
}

/// Log-probabilities, ranks, ids and log-probabilities of the most likely tokens, and how many of those a row.
type ScoreColumns = (
    PyBackedBytes,
    PyBackedBytes,
    PyBackedBytes,
    PyBackedBytes,
    usize,
);
type Answer = (Option<(PyBackedBytes, ScoreColumns)>, Option<ScoreColumns>);
/// Experts of all tokens of the batch, `[tokens, layers, chosen]`; layers, chosen, and bytes of an id.
type ExpertColumn = (PyBackedBytes, u16, u16, u8);

impl PythonBackend {
    pub fn new(py: Python<'_>, object: Py<PyAny>) -> PyResult<Self> {
        let info: PythonInfo = object.call_method0(py, "info")?.extract(py)?;
        let info = ModelInfo {
            vocab_size: info.vocab_size,
            max_model_len: info.max_model_len,
            slots: info.slots,
            eos_token_ids: info.eos_token_ids,
            loadable: Some(Loadable {
                tensors: info.tensors,
                dtypes: info.dtypes,
            }),
        };
        Ok(PythonBackend { object, info })
    }
}

impl Backend for PythonBackend {
    fn info(&self) -> &ModelInfo {
        &self.info
    }

    fn forward(&mut self, batch: &Batch) -> Result<StepOutput, BackendError> {
        let answer = Python::attach(|py| {
            let columns = columns(py, batch, u64::from(self.info.max_model_len))?;
            let answer = self
                .object
                .call_method(py, intern!(py, "forward"), (), Some(&columns))?;
            // A mixture that reports its experts answers with them, too.
            let answer = answer.bind(py).cast::<PyTuple>()?;
            let experts = match answer.len() {
                3 => answer.get_item(2)?.extract::<Option<ExpertColumn>>()?,
                _ => None,
            };
            let scored = answer.get_slice(0, 2).extract::<Answer>()?;
            PyResult::Ok((scored, experts))
        });
        let (answer, experts) = answer.map_err(raised)?;
        let mut output = step_output(batch, answer)?;
        output.experts = experts.map(|(ids, layers, chosen, bytes)| ExpertRows {
            layers,
            chosen,
            bytes,
            ids: ids.to_vec(),
        });
        Ok(output)
    }

    fn locate(&mut self, folder: &Path) -> Result<PathBuf, BackendError> {
        Python::attach(|py| {
            self.object
                .call_method1(py, intern!(py, "locate"), (folder,))?
                .extract(py)
        })
        .map_err(|error: PyErr| BackendError::Refused(error.to_string()))
    }

    fn load_weights(&mut self, checkpoint: &Checkpoint) -> Result<(), BackendError> {
        // Everything was validated, so an exception here leaves a model of two versions: the engine must end.
        Python::attach(|py| {
            for tensor in &checkpoint.tensors {
                let data = PyByteArray::new(py, checkpoint.bytes(tensor));
                let arguments = (&tensor.spec.name, &tensor.spec.dtype, data);
                self.object
                    .call_method1(py, intern!(py, "load_tensor"), arguments)?;
            }
            self.object
                .call_method0(py, intern!(py, "weights_changed"))?;
            Ok(())
        })
        .map_err(raised)
    }

    fn digest(&mut self) -> Result<String, BackendError> {
        Python::attach(|py| {
            self.object
                .call_method0(py, intern!(py, "digest"))?
                .extract(py)
        })
        .map_err(raised)
    }
}

/// The traceback goes to the log; clients get the exception's own line.
fn raised(error: PyErr) -> BackendError {
    Python::attach(|py| {
        let traceback = error
            .traceback(py)
            .and_then(|traceback| traceback.format().ok());
        tracing::error!(
            "the model raised {error}\n{}",
            traceback.unwrap_or_default()
        );
        BackendError::Failed(error.to_string())
    })
}

fn step_output(batch: &Batch, (sampled, prompt): Answer) -> Result<StepOutput, BackendError> {
    let mut output = StepOutput::default();
    if let Some((ids, scores)) = sampled {
        let tops = batch
            .sequences
            .iter()
            .filter_map(|part| part.sample.as_ref())
            .map(|sample| sample.top);
        output.sampled = scored(integers(&ids)?.into_iter(), tops, &scores)?;
    }
    if let Some(scores) = prompt {
        let targets = || {
            batch
                .sequences
                .iter()
                .filter_map(|part| part.prompt_targets.as_ref())
        };
        let ids = targets().flat_map(|targets| targets.targets.iter().map(|&id| i64::from(id)));
        let tops =
            targets().flat_map(|targets| std::iter::repeat_n(targets.top, targets.targets.len()));
        output.prompt = scored(ids, tops, &scores)?;
    }
    Ok(output)
}

fn scored(
    ids: impl Iterator<Item = i64>,
    tops: impl Iterator<Item = u32>,
    (logprobs, ranks, top_ids, top_logprobs, width): &ScoreColumns,
) -> Result<Vec<ScoredToken>, BackendError> {
    let (logprobs, ranks) = (floats(logprobs)?, integers(ranks)?);
    let (top_ids, top_logprobs) = (integers(top_ids)?, floats(top_logprobs)?);
    let rows = ids.zip(tops).zip(logprobs.iter().zip(&ranks)).enumerate();
    rows.map(|(row, ((id, top), (&logprob, &rank)))| {
        let first = row * width;
        let wanted = first..first + (*width).min(top as usize);
        let out_of_range = || {
            BackendError::Failed("the model returned fewer top log-probabilities than rows".into())
        };
        let ids = top_ids.get(wanted.clone()).ok_or_else(out_of_range)?;
        let values = top_logprobs.get(wanted).ok_or_else(out_of_range)?;
        let top = (1..)
            .zip(ids.iter().zip(values))
            .map(|(rank, (&id, &logprob))| {
                Ok(TopToken {
                    token_id: token_id(id)?,
                    logprob,
                    rank,
                })
            })
            .collect::<Result<_, BackendError>>()?;
        Ok(ScoredToken {
            token_id: token_id(id)?,
            logprob,
            rank: u32::try_from(rank).unwrap_or(u32::MAX),
            top,
        })
    })
    .collect()
}

fn token_id(id: i64) -> Result<u32, BackendError> {
    u32::try_from(id).map_err(|_| BackendError::Failed(format!("the model returned token id {id}")))
}

fn integers(column: &[u8]) -> Result<Vec<i64>, BackendError> {
    let (values, rest) = column.as_chunks::<8>();
    whole(rest)?;
    Ok(values
        .iter()
        .map(|bytes| i64::from_le_bytes(*bytes))
        .collect())
}

fn floats(column: &[u8]) -> Result<Vec<f32>, BackendError> {
    let (values, rest) = column.as_chunks::<4>();
    whole(rest)?;
    Ok(values
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect())
}

fn whole(rest: &[u8]) -> Result<(), BackendError> {
    if rest.is_empty() {
        return Ok(());
    }
    Err(BackendError::Failed(
        "the model returned a column with a broken value at its end".into(),
    ))
}
