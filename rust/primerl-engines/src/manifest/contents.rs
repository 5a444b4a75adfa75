//! Whether a safetensors file holds the bytes that a manifest describes.

use super::{ManifestError, Tensor};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use xxhash_rust::xxh3::Xxh3;

/// More than a header has.
const LONGEST_HEADER: u64 = 100 << 20;
/// Read and hashed at a time.
const PIECE: usize = 1 << 20;

/// What a file's header says of a tensor. `__metadata__` has no offsets.
#[derive(Deserialize)]
struct Entry {
    /// Behind the header, bytes.
    data_offsets: Option<(u64, u64)>,
}

pub(super) fn verify<'a>(
    path: &Path,
    tensors: impl Iterator<Item = &'a Tensor>,
) -> Result<(), ManifestError> {
    let unreadable = |source| unreadable(path, source);
    let mut file = File::open(path).map_err(unreadable)?;
    let (entries, data) = read_header(path, &mut file)?;
    for tensor in tensors {
        let entry = entries.get(&tensor.name);
        let Some((begin, end)) = entry.and_then(|entry| entry.data_offsets) else {
            return Err(malformed(path, format!("it has no tensor {}", tensor.name)));
        };
        let size = end.saturating_sub(begin);
        let found = hash(&mut file, data + begin, size).map_err(unreadable)?;
        if found != tensor.xxh3 {
            return Err(ManifestError::Tensor {
                file: path.to_owned(),
                tensor: tensor.name.clone(),
                found,
                expected: tensor.xxh3.clone(),
            });
        }
    }
    Ok(())
}

/// The entries by tensor, and where the data begins.
fn read_header(
    path: &Path,
    file: &mut File,
) -> Result<(BTreeMap<String, Entry>, u64), ManifestError> {
    let unreadable = |source| unreadable(path, source);
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(unreadable)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER {
        return Err(malformed(path, format!("a header of {length} bytes")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(unreadable)?;
    let entries =
        serde_json::from_slice(&header).map_err(|error| malformed(path, error.to_string()))?;
    Ok((entries, 8 + length))
}

fn unreadable(path: &Path, source: io::Error) -> ManifestError {
    ManifestError::Read {
        path: path.to_owned(),
        source,
    }
}

fn malformed(path: &Path, problem: String) -> ManifestError {
    ManifestError::File {
        file: path.to_owned(),
        problem,
    }
}

fn hash(file: &mut File, start: u64, bytes: u64) -> io::Result<String> {
    file.seek(SeekFrom::Start(start))?;
    let (mut hasher, mut left) = (Xxh3::new(), bytes);
    let mut piece = vec![0; PIECE];
    while left > 0 {
        let part = &mut piece[..left.min(PIECE as u64) as usize];
        file.read_exact(part)?;
        hasher.update(part);
        left -= part.len() as u64;
    }
    Ok(format!("{:016x}", hasher.digest()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{digest, verify};
    use primerl_core::PolicyVersion;
    use serde_json::json;
    use std::fs;
    use std::path::PathBuf;
    use xxhash_rust::xxh3::xxh3_64;

    /// Weights of version 2: two tensors in one file.
    fn published() -> (tempfile::TempDir, PathBuf) {
        let place = tempfile::tempdir().expect("a temporary folder");
        let data = [vec![1_u8; 8], vec![2; PIECE + 4]];
        let header = json!({
            "__metadata__": {"format": "pt"},
            "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "b": {"dtype": "F32", "shape": [(PIECE + 4) / 4], "data_offsets": [8, 8 + PIECE + 4]},
        })
        .to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        data.iter().for_each(|data| bytes.extend(data));
        fs::write(place.path().join("model.safetensors"), &bytes).expect("writes");
        let shapes = [vec![2], vec![(PIECE as u64 + 4) / 4]];
        let named = ["a", "b"].iter().zip(&data).zip(shapes);
        let tensors: Vec<Tensor> = named
            .map(|((name, data), shape)| Tensor {
                name: (*name).to_owned(),
                dtype: "F32".into(),
                shape,
                xxh3: format!("{:016x}", xxh3_64(data)),
                file: "model.safetensors".into(),
            })
            .collect();
        let entries = tensors.iter().map(|tensor| {
            json!({"name": tensor.name, "dtype": "F32", "shape": tensor.shape, "xxh3": tensor.xxh3, "file": tensor.file})
        });
        let manifest = json!({
            "format": 1, "policy_version": 2, "digest": digest(&tensors),
            "files": [{"name": "model.safetensors", "bytes": bytes.len()}],
            "tensors": entries.collect::<Vec<_>>(),
        });
        let path = place.path().join("manifest.json");
        fs::write(&path, manifest.to_string()).expect("writes");
        (place, path)
    }

    #[test]
    fn a_bit_that_flipped_is_named_with_its_tensor() {
        let (place, manifest) = published();
        verify(&manifest, PolicyVersion(2)).expect("is whole");
        let file = place.path().join("model.safetensors");
        let whole = fs::read(&file).expect("reads");
        let (first, last) = (whole.len() - PIECE - 12, whole.len() - 1);
        for (place, tensor) in [(first, "a"), (last, "b")] {
            let mut damaged = whole.clone();
            damaged[place] ^= 1;
            fs::write(&file, damaged).expect("writes");
            let error = verify(&manifest, PolicyVersion(2)).expect_err("is damaged");
            let text = error.to_string();
            assert!(
                text.contains(&format!("the bytes of {tensor} have")),
                "{text}"
            );
        }
        let mut damaged = whole.clone();
        damaged[7] = 1;
        fs::write(&file, damaged).expect("writes");
        let error = verify(&manifest, PolicyVersion(2)).expect_err("has no such header");
        assert!(error.to_string().contains("a header of"), "{error}");
        fs::write(&file, whole).expect("writes");
        fs::write(&manifest, b"").expect("writes");
        let error = verify(&manifest, PolicyVersion(2)).expect_err("is empty");
        assert!(error.to_string().contains("is not a manifest"), "{error}");
    }
}
