//! A trainer that trains nothing: it takes batches and publishes weights.

use super::engine::expected_logprobs;
use super::{PATIENCE, client, persistently};
use reqwest::Client;
use serde::Deserialize;
use serde_bytes::ByteBuf;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

#[derive(Clone, Debug, Deserialize)]
pub struct Batch {
    pub step: u64,
    pub rank: u32,
    pub ranks: u32,
    pub loss_tokens: u64,
    pub metrics: BTreeMap<String, f64>,
    pub micro_batches: Vec<MicroBatch>,
    #[serde(skip)]
    columns: Vec<u8>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct MicroBatch {
    tokens: usize,
    sequence_lengths: Vec<usize>,
    pub rollouts: Vec<u64>,
    #[serde(default)]
    pub truncations: Vec<TruncatedRun>,
    #[serde(default)]
    pub grammars: Grammars,
    #[serde(default)]
    pub extra_columns: Vec<String>,
    pub routed_experts: Option<RoutedExperts>,
}

/// The experts of the tokens in `runs`: first, and the one after the last.
#[derive(Clone, Debug, Deserialize)]
pub struct RoutedExperts {
    layers: usize,
    chosen: usize,
    bytes: usize,
    runs: Vec<(usize, usize)>,
}

impl RoutedExperts {
    fn row(&self) -> usize {
        self.layers * self.chosen * self.bytes
    }

    fn size(&self) -> usize {
        let tokens: usize = self.runs.iter().map(|(begin, end)| end - begin).sum();
        tokens * self.row()
    }
}

/// Different grammars, and the answers they apply to: first token, the token after the last, index of the grammar.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Grammars {
    pub kinds: Vec<Value>,
    pub runs: Vec<(u64, u64, usize)>,
}

/// Tokens of a micro-batch that were sampled in this way.
#[derive(Clone, Debug, Deserialize)]
pub struct TruncatedRun {
    pub begin: u64,
    pub end: u64,
    pub top_p: f32,
    pub top_k: u32,
    pub min_p: f32,
}

#[derive(Deserialize)]
struct Frame {
    header: ByteBuf,
    columns: ByteBuf,
}

fn i32s(bytes: &[u8]) -> Vec<i32> {
    bytes
        .chunks_exact(4)
        .map(|chunk| i32::from_le_bytes(chunk.try_into().unwrap()))
        .collect()
}

/// One trained sequence.
#[derive(Clone, Debug)]
pub struct Sequence {
    pub rollout: u64,
    pub ids: Vec<i32>,
    pub mask: Vec<u8>,
    pub logprobs: Vec<f32>,
    pub versions: Vec<i32>,
    /// Further columns, by name.
    pub extra: BTreeMap<String, Vec<f32>>,
    /// The ids of each token's experts; none where they are not known.
    pub experts: Vec<Vec<u8>>,
}

impl Batch {
    pub fn decode(body: &[u8]) -> Batch {
        let frame: Frame = rmp_serde::from_slice(body).unwrap();
        let mut batch: Batch = rmp_serde::from_slice(&frame.header).unwrap();
        batch.columns = frame.columns.into_vec();
        batch
    }

    pub fn sequences(&self) -> Vec<Sequence> {
        let (mut sequences, mut start) = (Vec::new(), 0);
        for micro_batch in &self.micro_batches {
            sequences.extend(micro_batch.sequences(&self.columns[start..]));
            start += (21 * micro_batch.tokens).next_multiple_of(16);
            let extra = micro_batch.extra_columns.len();
            start += extra * (4 * micro_batch.tokens).next_multiple_of(16);
            let experts = micro_batch.routed_experts.as_ref();
            start += experts.map_or(0, RoutedExperts::size).next_multiple_of(16);
        }
        assert_eq!(start, self.columns.len());
        sequences
    }
}

impl MicroBatch {
    /// `columns`: the required ones first, in the order of `docs/architecture.md`.
    fn sequences(&self, columns: &[u8]) -> Vec<Sequence> {
        let n = self.tokens;
        let words = |column: usize| i32s(&columns[4 * n * column..][..4 * n]);
        let (ids, versions) = (words(0), words(3));
        let logprobs: Vec<f32> = words(1)
            .iter()
            .map(|bits| f32::from_bits(*bits as u32))
            .collect();
        let mask = &columns[20 * n..][..n];
        let mut end = (21 * n).next_multiple_of(16);
        let mut extra: BTreeMap<&str, Vec<f32>> = BTreeMap::new();
        for name in &self.extra_columns {
            let values = i32s(&columns[end..][..4 * n]).into_iter();
            extra.insert(
                name,
                values.map(|bits| f32::from_bits(bits as u32)).collect(),
            );
            end += (4 * n).next_multiple_of(16);
        }
        let mut experts = vec![Vec::new(); n];
        if let Some(known) = &self.routed_experts {
            let mut rows = columns[end..].chunks_exact(known.row());
            for token in known.runs.iter().flat_map(|(begin, end)| *begin..*end) {
                experts[token] = rows.next().unwrap().to_vec();
            }
        }
        let mut start = 0;
        let mut sequences = Vec::new();
        for (length, rollout) in self.sequence_lengths.iter().zip(&self.rollouts) {
            let range = start..start + length;
            start = range.end;
            sequences.push(Sequence {
                rollout: *rollout,
                ids: ids[range.clone()].to_vec(),
                mask: mask[range.clone()].to_vec(),
                logprobs: logprobs[range.clone()].to_vec(),
                versions: versions[range.clone()].to_vec(),
                experts: experts[range.clone()].to_vec(),
                extra: extra
                    .iter()
                    .map(|(name, values)| ((*name).to_owned(), values[range.clone()].to_vec()))
                    .collect(),
            });
        }
        assert_eq!(start, n);
        sequences
    }
}

