//! A published checkpoint: read whole and checked against its manifest before any model sees it.
//!
//! The folder holds `manifest.json` and safetensors files; the format is in `docs/architecture.md`, *Weights*.
//! Hashes: XXH3-64 of each tensor's bytes, XXH3-128 of the sorted list of tensors (Collet, xxHash 0.8).

use crate::model_info::{Loadable, TensorSpec};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    #[error("cannot read {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path} is not a manifest of format 1: {reason}")]
    Manifest { path: PathBuf, reason: String },
    #[error("{path} is not a whole safetensors file: {reason}")]
    File { path: PathBuf, reason: String },
    #[error("checkpoint mismatch in {count} tensors, e.g. {examples:?}: {reason}")]
    Mismatch {
        count: usize,
        examples: Vec<String>,
        reason: &'static str,
    },
    #[error("digest of the tensors is {found}, the manifest says {expected}")]
    Digest { expected: String, found: String },
}

#[derive(Debug, Deserialize)]
struct Manifest {
    format: u32,
    policy_version: u64,
    digest: String,
    files: Vec<ManifestFile>,
    tensors: Vec<ManifestTensor>,
}

#[derive(Debug, Deserialize)]
struct ManifestFile {
    name: String,
    bytes: u64,
}

#[derive(Debug, Deserialize)]
struct ManifestTensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    file: String,
    xxh3: String,
}

#[derive(Debug)]
pub struct Tensor {
    pub spec: TensorSpec,
    file: usize,
    range: Range<usize>,
}

impl Tensor {
    fn hash(&self, files: &[Vec<u8>]) -> u64 {
        xxh3_64(&files[self.file][self.range.clone()])
    }
}

/// All tensors of a checkpoint in memory; their hashes were right.
#[derive(Debug)]
pub struct Checkpoint {
    pub policy_version: u64,
    pub digest: String,
    pub tensors: Vec<Tensor>,
    files: Vec<Vec<u8>>,
}

impl Checkpoint {
    /// Reads `folder` and checks names, shapes, dtypes, sizes and every hash; `expected` is what the
    /// model can load.
    pub fn read(folder: &Path, expected: Option<&Loadable>) -> Result<Self, CheckpointError> {
        let manifest = read_manifest(folder)?;
        let mut files = Vec::with_capacity(manifest.files.len());
        let mut found: HashMap<String, Tensor> = HashMap::new();
        for (index, file) in manifest.files.iter().enumerate() {
            files.push(read_tensors(folder, file, index, &mut found)?);
        }
        let tensors = match_manifest(&manifest, found, &files)?;
        if let Some(expected) = expected {
            match_expected(&tensors, expected)?;
        }
        check_digest(&manifest, &tensors, &files)?;
        Ok(Checkpoint {
            policy_version: manifest.policy_version,
            digest: manifest.digest,
            tensors,
            files,
        })
    }

    /// Raw little-endian bytes of a tensor.
    pub fn bytes(&self, tensor: &Tensor) -> &[u8] {
        &self.files[tensor.file][tensor.range.clone()]
    }
}

/// XXH3-128 of one line `"{name} {dtype} {shape joined by x} {xxh3}\n"` per tensor, sorted by name; 32 hex digits.
pub fn digest<'a>(tensors: impl Iterator<Item = (&'a TensorSpec, u64)>) -> String {
    let mut lines: Vec<(&str, String)> = tensors
        .map(|(spec, hash)| {
            let shape: Vec<String> = spec.shape.iter().map(u64::to_string).collect();
            (
                spec.name.as_str(),
                format!(
                    "{} {} {} {hash:016x}\n",
                    spec.name,
                    spec.dtype,
                    shape.join("x")
                ),
            )
        })
        .collect();
    lines.sort();
    let text: String = lines.into_iter().map(|(_, line)| line).collect();
    format!("{:032x}", xxh3_128(text.as_bytes()))
}

