//! The columns of a step, as `forward` gets them.

use primerl_engine_server::batch::{Batch, BatchSequence, Sample};
use primerl_engine_server::grammar::Allowed;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyDict};

fn int64<'py>(py: Python<'py>, values: impl Iterator<Item = i64>) -> Bound<'py, PyByteArray> {
    PyByteArray::new(py, &values.flat_map(i64::to_le_bytes).collect::<Vec<u8>>())
}

fn float32<'py>(py: Python<'py>, values: impl Iterator<Item = f32>) -> Bound<'py, PyByteArray> {
    PyByteArray::new(py, &values.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())
}

/// The keyword arguments of `forward`; its docstring explains them.
pub(super) fn columns<'py>(
    py: Python<'py>,
    batch: &Batch,
    max_len: u64,
) -> PyResult<Bound<'py, PyDict>> {
    let columns = PyDict::new(py);
    let ids = batch.token_ids.iter().map(|&id| i64::from(id));
    columns.set_item(intern!(py, "token_ids"), int64(py, ids))?;
    let positions = batch.positions.iter().map(|&position| i64::from(position));
    columns.set_item(intern!(py, "positions"), int64(py, positions))?;
    let rows = cache_rows(batch, max_len as i64);
    columns.set_item(intern!(py, "cache_rows"), int64(py, rows))?;
    let segments = batch.segments.iter();
    let segments = segments.map(|s| (s.first, s.count, s.query_len, s.context_len));
    columns.set_item(intern!(py, "segments"), segments.collect::<Vec<_>>())?;
    sequence_columns(py, batch, &columns)?;
    sampling_columns(py, batch, &columns)?;
    prompt_columns(py, batch, &columns)?;
    Ok(columns)
}

/// Where each token's keys and values are in the cache.
fn cache_rows(batch: &Batch, max_len: i64) -> impl Iterator<Item = i64> {
    let slots = batch
        .sequences
        .iter()
        .flat_map(|part| std::iter::repeat_n(part.slot, part.query_len as usize));
    slots
        .zip(&batch.positions)
        .map(move |(slot, &position)| i64::from(slot) * max_len + i64::from(position))
}

fn sequence_columns(py: Python<'_>, batch: &Batch, columns: &Bound<'_, PyDict>) -> PyResult<()> {
    let of_sequences = |value: fn(&BatchSequence) -> u32| {
        let parts = batch.sequences.iter();
        int64(py, parts.map(move |part| i64::from(value(part))))
    };
    columns.set_item(intern!(py, "slots"), of_sequences(|part| part.slot))?;
    columns.set_item(
        intern!(py, "query_lens"),
        of_sequences(|part| part.query_len),
    )?;
    columns.set_item(
        intern!(py, "context_lens"),
        of_sequences(|part| part.context_len),
    )
}

fn sampling_columns(py: Python<'_>, batch: &Batch, columns: &Bound<'_, PyDict>) -> PyResult<()> {
    let (rows, samples) = sampled_rows(batch);
    let any = !samples.is_empty();
    columns.set_item(
        intern!(py, "sample_rows"),
        any.then(|| int64(py, rows.into_iter())),
    )?;
    let uniforms = samples
        .iter()
        .flat_map(|sample| sample.uniform.to_le_bytes());
    columns.set_item(
        intern!(py, "uniforms"),
        any.then(|| PyByteArray::new(py, &uniforms.collect::<Vec<u8>>())),
    )?;
    setting_columns(py, &samples, columns)?;
    token_columns(py, &samples, columns)?;
    let top = samples.iter().map(|sample| sample.top).max();
    columns.set_item(intern!(py, "top"), top.unwrap_or_default())
}

/// The rows of the batch from which a token is sampled, and how.
fn sampled_rows(batch: &Batch) -> (Vec<i64>, Vec<&Sample>) {
    let (mut rows, mut samples) = (Vec::new(), Vec::new());
    let mut end = 0;
    for part in &batch.sequences {
        end += i64::from(part.query_len);
        if let Some(sample) = &part.sample {
            rows.push(end - 1);
            samples.push(sample);
        }
    }
    (rows, samples)
}

