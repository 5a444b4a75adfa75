//! HTTP clients: which servers they trust for TLS, and hints for connections that fail because of it.
//! A server is trusted if its certificate is signed by an authority of this machine, or by one in the files that
//! `SSL_CERT_FILE` and `SSL_CERT_DIR` name, as in OpenSSL. Verification cannot be turned off.

use reqwest::ClientBuilder;
use rustls::{AlertDescription, CertificateError, ClientConfig, InvalidMessage, RootCertStore};
use std::error::Error;
use std::io;
use std::sync::Arc;

const FILE: &str = "SSL_CERT_FILE";
const FOLDERS: &str = "SSL_CERT_DIR";

/// There are no certificates of authorities to trust.
#[derive(Debug, thiserror::Error)]
#[error("{problem}; {hint}")]
pub struct NoAuthorities {
    pub problem: String,
    pub hint: String,
}

/// Builder for a client of `url` and the URLs below it: for https, the client sends nothing over http.
pub fn client(url: &str) -> Result<ClientBuilder, NoAuthorities> {
    match is_https(url) {
        true => Ok(trusting(authorities()?)),
        false => Ok(plain()),
    }
}

pub fn is_https(url: &str) -> bool {
    url.starts_with("https:")
}

/// Builder for a client that uses http.
pub fn plain() -> ClientBuilder {
    // Nothing is read from disk for clients that need no certificates.
    over(RootCertStore::empty())
}

/// Builder for a client that uses https.
pub fn trusting(authorities: RootCertStore) -> ClientBuilder {
    over(authorities).https_only(true)
}

#[expect(clippy::disallowed_methods, reason = "every client is made here")]
fn over(authorities: RootCertStore) -> ClientBuilder {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("ring has what TLS 1.2 and 1.3 need")
        .with_root_certificates(authorities)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    // A proxy in the environment is for the internet, not for the machines of a run.
    reqwest::Client::builder()
        .tls_backend_preconfigured(config)
        .no_proxy()
}

/// The authorities that may sign a server's certificate.
fn authorities() -> Result<RootCertStore, NoAuthorities> {
    let found = rustls_native_certs::load_native_certs();
    let mut authorities = RootCertStore::empty();
    let (count, _) = authorities.add_parsable_certificates(found.certs);
    // Some files of a folder may well be invalid; but a file that the user named has to be readable.
    let unreadable = std::env::var_os(FILE).and_then(|file| std::fs::File::open(file).err());
    let problem = match (unreadable, found.errors.first()) {
        (Some(error), _) => error.to_string(),
        (None, Some(error)) if count == 0 => error.to_string(),
        (None, None) if count == 0 => "there are none".to_owned(),
        _ => return Ok(authorities),
    };
    Err(match named() {
        Some(named) => NoAuthorities {
            problem: format!(
                "is https, and no certificates of authorities to trust are in {named}: {problem}"
            ),
            hint: "have it name such certificates (PEM), or unset it".to_owned(),
        },
        None => NoAuthorities {
            problem: format!(
                "is https, and this machine has no certificates of authorities to trust: {problem}"
            ),
            hint: format!("install them (ca-certificates), or name a file of them (PEM) in {FILE}"),
        },
    })
}

/// The variables with the trusted certificates that are set, and their values.
fn named() -> Option<String> {
    let set = |name: &str| {
        let value = std::env::var_os(name)?;
        Some(format!("{name} ({})", value.display()))
    };
    let named: Vec<String> = [FILE, FOLDERS].into_iter().filter_map(set).collect();
    (!named.is_empty()).then(|| named.join(" and "))
}

/// How to fix an error if one side speaks TLS and the other does not, or does not trust it.
pub fn mend(error: &(dyn Error + 'static), url: &str) -> Option<String> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<rustls::Error>() {
            return mend_of(error);
        }
        if let Some(error) = error.downcast_ref::<hyper::Error>()
            && error.is_parse()
            && !is_https(url)
        {
            return Some(
                "this is not an HTTP response: does the server speak TLS, and the URL need https:// instead of http://?"
                    .to_owned(),
            );
        }
        // The `source` of an `io::Error` skips the error that it wraps.
        let held = error
            .downcast_ref::<io::Error>()
            .and_then(io::Error::get_ref);
        cause = match held {
            Some(held) => Some(held),
            None => error.source(),
        };
    }
    None
}

fn mend_of(error: &rustls::Error) -> Option<String> {
    match error {
        rustls::Error::InvalidCertificate(problem) => Some(mend_of_certificate(problem)),
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => Some(speaks_no_tls()),
        rustls::Error::AlertReceived(AlertDescription::CertificateRequired) => {
            Some("the server requires a client certificate, which is not supported".to_owned())
        }
        _ => None,
    }
}

fn speaks_no_tls() -> String {
    "the server does not speak TLS: does the URL need http:// instead of https://?".to_owned()
}

fn mend_of_certificate(problem: &CertificateError) -> String {
    match problem {
        // `BadSignature`: another authority of the same name signed it.
        CertificateError::UnknownIssuer | CertificateError::BadSignature => match named() {
            Some(named) => format!(
                "none of the authorities in {named} has signed it; add the one that has, as PEM"
            ),
            None => format!(
                "no authority that this machine trusts has signed it; name a PEM file with the one that has in {FILE}"
            ),
        },
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => {
            "the server needs a new certificate, if this machine's clock is right".to_owned()
        }
        CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
            "use a name of the server that is in its certificate's subjectAltName, or give it a certificate with this name"
                .to_owned()
        }
        CertificateError::Other(_) => {
            "it is not a server certificate: that takes X.509 version 3, CA:FALSE and a subjectAltName"
                .to_owned()
        }
        _ => "the server needs another certificate".to_owned(),
    }
}

/// reqwest's own message omits the cause ("connection refused").
pub fn chain(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(any(test, feature = "testing"))]
pub mod testing;
