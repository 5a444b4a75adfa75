//! Servers that speak TLS, with certificates from an authority that only a test trusts.

use super::{NoAuthorities, trusting};
use axum::Router;
use axum::serve::Listener;
use rcgen::{
    BasicConstraints, Certificate, CertificateParams, DnType, IsCa, Issuer, KeyPair, date_time_ymd,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::{RootCertStore, ServerConfig};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

pub struct Authority {
    certificate: Certificate,
    key: KeyPair,
    params: CertificateParams,
}

impl Authority {
    pub fn new(name: &str) -> Authority {
        let mut params = params(&[]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().expect("makes a key");
        Authority {
            certificate: params.self_signed(&key).expect("signs"),
            key,
            params,
        }
    }

    fn trusted(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        let certificate = self.certificate.der().clone();
        roots.add(certificate).expect("is one");
        roots
    }

    /// Configuration of a client that trusts only this authority.
    pub fn client(&self, url: &str) -> Result<reqwest::ClientBuilder, NoAuthorities> {
        assert!(super::is_https(url), "{url}");
        Ok(trusting(self.trusted()))
    }

    /// Configuration of a server with these names.
    pub fn server(&self, names: &[&str]) -> ServerConfig {
        self.sign(params(names))
    }

    /// As [`Authority::server`], with an expired certificate.
    pub fn expired_server(&self, names: &[&str]) -> ServerConfig {
        let mut params = params(names);
        params.not_before = date_time_ymd(2020, 1, 1);
        params.not_after = date_time_ymd(2021, 1, 1);
        self.sign(params)
    }

    /// The authority's own certificate, which is not a server certificate.
    pub fn itself(&self) -> ServerConfig {
        config(self.certificate.der().clone(), &self.key)
    }

    fn sign(&self, params: CertificateParams) -> ServerConfig {
        let key = KeyPair::generate().expect("makes a key");
        let issuer = Issuer::from_params(&self.params, &self.key);
        let certificate = params.signed_by(&key, &issuer).expect("signs");
        config(certificate.into(), &key)
    }
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
    CertificateParams::new(names).expect("are names")
}

fn config(certificate: CertificateDer<'static>, key: &KeyPair) -> ServerConfig {
    let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(key.serialize_der()));
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("has versions")
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .expect("is its key")
}

/// A listener whose connections use TLS.
struct Speaking {
    listener: TcpListener,
    acceptor: TlsAcceptor,
    connections: Arc<AtomicUsize>,
}

impl Listener for Speaking {
    type Io = TlsStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        loop {
            let (stream, address) = self.listener.accept().await.expect("accepts");
            if let Ok(stream) = self.acceptor.accept(stream).await {
                self.connections.fetch_add(1, Ordering::Relaxed);
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// The server's port, and how many clients have connected.
pub async fn serve(config: ServerConfig, router: Router) -> (u16, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("binds");
    let port = listener.local_addr().expect("is bound").port();
    let connections = Arc::default();
    let speaking = Speaking {
        listener,
        acceptor: TlsAcceptor::from(Arc::new(config)),
        connections: Arc::clone(&connections),
    };
    tokio::spawn(async move { axum::serve(speaking, router).await });
    (port, connections)
}