/// A setting that no row uses is not sent, so that the model can skip it.
fn setting_columns(
    py: Python<'_>,
    samples: &[&Sample],
    columns: &Bound<'_, PyDict>,
) -> PyResult<()> {
    let setting = |neutral: f32, value: fn(&Sample) -> f32| {
        let used = samples.iter().any(|sample| value(sample) != neutral);
        used.then(|| float32(py, samples.iter().map(move |sample| value(sample))))
    };
    columns.set_item(
        intern!(py, "temperatures"),
        setting(1.0, |sample| sample.temperature),
    )?;
    columns.set_item(intern!(py, "top_p"), setting(1.0, |sample| sample.top_p))?;
    columns.set_item(intern!(py, "min_p"), setting(0.0, |sample| sample.min_p))?;
    let uses_top_k = samples.iter().any(|sample| sample.top_k != 0);
    let top_k = uses_top_k.then(|| int64(py, samples.iter().map(|sample| i64::from(sample.top_k))));
    columns.set_item(intern!(py, "top_k"), top_k)
}

/// Tokens that rows must not have, and those that rows with a grammar may have.
fn token_columns(py: Python<'_>, samples: &[&Sample], columns: &Bound<'_, PyDict>) -> PyResult<()> {
    let banned: Vec<(i64, i64)> = (0..)
        .zip(samples)
        .flat_map(|(row, sample)| sample.banned.iter().map(move |&id| (row, i64::from(id))))
        .collect();
    let banned = (!banned.is_empty()).then(|| {
        (
            int64(py, banned.iter().map(|&(row, _)| row)),
            int64(py, banned.iter().map(|&(_, id)| id)),
        )
    });
    columns.set_item(intern!(py, "banned"), banned)?;
    let allowed: Vec<(i64, Allowed)> = (0..)
        .zip(samples)
        .filter_map(|(row, sample)| Some((row, sample.allowed.clone()?)))
        .collect();
    let allowed = (!allowed.is_empty()).then_some(AllowedTokens(allowed));
    columns.set_item(intern!(py, "allowed"), allowed)
}

/// The tokens that the rows with a grammar may have. Called when the logits are ready: the masks were computed
/// meanwhile.
#[pyclass(frozen, module = "primerl._core")]
struct AllowedTokens(Vec<(i64, Allowed)>);

#[pymethods]
impl AllowedTokens {
    /// Rows, and the masks of those rows one after another. A row without a mask is omitted: the engine discards what
    /// is sampled there.
    fn __call__<'py>(&self, py: Python<'py>) -> (Bound<'py, PyByteArray>, Bound<'py, PyByteArray>) {
        let mut rows = Vec::new();
        let mut words: Vec<u8> = Vec::new();
        py.detach(|| {
            for (row, allowed) in &self.0 {
                if let Ok(mask) = allowed.wait() {
                    rows.push(*row);
                    words.extend(mask.iter().flat_map(|word| word.to_le_bytes()));
                }
            }
        });
        (int64(py, rows.into_iter()), PyByteArray::new(py, &words))
    }
}

fn prompt_columns(py: Python<'_>, batch: &Batch, columns: &Bound<'_, PyDict>) -> PyResult<()> {
    let (mut rows, mut ids, mut top, mut start) = (Vec::new(), Vec::new(), 0, 0);
    for part in &batch.sequences {
        if let Some(targets) = &part.prompt_targets {
            let first = start + i64::from(targets.first_row);
            rows.extend(first..first + targets.targets.len() as i64);
            ids.extend(targets.targets.iter().map(|&id| i64::from(id)));
            top = top.max(targets.top);
        }
        start += i64::from(part.query_len);
    }
    let any = !rows.is_empty();
    columns.set_item(
        intern!(py, "prompt_rows"),
        any.then(|| int64(py, rows.into_iter())),
    )?;
    columns.set_item(
        intern!(py, "prompt_targets"),
        any.then(|| int64(py, ids.into_iter())),
    )?;
    columns.set_item(intern!(py, "prompt_top"), top)
}
