//! Published weights over HTTP, in parts, for engines on machines that do not share the run's folder.
//!
//! `GET /weights/step_<k>/manifest.json` and `GET /weights/step_<k>/<file of it>` with `Range: bytes=<from>-<to>`: 206
//! with at most [`MOST_BYTES`], so that a file of any size takes little memory, and is resumed from where it stopped.

use crate::app::App;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use axum::response::{IntoResponse, Response};
use primerl_service::http::ApiError;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;

/// The largest answer.
const MOST_BYTES: u64 = 8 << 20;
const GONE: &str = "weights_gone";

pub async fn part(
    State(app): State<Arc<App>>,
    Path((version, file)): Path<(String, String)>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    if !is_version(&version) || !is_plain(&file) {
        return Err(unknown(&version, &file));
    }
    let range = headers
        .get(header::RANGE)
        .map(|value| Range::parse(value.as_bytes()).ok_or_else(refused_range))
        .transpose()?;
    let folder = app.config.output_dir.join("broadcasts").join(&version);
    let path = folder.join(&file);
    let read = tokio::task::spawn_blocking(move || read(&path, range)).await;
    match read.map_err(|error| ApiError::internal(error.to_string()))? {
        Ok(found) => found.answer(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(unknown(&version, &file)),
        Err(error) => Err(ApiError::internal(format!(
            "{version}/{file} cannot be read: {error}"
        ))),
    }
}

/// `step_12`: the name of a folder of weights.
fn is_version(name: &str) -> bool {
    name.strip_prefix("step_")
        .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|one| one.is_ascii_digit()))
}

/// A file's name that leads nowhere else.
fn is_plain(name: &str) -> bool {
    !name.starts_with('.')
        && name
            .bytes()
            .all(|one| one.is_ascii_alphanumeric() || b"._-".contains(&one))
}

fn unknown(version: &str, file: &str) -> ApiError {
    ApiError::not_found(
        GONE,
        format!(
            "there is no {version}/{file} here: it is no version of this run, or a later one has replaced it"
        ),
    )
}

fn refused_range() -> ApiError {
    ApiError {
        status: StatusCode::RANGE_NOT_SATISFIABLE,
        ..ApiError::invalid("write one range, as `Range: bytes=<from>-<to>`").code("range_refused")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    from: u64,
    /// The last byte; `None` is that of the file.
    to: Option<u64>,
}

impl Range {
    fn parse(value: &[u8]) -> Option<Range> {
        let (from, to) = std::str::from_utf8(value)
            .ok()?
            .strip_prefix("bytes=")?
            .split_once('-')?;
        let from = from.parse().ok()?;
        let to: Option<u64> = match to {
            "" => None,
            digits => Some(digits.parse().ok()?),
        };
        to.is_none_or(|to| to >= from).then_some(Range { from, to })
    }
}

#[derive(Debug)]
struct Part {
    from: u64,
    /// The file's, in bytes.
    size: u64,
    bytes: Vec<u8>,
}

fn read(path: &std::path::Path, range: Option<Range>) -> io::Result<Part> {
    let mut file = File::open(path)?;
    let size = file.metadata()?.len();
    let range = range.unwrap_or(Range { from: 0, to: None });
    let end = range.to.map_or(size, |to| to.saturating_add(1)).min(size);
    let length = end.saturating_sub(range.from).min(MOST_BYTES);
    file.seek(SeekFrom::Start(range.from))?;
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    file.take(length).read_to_end(&mut bytes)?;
    Ok(Part {
        from: range.from,
        size,
        bytes,
    })
}

impl Part {
    fn headers(&self, length: u64) -> Vec<(HeaderName, String)> {
        let mut headers = vec![
            (header::CONTENT_TYPE, "application/octet-stream".to_owned()),
            (header::ACCEPT_RANGES, "bytes".to_owned()),
        ];
        if length < self.size {
            let last = self.from + length - 1;
            let range = format!("bytes {}-{last}/{}", self.from, self.size);
            headers.push((header::CONTENT_RANGE, range));
        }
        headers
    }

    fn answer(self) -> Result<Response, ApiError> {
        let length = self.bytes.len() as u64;
        if length == 0 && self.from > 0 {
            return Err(ApiError {
                message: format!("the file has {} bytes", self.size),
                ..refused_range()
            });
        }
        let status = match length == self.size {
            true => StatusCode::OK,
            false => StatusCode::PARTIAL_CONTENT,
        };
        let headers = self.headers(length);
        let mut answer = (status, Body::from(self.bytes)).into_response();
        for (name, value) in headers {
            let value = value
                .parse()
                .map_err(|_| ApiError::internal("a header's value"))?;
            answer.headers_mut().insert(name, value);
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_to_no_other_folder() {
        for name in ["step_0", "step_12"] {
            assert!(is_version(name), "{name}");
        }
        for name in [
            "",
            "step_",
            "step_-1",
            "step_1/..",
            "..",
            "latest",
            ".step_1.9.tmp",
        ] {
            assert!(!is_version(name), "{name}");
        }
        for name in ["manifest.json", "model-00001-of-00002.safetensors"] {
            assert!(is_plain(name), "{name}");
        }
        for name in ["..", ".secret", "../../key", "a/b", "a\\b", "a\0"] {
            assert!(!is_plain(name), "{name}");
        }
    }

    #[test]
    fn a_range_is_one_of_bytes() {
        let range = |from, to| Some(Range { from, to });
        assert_eq!(Range::parse(b"bytes=0-9"), range(0, Some(9)));
        assert_eq!(Range::parse(b"bytes=7-"), range(7, None));
        for wrong in [
            "bytes=-5",
            "bytes=9-0",
            "bytes=0-1,4-5",
            "lines=0-1",
            "bytes=",
            "bytes=a-b",
        ] {
            assert_eq!(Range::parse(wrong.as_bytes()), None, "{wrong}");
        }
    }

    #[test]
    fn parts_put_together_are_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("f");
        let content: Vec<u8> = (0..MOST_BYTES + 100).map(|at| (at % 251) as u8).collect();
        std::fs::write(&path, &content).expect("written");
        let mut found = Vec::new();
        while found.len() < content.len() {
            let from = found.len() as u64;
            let part = read(&path, Some(Range { from, to: None })).expect("read");
            assert!(part.bytes.len() as u64 <= MOST_BYTES);
            assert_eq!(part.size, content.len() as u64);
            found.extend(part.bytes);
        }
        assert_eq!(found, content);
        let beyond = Range {
            from: content.len() as u64,
            to: None,
        };
        let refused = read(&path, Some(beyond)).expect("read").answer();
        assert_eq!(
            refused.expect_err("beyond").status,
            StatusCode::RANGE_NOT_SATISFIABLE
        );
    }
}
