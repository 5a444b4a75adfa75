use super::*;
use serde_json::json;
use tempfile::TempDir;

/// A checkpoint of two F32 tensors, and its manifest as JSON for a test to spoil.
fn checkpoint() -> (TempDir, serde_json::Value) {
    let folder = TempDir::new().unwrap();
    let a: Vec<u8> = [1.0f32, 2.0, 3.0, 4.0]
        .iter()
        .flat_map(|x| x.to_le_bytes())
        .collect();
    let b: Vec<u8> = [5.0f32, 6.0].iter().flat_map(|x| x.to_le_bytes()).collect();
    let header = json!({
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]},
    })
    .to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(&a);
    file.extend(&b);
    std::fs::write(folder.path().join("model.safetensors"), &file).unwrap();
    let (hash_a, hash_b) = (
        format!("{:016x}", xxh3_64(&a)),
        format!("{:016x}", xxh3_64(&b)),
    );
    let text = format!("a F32 2x2 {hash_a}\nb F32 2 {hash_b}\n");
    let manifest = json!({
        "format": 1,
        "policy_version": 3,
        "digest": format!("{:032x}", xxh3_128(text.as_bytes())),
        "files": [{"name": "model.safetensors", "bytes": file.len()}],
        "tensors": [
            {"name": "b", "dtype": "F32", "shape": [2], "file": "model.safetensors", "xxh3": hash_b},
            {"name": "a", "dtype": "F32", "shape": [2, 2], "file": "model.safetensors", "xxh3": hash_a},
        ],
    });
    write_manifest(&folder, &manifest);
    (folder, manifest)
}

fn write_manifest(folder: &TempDir, manifest: &serde_json::Value) {
    std::fs::write(folder.path().join("manifest.json"), manifest.to_string()).unwrap();
}

fn loadable(checkpoint: &Checkpoint) -> Loadable {
    let tensors = checkpoint
        .tensors
        .iter()
        .map(|tensor| (tensor.spec.name.clone(), tensor.spec.shape.clone()));
    Loadable {
        tensors: tensors.collect(),
        dtypes: vec!["F32".into()],
    }
}

#[test]
fn a_good_checkpoint_is_read() {
    let (folder, _) = checkpoint();
    let read = Checkpoint::read(folder.path(), None).unwrap();
    assert_eq!(read.policy_version, 3);
    let b = read
        .tensors
        .iter()
        .find(|tensor| tensor.spec.name == "b")
        .unwrap();
    assert_eq!(
        read.bytes(b),
        [5.0f32.to_le_bytes(), 6.0f32.to_le_bytes()].concat()
    );
    Checkpoint::read(folder.path(), Some(&loadable(&read))).unwrap();
}

#[test]
fn every_spoiled_field_is_noticed() {
    let spoil: [(&str, serde_json::Value, &str); 9] = [
        ("/format", json!(2), "format is 2"),
        ("/digest", json!("00"), "digest"),
        ("/files/0/bytes", json!(7), "bytes"),
        ("/files/0/name", json!("../model.safetensors"), "plain name"),
        ("/files/0/name", json!("other.safetensors"), "cannot read"),
        ("/tensors/0/xxh3", json!("0000000000000000"), "xxh3"),
        ("/tensors/0/shape", json!([1, 2]), "do not hold"),
        ("/tensors/0/dtype", json!("BF16"), "do not hold"),
        ("/tensors/0/name", json!("c"), "do not hold"),
    ];
    for (pointer, value, expected) in spoil {
        let (folder, mut manifest) = checkpoint();
        *manifest.pointer_mut(pointer).unwrap() = value;
        write_manifest(&folder, &manifest);
        let error = Checkpoint::read(folder.path(), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{pointer}: {error}");
    }
}

#[test]
fn an_unlisted_tensor_is_noticed() {
    let (folder, mut manifest) = checkpoint();
    manifest["tensors"].as_array_mut().unwrap().pop();
    write_manifest(&folder, &manifest);
    let error = Checkpoint::read(folder.path(), None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("does not list"), "{error}");
}

#[test]
fn a_changed_byte_and_a_cut_file_are_noticed() {
    let (folder, mut manifest) = checkpoint();
    let path = folder.path().join("model.safetensors");
    let mut content = std::fs::read(&path).unwrap();
    *content.last_mut().unwrap() ^= 1;
    std::fs::write(&path, &content).unwrap();
    let error = Checkpoint::read(folder.path(), None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("mismatch in 1 tensors") && error.contains("\"b\""),
        "{error}"
    );
    for keep in [4, 40, content.len() - 1] {
        std::fs::write(&path, &content[..keep]).unwrap();
        manifest["files"][0]["bytes"] = json!(keep);
        write_manifest(&folder, &manifest);
        let error = Checkpoint::read(folder.path(), None)
            .unwrap_err()
            .to_string();
        assert!(error.contains("not a whole safetensors file"), "{error}");
    }
}

#[test]
fn another_model_is_refused() {
    let (folder, _) = checkpoint();
    let fits = loadable(&Checkpoint::read(folder.path(), None).unwrap());
    let mut other_shape = fits.clone();
    other_shape.tensors[0].1 = vec![4];
    let mut one_more = fits.clone();
    one_more.tensors.push(("c".into(), vec![1]));
    let other_dtype = Loadable {
        dtypes: vec!["BF16".into()],
        ..fits
    };
    for (expected, words) in [
        (other_shape, "in 1 tensors"),
        (one_more, "\"c\""),
        (other_dtype, "dtype"),
    ] {
        let error = Checkpoint::read(folder.path(), Some(&expected))
            .unwrap_err()
            .to_string();
        assert!(error.contains(words), "{error}");
    }
}