fn read_file(path: &Path) -> Result<Vec<u8>, CheckpointError> {
    std::fs::read(path).map_err(|source| CheckpointError::Read {
        path: path.into(),
        source,
    })
}

fn read_manifest(folder: &Path) -> Result<Manifest, CheckpointError> {
    let path = folder.join("manifest.json");
    let content = read_file(&path)?;
    let refuse = |reason: String| CheckpointError::Manifest {
        path: path.clone(),
        reason,
    };
    let manifest: Manifest =
        serde_json::from_slice(&content).map_err(|error| refuse(error.to_string()))?;
    if manifest.format != 1 {
        return Err(refuse(format!("format is {}", manifest.format)));
    }
    // Names are joined to the folder: one with a separator could read any file of this machine.
    if let Some(file) = manifest
        .files
        .iter()
        .find(|f| f.name.contains(['/', '\\']) || f.name.starts_with('.'))
    {
        return Err(refuse(format!(
            "file name {:?} is not a plain name",
            file.name
        )));
    }
    Ok(manifest)
}

#[derive(Deserialize)]
struct HeaderTensor {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (usize, usize),
}

/// Adds a file's tensors to `found`, and returns its content; `index` is its place in the manifest.
fn read_tensors(
    folder: &Path,
    file: &ManifestFile,
    index: usize,
    found: &mut HashMap<String, Tensor>,
) -> Result<Vec<u8>, CheckpointError> {
    let path = folder.join(&file.name);
    let content = read_file(&path)?;
    let (bytes, expected) = (content.len(), file.bytes);
    if bytes as u64 != expected {
        let reason = format!("it has {bytes} bytes, the manifest says {expected}");
        return Err(CheckpointError::File { path, reason });
    }
    for (spec, range) in read_header(&path, &content)? {
        let (name, file) = (spec.name.clone(), index);
        found.insert(name, Tensor { spec, file, range });
    }
    Ok(content)
}

/// The header of a safetensors file: 8 bytes of little-endian length, JSON, then the data it points into.
fn read_header(
    path: &Path,
    content: &[u8],
) -> Result<Vec<(TensorSpec, Range<usize>)>, CheckpointError> {
    let refuse = |reason: String| CheckpointError::File {
        path: path.into(),
        reason,
    };
    let (header, data) = split_header(content).map_err(refuse)?;
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_slice(header).map_err(|error| refuse(format!("header: {error}")))?;
    let data_start = content.len() - data.len();
    let tensors = header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__")
        .map(|(name, value)| {
            let (spec, range) = tensor_at(name, value, data.len()).map_err(refuse)?;
            Ok((spec, data_start + range.start..data_start + range.end))
        });
    tensors.collect()
}

/// The header's JSON, and the data behind it.
fn split_header(content: &[u8]) -> Result<(&[u8], &[u8]), String> {
    let (length, rest) = content
        .split_first_chunk::<8>()
        .ok_or("shorter than 8 bytes")?;
    usize::try_from(u64::from_le_bytes(*length))
        .ok()
        .and_then(|length| rest.split_at_checked(length))
        .ok_or_else(|| "the header is longer than the file".to_owned())
}

/// One entry of the header; the range is within the file's data, which has so many bytes.
fn tensor_at(
    name: String,
    entry: serde_json::Value,
    data: usize,
) -> Result<(TensorSpec, Range<usize>), String> {
    let HeaderTensor {
        dtype,
        shape,
        data_offsets: (start, end),
    } = serde_json::from_value(entry).map_err(|error| format!("header of {name}: {error}"))?;
    let mut sizes = shape.iter();
    let size = sizes.try_fold(dtype_size(&dtype).unwrap_or(0), |size, &n| {
        size.checked_mul(n)
    });
    let fits = start <= end && end <= data;
    if !fits || size != Some((end - start) as u64) {
        return Err(format!(
            "{name} has no {dtype} data of shape {shape:?} at its offsets"
        ));
    }
    Ok((TensorSpec { name, dtype, shape }, start..end))
}

