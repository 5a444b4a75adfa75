//! Decides who may call what, from a request's path and headers alone, before its body is read.
//!
//! | route | key |
//! |---|---|
//! | `/rollouts/{id}/...` | the rollout's own, which its lease contains |
//! | `/rollouts/{id}/limits` | the run's: an env worker calls it |
//! | `/health`, and the page's own files, which hold no data | none |
//! | all others | the run's: `PRIMERL_API_KEY`, or else the one in `run/key` |
//!
//! If no key is configured, the run makes one: agents can reach the orchestrator's port, and without a key they could
//! report their own reward or end the run.
//!
//! A rollout's key is derived from the run's secret and the rollout's number, so no key has to be stored. It stays
//! valid across restarts, and after the rollout's end its owner still gets the error that the rollout is over.

use super::dialect::in_shape_of;
use crate::Service;
use crate::metrics::Outcome;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hmac::{Hmac, KeyInit, Mac};
use primerl_core::RolloutId;
use primerl_service::config_error::{ConfigError, field};
use primerl_service::files;
use primerl_service::http::ApiError;
use primerl_service::http::discard;
use primerl_service::secret::Secret;
use sha2::Sha256;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// Relative to the output folder.
pub const SECRET_FILE: &str = "run/secret";
const SECRET_BYTES: usize = 32;
/// The run's key if none is configured: one line that only the owner may read. Relative to the output folder.
pub const RUN_KEY_FILE: &str = "run/key";
const RUN_KEY_BYTES: usize = 32;
/// 128 bits, which cannot be guessed.
const KEY_DIGITS: usize = 32;
/// Headers in which SDKs send a key: OpenAI's (`Authorization: Bearer`), Anthropic's and Azure's. A harness may send
/// its own key in one of them, so one correct key is enough.
const KEY_HEADERS: [&str; 2] = ["x-api-key", "api-key"];

/// Configures the run's key. Every process of the run needs the key, and its agents never see it.
pub const RUN_KEY_VARIABLE: &str = "PRIMERL_API_KEY";

/// The run's key from this process's environment; an empty variable counts as unset.
///
/// # Errors
/// The key cannot be the value of a header.
pub fn run_key() -> Result<Option<Secret>, ConfigError> {
    let Some(key) = std::env::var_os(RUN_KEY_VARIABLE).filter(|key| !key.is_empty()) else {
        return Ok(None);
    };
    match key.into_string() {
        Ok(key) if is_key(&key) => Ok(Some(Secret::new(key))),
        _ => Err(field(
            RUN_KEY_VARIABLE,
            "it contains characters that are not visible ASCII, which no header can carry",
            "use letters and digits, such as the output of `openssl rand -hex 32`",
        )),
    }
}

/// A key file in the output folder cannot be read or written, or its content is invalid.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {source}")]
pub struct AccessError {
    pub path: PathBuf,
    pub source: io::Error,
}

/// The values that keys are derived from and compared with.
pub struct Access {
    mac: Hmac<Sha256>,
    /// Digest of the run's key.
    run_key: [u8; 32],
    /// Whether a path needs no key.
    is_open: fn(&str) -> bool,
}

impl Access {
    /// Reads the run's secret from this folder, and takes the run's key from the configuration or else from this
    /// folder. Creates what is missing.
    ///
    /// # Errors
    /// A file cannot be read or written, or its content is invalid.
    pub fn open(output_dir: &Path, configured: Option<&Secret>) -> Result<Access, AccessError> {
        let at = |file: &str| {
            let path = output_dir.join(file);
            move |source| AccessError { path, source }
        };
        let secret = kept_secret(&output_dir.join(SECRET_FILE)).map_err(at(SECRET_FILE))?;
        let key = run_key_of(&output_dir.join(RUN_KEY_FILE), configured);
        let key = key.map_err(at(RUN_KEY_FILE))?;
        Access::new(&secret, &key).map_err(at(SECRET_FILE))
    }

    pub(super) fn new(secret: &[u8], run_key: &Secret) -> io::Result<Access> {
        if secret.len() != SECRET_BYTES {
            let problem = format!(
                "it has {} bytes instead of {SECRET_BYTES}; remove it to have a new one made (agents that are running \
                 lose their rollouts)",
                secret.len()
            );
            return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
        }
        let mac = Hmac::new_from_slice(secret).map_err(io::Error::other)?;
        let mut access = Access {
            mac,
            run_key: [0; 32],
            is_open: |_| false,
        };
        access.run_key = access.digest(b"run", run_key.reveal().as_bytes());
        Ok(access)
    }

    /// Paths for which this returns true need no key.
    pub fn opening(self, is_open: fn(&str) -> bool) -> Access {
        Access { is_open, ..self }
    }

    fn digest(&self, purpose: &[u8], of: &[u8]) -> [u8; 32] {
        let mac = self.mac.clone().chain_update(purpose).chain_update(of);
        mac.finalize().into_bytes().into()
    }

    /// The key of everything under `/rollouts/{rollout}/`.
    pub fn rollout_key(&self, rollout: RolloutId) -> Secret {
        Secret::new(String::from_utf8_lossy(&self.rollout_digits(rollout)))
    }