/// Writes the weights of a version in the format of `docs/architecture.md`; returns the manifest's path.
pub fn write_weights(output: &Path, version: u64) -> String {
    let folder = output.join(format!("broadcasts/step_{version}"));
    std::fs::create_dir_all(&folder).unwrap();
    let values: Vec<u8> = [version as f32, 1.0]
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    let header =
        json!({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, values.len()]}}).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend_from_slice(header.as_bytes());
    file.extend_from_slice(&values);
    std::fs::write(folder.join("model.safetensors"), &file).unwrap();
    let hash = format!("{:016x}", xxh3_64(&values));
    let digest = format!("{:032x}", xxh3_128(format!("w F32 2 {hash}\n").as_bytes()));
    let ids: Vec<i32> = (1..13).collect();
    let logprobs = expected_logprobs(&ids, &[version as i32; 12]);
    let manifest = json!({
        "probe": {"token_ids": ids, "logprobs": logprobs},
        "format": 1, "policy_version": version, "digest": digest,
        "files": [{"name": "model.safetensors", "bytes": file.len()}],
        "tensors": [{"name": "w", "dtype": "F32", "shape": [2], "file": "model.safetensors", "xxh3": hash}],
    });
    let path = folder.join("manifest.json");
    std::fs::write(&path, manifest.to_string()).unwrap();
    path.to_str().unwrap().to_owned()
}

pub async fn publish(url: &str, output: &Path, version: u64) {
    publish_with(&client(), url, output, version).await;
}

/// Report that training continues after `step`.
pub async fn resume(url: &str, step: u64) {
    let (status, body) = post(&client(), url, "/trainer/resume", &json!({"step": step})).await;
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
}

async fn publish_with(http: &Client, url: &str, output: &Path, version: u64) {
    let manifest = write_weights(output, version);
    let (status, body) = post(
        http,
        url,
        "/trainer/weights",
        &json!({"version": version, "manifest": manifest}),
    )
    .await;
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
}

async fn post(http: &Client, url: &str, path: &str, body: &Value) -> (u16, Vec<u8>) {
    let request = http
        .post(format!("{url}{path}"))
        .header("content-type", "application/msgpack")
        .body(rmp_serde::to_vec_named(body).unwrap());
    let answer = persistently(request).await;
    (
        answer.status().as_u16(),
        answer.bytes().await.unwrap().to_vec(),
    )
}

/// The bytes of a batch; `None` when there are no more.
pub async fn batch_bytes(url: &str, step: u64, rank: u32) -> Option<Vec<u8>> {
    batch_bytes_with(&client(), url, step, rank).await
}

async fn batch_bytes_with(http: &Client, url: &str, step: u64, rank: u32) -> Option<Vec<u8>> {
    let deadline = tokio::time::Instant::now() + PATIENCE;
    loop {
        let (status, body) = post(
            http,
            url,
            "/trainer/batch",
            &json!({"step": step, "rank": rank}),
        )
        .await;
        match status {
            200 => return Some(body),
            410 => return None,
            202 => assert!(
                tokio::time::Instant::now() < deadline,
                "no batch of step {step}"
            ),
            status => panic!("{status}: {}", String::from_utf8_lossy(&body)),
        }
    }
}

/// Trains to the end; returns every batch of rank 0.
pub async fn train(url: String, output: std::path::PathBuf) -> Vec<Batch> {
    train_after(0, url, output).await
}

/// The same from a checkpoint.
pub async fn train_after(checkpoint: u64, url: String, output: std::path::PathBuf) -> Vec<Batch> {
    let mut batches = Vec::new();
    let http = client();
    if checkpoint > 0 {
        resume(&url, checkpoint).await;
    }
    publish_with(&http, &url, &output, checkpoint).await;
    for step in checkpoint + 1.. {
        let Some(bytes) = batch_bytes_with(&http, &url, step, 0).await else {
            return batches;
        };
        let spool =
            std::fs::read(output.join(format!("spool/step_{step}/rank_0.msgpack"))).unwrap();
        assert_eq!(
            bytes, spool,
            "the spool holds what was answered, before it was answered"
        );
        batches.push(Batch::decode(&bytes));
        publish_with(&http, &url, &output, step).await;
    }
    batches
}