/// Bytes of one element.
fn dtype_size(dtype: &str) -> Option<u64> {
    match dtype {
        "F64" | "I64" | "U64" => Some(8),
        "F32" | "I32" | "U32" => Some(4),
        "F16" | "BF16" | "I16" | "U16" => Some(2),
        "BOOL" | "U8" | "I8" | "F8_E4M3" | "F8_E5M2" => Some(1),
        _ => None,
    }
}

fn mismatch(names: BTreeSet<String>, reason: &'static str) -> Result<(), CheckpointError> {
    if names.is_empty() {
        return Ok(());
    }
    let count = names.len();
    Err(CheckpointError::Mismatch {
        count,
        examples: names.into_iter().take(3).collect(),
        reason,
    })
}

fn check_digest(
    manifest: &Manifest,
    tensors: &[Tensor],
    files: &[Vec<u8>],
) -> Result<(), CheckpointError> {
    let hashed = tensors
        .iter()
        .map(|tensor| (&tensor.spec, tensor.hash(files)));
    let (expected, found) = (&manifest.digest, digest(hashed));
    if found == *expected {
        return Ok(());
    }
    let expected = expected.clone();
    Err(CheckpointError::Digest { expected, found })
}

/// Every tensor of the manifest is in its file as described, and no other is.
fn match_manifest(
    manifest: &Manifest,
    mut found: HashMap<String, Tensor>,
    files: &[Vec<u8>],
) -> Result<Vec<Tensor>, CheckpointError> {
    let mut tensors = Vec::with_capacity(manifest.tensors.len());
    let (mut bad_shape, mut bad_hash) = (BTreeSet::new(), BTreeSet::new());
    for described in &manifest.tensors {
        let name = &described.name;
        let Some(tensor) = found.remove(name) else {
            bad_shape.insert(name.clone());
            continue;
        };
        let in_file = manifest.files[tensor.file].name == described.file;
        if !in_file || tensor.spec.dtype != described.dtype || tensor.spec.shape != described.shape
        {
            bad_shape.insert(name.clone());
        } else if format!("{:016x}", tensor.hash(files)) != described.xxh3 {
            bad_hash.insert(name.clone());
        }
        tensors.push(tensor);
    }
    mismatch(
        bad_shape,
        "the manifest describes tensors that its files do not hold",
    )?;
    mismatch(bad_hash, "the xxh3 of their bytes is not the manifest's")?;
    mismatch(
        found.into_keys().collect(),
        "the files hold tensors that the manifest does not list",
    )?;
    Ok(tensors)
}

fn match_expected(tensors: &[Tensor], expected: &Loadable) -> Result<(), CheckpointError> {
    let found: BTreeMap<&str, &[u64]> = tensors
        .iter()
        .map(|tensor| (tensor.spec.name.as_str(), tensor.spec.shape.as_slice()))
        .collect();
    let wanted: BTreeMap<&str, &[u64]> = expected
        .tensors
        .iter()
        .map(|(name, shape)| (name.as_str(), shape.as_slice()))
        .collect();
    let names: BTreeSet<&str> = found.keys().chain(wanted.keys()).copied().collect();
    let other = names
        .into_iter()
        .filter(|name| found.get(name) != wanted.get(name))
        .map(str::to_owned);
    mismatch(
        other.collect(),
        "names and shapes must equal those of the model that is served",
    )?;
    let dtypes = tensors
        .iter()
        .filter(|tensor| !expected.dtypes.contains(&tensor.spec.dtype));
    mismatch(
        dtypes.map(|tensor| tensor.spec.name.clone()).collect(),
        "the model cannot load their dtype",
    )
}

#[cfg(test)]
#[path = "checkpoint_tests.rs"]
mod tests;
