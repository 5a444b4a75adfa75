//! Published weights, checked before any engine is asked to load them.

mod contents;

use primerl_core::PolicyVersion;
use serde::Deserialize;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_128;

const FORMAT: u32 = 1;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManifestError {
    #[error("cannot read {path}: {source}")]
    Read {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path} is not a manifest: {source}")]
    Parse {
        path: PathBuf,
        source: serde_json::Error,
    },
    #[error("{path} has format {format}; this orchestrator reads format {FORMAT}")]
    Format { path: PathBuf, format: u32 },
    #[error("{path} is of version {found}, version {expected} was announced")]
    Version {
        path: PathBuf,
        found: u64,
        expected: PolicyVersion,
    },
    #[error(
        "{path} must be an absolute path: engines and orchestrator have other working folders than the trainer"
    )]
    Relative { path: PathBuf },
    #[error("{path} lists no {what}")]
    Empty { path: PathBuf, what: &'static str },
    #[error("{path} names the file `{name}`, which is not a plain name")]
    Name { path: PathBuf, name: String },
    #[error("{file} has {found} bytes, the manifest says {expected}")]
    Size {
        file: PathBuf,
        found: u64,
        expected: u64,
    },
    #[error("{path} says digest {stated}, its tensors give {computed}")]
    Digest {
        path: PathBuf,
        stated: String,
        computed: String,
    },
    #[error("{file} is not a safetensors file: {problem}")]
    File { file: PathBuf, problem: String },
    #[error(
        "{file} is damaged: the bytes of {tensor} have the hash {found}, the manifest says {expected}"
    )]
    Tensor {
        file: PathBuf,
        tensor: String,
        found: String,
        expected: String,
    },
}

/// The parts of `manifest.json` (see `docs/architecture.md`) that are checked here.
#[derive(Debug, Deserialize)]
struct Manifest {
    format: u32,
    policy_version: u64,
    digest: String,
    files: Vec<ManifestFile>,
    tensors: Vec<Tensor>,
}

#[derive(Debug, Deserialize)]
struct ManifestFile {
    name: String,
    bytes: u64,
}

#[derive(Debug, Deserialize)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    xxh3: String,
    #[serde(default)]
    file: String,
}

/// Check a manifest and its files' sizes; the result is its digest. The process that loads the contents hashes them.
pub fn check(path: &Path, expected: PolicyVersion) -> Result<String, ManifestError> {
    read_whole(path, expected).map(|manifest| manifest.digest)
}

/// Like [`check`], and checks that every tensor has the bytes that the manifest describes. Reads all of the files,
/// which takes as long as the disk needs.
pub fn verify(path: &Path, expected: PolicyVersion) -> Result<(), ManifestError> {
    let manifest = read_whole(path, expected)?;
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    for file in &manifest.files {
        let tensors = manifest
            .tensors
            .iter()
            .filter(|tensor| tensor.file == file.name);
        contents::verify(&folder.join(&file.name), tensors)?;
    }
    Ok(())
}

fn read_whole(path: &Path, expected: PolicyVersion) -> Result<Manifest, ManifestError> {
    let manifest = parse(path)?;
    check_fields(path, &manifest, expected)?;
    let folder = path.parent().unwrap_or_else(|| Path::new("/"));
    for file in &manifest.files {
        check_file(path, folder, file)?;
    }
    let computed = digest(&manifest.tensors);
    if computed != manifest.digest {
        return Err(ManifestError::Digest {
            path: path.to_owned(),
            stated: manifest.digest,
            computed,
        });
    }
    Ok(manifest)
}

fn parse(path: &Path) -> Result<Manifest, ManifestError> {
    let path = path.to_owned();
    if path.is_relative() {
        return Err(ManifestError::Relative { path });
    }
    let bytes = match read_file(&path) {
        Ok(bytes) => bytes,
        Err(source) => return Err(ManifestError::Read { path, source }),
    };
    serde_json::from_slice(&bytes).map_err(|source| ManifestError::Parse { path, source })
}

fn check_fields(
    path: &Path,
    manifest: &Manifest,
    expected: PolicyVersion,
) -> Result<(), ManifestError> {
    let path = path.to_owned();
    let (format, found) = (manifest.format, manifest.policy_version);
    if format != FORMAT {
        return Err(ManifestError::Format { path, format });
    }
    if found != expected.0 {
        return Err(ManifestError::Version {
            path,
            found,
            expected,
        });
    }
    let what = match (&*manifest.files, &*manifest.tensors) {
        ([], _) => "files",
        (_, []) => "tensors",
        _ => return Ok(()),
    };
    Err(ManifestError::Empty { path, what })
}