    fn rollout_digits(&self, rollout: RolloutId) -> [u8; KEY_DIGITS] {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let digest = self.digest(b"rollout", &rollout.0.to_le_bytes());
        std::array::from_fn(|at| {
            let byte = digest[at / 2];
            DIGITS[usize::from(if at % 2 == 0 { byte >> 4 } else { byte & 15 })]
        })
    }

    /// Whether the request may be read. Which rollouts are open is checked later, and only for callers with the right
    /// key, so no one else can learn that.
    pub fn check(&self, path: &str, headers: &HeaderMap) -> Result<(), ApiError> {
        match path.strip_prefix("/rollouts/") {
            // The env worker reports an example's limits, not the agent.
            Some(rest) if rest.split('/').nth(1) == Some("limits") => self.check_run(headers),
            Some(rest) => self.check_rollout(rest, headers),
            None if (self.is_open)(path) => Ok(()),
            None => self.check_run(headers),
        }
    }

    fn check_rollout(&self, rest: &str, headers: &HeaderMap) -> Result<(), ApiError> {
        let number = rest.split('/').next().unwrap_or_default();
        let key = number
            .parse()
            .map(|number| self.rollout_digits(RolloutId(number)));
        match key {
            Ok(key) if presented(headers).any(|given| is_equal(given, &key)) => Ok(()),
            _ => Err(refusal(
                "the API key is missing, or it is not this rollout's; send the `api_key` of the rollout's lease as \
                 `Authorization: Bearer <api_key>` (Anthropic's SDK: `x-api-key`)",
            )),
        }
    }

    fn check_run(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        // Digests have equal length whatever the client sent, so the comparison's duration does not reveal the key's
        // length.
        let is_right = |given: &[u8]| is_equal(&self.digest(b"run", given), &self.run_key);
        match presented(headers).any(is_right) {
            true => Ok(()),
            false => Err(refusal(&format!(
                "this orchestrator needs the run's key: set {RUN_KEY_VARIABLE} in the environment of the process that \
                 calls it, or send the key as `Authorization: Bearer <key>`; where the run was started without \
                 {RUN_KEY_VARIABLE}, the file {RUN_KEY_FILE} of its output folder holds the key"
            ))),
        }
    }
}

fn kept_secret(path: &Path) -> io::Result<Vec<u8>> {
    match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let secret = random::<SECRET_BYTES>()?;
            files::write_secret(path, &secret).map_err(|error| error.source)?;
            Ok(secret.to_vec())
        }
        read => read,
    }
}

/// A configured key is not written to a file, and an older key file is removed: a key in the file is always valid.
fn run_key_of(path: &Path, configured: Option<&Secret>) -> io::Result<Secret> {
    if let Some(key) = configured {
        return match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(key.clone()),
        };
    }
    match std::fs::read_to_string(path) {
        Ok(text) if is_key(text.trim_end()) => Ok(Secret::new(text.trim_end())),
        Ok(_) => Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "it does not hold the run's key, one line of visible ASCII characters; remove it to have a new key made \
             (processes of the run that use the old one are refused)",
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = hexadecimal(&random::<RUN_KEY_BYTES>()?);
            files::write_secret(path, format!("{key}\n").as_bytes())
                .map_err(|error| error.source)?;
            Ok(Secret::new(key))
        }
        Err(error) => Err(error),
    }
}

fn is_key(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic())
}

fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Keys in the request, in all headers in which SDKs send them.
fn presented(headers: &HeaderMap) -> impl Iterator<Item = &[u8]> {
    let bearer = headers
        .get(header::AUTHORIZATION)
        .and_then(|value| value.as_bytes().split_first_chunk::<7>())
        .filter(|(scheme, _)| scheme.eq_ignore_ascii_case(b"bearer "))
        .map(|(_, key)| key.trim_ascii());
    let named = KEY_HEADERS
        .iter()
        .filter_map(|name| headers.get(*name))
        .map(|value| value.as_bytes());
    bearer.into_iter().chain(named)
}

/// Compares in constant time, which does not reveal where the two differ.
fn is_equal(given: &[u8], key: &[u8]) -> bool {
    given.ct_eq(key).into()
}

fn refusal(message: &str) -> ApiError {
    ApiError {
        status: StatusCode::UNAUTHORIZED,
        ..ApiError::invalid(message).code("invalid_api_key")
    }
}

/// Runs before every route. Refusals, from here or from a handler, have the error format of the route's dialect.
pub async fn guard(State(service): State<Arc<Service>>, request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let answer = guarded(&service, request, next).await;
    in_shape_of(&path, answer)
}

async fn guarded(service: &Service, request: Request, next: Next) -> Response {
    match service
        .gateway
        .access
        .check(request.uri().path(), request.headers())
    {
        Ok(()) => next.run(request).await,
        Err(refusal) => {
            service.metrics.request(Outcome::Refused);
            discard(request.into_body()).await;
            refusal.into_response()
        }
    }
}

#[cfg(test)]
mod tests;