/// Plain files only: a read of a pipe or a device may never end.
fn read_file(path: &Path) -> std::io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            "it is not a plain file",
        ));
    }
    std::fs::read(path)
}

fn check_file(manifest: &Path, folder: &Path, file: &ManifestFile) -> Result<(), ManifestError> {
    if Path::new(&file.name).file_name() != Some(file.name.as_ref()) {
        return Err(ManifestError::Name {
            path: manifest.to_owned(),
            name: file.name.clone(),
        });
    }
    let path = folder.join(&file.name);
    match std::fs::metadata(&path) {
        Err(source) => Err(ManifestError::Read { path, source }),
        Ok(metadata) if metadata.len() != file.bytes => Err(ManifestError::Size {
            file: path,
            found: metadata.len(),
            expected: file.bytes,
        }),
        Ok(_) => Ok(()),
    }
}

fn digest(tensors: &[Tensor]) -> String {
    let mut tensors: Vec<&Tensor> = tensors.iter().collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let mut text = String::new();
    for Tensor {
        name,
        dtype,
        shape,
        xxh3,
        file: _,
    } in tensors
    {
        let shape: Vec<String> = shape.iter().map(u64::to_string).collect();
        text.push_str(&format!("{name} {dtype} {} {xxh3}\n", shape.join("x")));
    }
    format!("{:032x}", xxh3_128(text.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with a manifest of version 3 for one file of 4 bytes, changed by `edit`.
    fn check_edited(edit: impl FnOnce(&mut serde_json::Value)) -> Result<String, ManifestError> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("model.safetensors"), b"1234").expect("writes");
        let tensors = [
            Tensor {
                name: "b".into(),
                dtype: "F32".into(),
                shape: vec![2, 3],
                xxh3: "00ff00ff00ff00ff".into(),
                file: String::new(),
            },
            Tensor {
                name: "a".into(),
                dtype: "F32".into(),
                shape: vec![],
                xxh3: "0123456789abcdef".into(),
                file: String::new(),
            },
        ];
        let mut manifest = serde_json::json!({
            "format": 1, "policy_version": 3, "digest": digest(&tensors),
            "files": [{"name": "model.safetensors", "bytes": 4}],
            "tensors": [
                {"name": "b", "dtype": "F32", "shape": [2, 3], "file": "model.safetensors", "xxh3": "00ff00ff00ff00ff"},
                {"name": "a", "dtype": "F32", "shape": [], "file": "model.safetensors", "xxh3": "0123456789abcdef"}],
        });
        edit(&mut manifest);
        let path = folder.path().join("manifest.json");
        std::fs::write(&path, manifest.to_string()).expect("writes");
        check(&path, PolicyVersion(3))
    }

    #[test]
    fn a_whole_manifest_gives_its_digest() {
        let expected = xxh3_128(b"a F32  0123456789abcdef\nb F32 2x3 00ff00ff00ff00ff\n");
        assert_eq!(
            check_edited(|_| {}).expect("is whole"),
            format!("{expected:032x}")
        );
    }

    #[test]
    fn what_is_wrong_is_named() {
        let error = |edit: fn(&mut serde_json::Value)| {
            check_edited(edit).expect_err("is refused").to_string()
        };
        assert!(error(|manifest| manifest["policy_version"] = 4.into()).contains("version 4"));
        assert!(
            error(|manifest| manifest["files"][0]["bytes"] = 5.into())
                .contains("4 bytes, the manifest says 5")
        );
        assert!(
            error(|manifest| manifest["files"][0]["name"] = "x".into()).contains("cannot read")
        );
        assert!(
            error(|manifest| manifest["files"][0]["name"] = "../x".into())
                .contains("not a plain name")
        );
        assert!(error(|manifest| manifest["tensors"][0]["xxh3"] = "0".into()).contains("digest"));
        assert!(error(|manifest| manifest["format"] = 2.into()).contains("format 2"));
        assert!(
            error(|manifest| manifest["tensors"] = serde_json::json!([])).contains("no tensors")
        );
    }
    #[test]
    fn only_a_plain_file_is_read() {
        let error = check(Path::new("/dev/zero"), PolicyVersion(3)).expect_err("has no end");
        assert!(error.to_string().contains("not a plain file"));
    }
}
