use super::*;
use axum::Router;
use axum::http::HeaderMap as Headers;
use axum::response::Redirect;
use axum::routing::{get, post};
use primerl_service::tls::testing::{Authority, serve};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::AsyncWriteExt;

const NAMES: [&str; 2] = ["localhost", "127.0.0.1"];
const SOON: Duration = Duration::from_secs(20);

/// `PATH` is set wherever tests run, so that no test has to change its environment.
fn open(url: &str, authority: &Authority) -> Server {
    let config = ClientConfig {
        base_urls: vec![url.into()],
        model: "big".into(),
        api_key_env: Some("PATH".into()),
        client_type: None,
        timeout_s: 20.0,
    };
    Server::open_over("client", &config, url, |url| authority.client(url)).expect("opens")
}

/// Counts what is asked, and says whether the key came with it.
fn router(asked: &Arc<AtomicUsize>) -> Router {
    let asked = Arc::clone(asked);
    let answer = move |headers: Headers, body: String| async move {
        asked.fetch_add(1, Ordering::Relaxed);
        let key = format!("Bearer {}", std::env::var("PATH").expect("is set"));
        format!("{body} {}", headers["authorization"] == key.as_str())
    };
    Router::new()
        .route("/v1/echo", post(answer.clone()).get(answer))
        .route("/moved", get(|| async { Redirect::temporary("/v1/echo") }))
}

/// Why a server that is asked as `host` gives no answer; it has got no request then.
async fn refusal(host: &str, authority: &Authority, config: rustls::ServerConfig) -> String {
    let asked = Arc::default();
    let (port, _) = serve(config, router(&asked)).await;
    let url = format!("https://{host}:{port}/v1");
    let answer = open(&url, authority)
        .post(&format!("{url}/echo"), "Hi".into(), SOON)
        .await;
    let (error, _) = answer.expect_err("is not trusted");
    assert!(error.is_outage(), "{error}");
    assert_eq!(asked.load(Ordering::Relaxed), 0);
    error.to_string()
}

#[tokio::test]
async fn one_connection_serves_many_requests() {
    let (authority, asked) = (Authority::new("ours"), Arc::default());
    let (port, connections) = serve(authority.server(&NAMES), router(&asked)).await;
    for host in NAMES {
        let url = format!("https://{host}:{port}/v1");
        let server = open(&url, &authority);
        for _ in 0..5 {
            let answer = server
                .post(&format!("{url}/echo"), "Hi".into(), SOON)
                .await
                .expect("answers");
            assert_eq!(answer, "Hi true");
        }
    }
    assert_eq!(asked.load(Ordering::Relaxed), 10);
    assert_eq!(connections.load(Ordering::Relaxed), 2);
}

#[tokio::test]
async fn a_server_that_is_not_trusted_gets_no_request_and_the_error_has_the_reason() {
    let authority = Authority::new("ours");
    for (name, reason) in [("theirs", "UnknownIssuer"), ("ours", "BadSignature")] {
        let said = refusal("localhost", &authority, Authority::new(name).server(&NAMES)).await;
        assert!(
            said.contains(reason) && said.contains("SSL_CERT_"),
            "{said}"
        );
    }
    let said = refusal(
        "127.0.0.1",
        &authority,
        authority.server(&["elsewhere.org"]),
    )
    .await;
    assert!(
        said.contains("only valid for DnsName(\"elsewhere.org\")")
            && said.contains("subjectAltName"),
        "{said}"
    );
    let said = refusal("localhost", &authority, authority.expired_server(&NAMES)).await;
    assert!(
        said.contains("expired") && said.contains("needs a new certificate"),
        "{said}"
    );
    let said = refusal("localhost", &authority, authority.itself()).await;
    assert!(
        said.contains("CaUsedAsEndEntity") && said.contains("CA:FALSE"),
        "{said}"
    );
}

#[tokio::test]
async fn an_error_names_the_other_protocol() {
    let (authority, asked) = (Authority::new("ours"), Arc::default());
    let (port, _) = serve(authority.server(&NAMES), router(&asked)).await;
    let url = format!("http://localhost:{port}/v1");
    let config = ClientConfig {
        base_urls: vec![url.clone()],
        model: "big".into(),
        api_key_env: None,
        client_type: None,
        timeout_s: 20.0,
    };
    let server = Server::open("client", &config).expect("opens");
    let (error, _) = server.get(&url, SOON).await.expect_err("is no HTTP");
    assert!(
        error
            .to_string()
            .contains("need https:// instead of http://"),
        "{error}"
    );

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("binds");
    let port = listener.local_addr().expect("is bound").port();
    let router = router(&asked);
    tokio::spawn(async move { axum::serve(listener, router).await });
    let url = format!("https://localhost:{port}/v1");
    let server = open(&url, &authority);
    let (error, _) = server.get(&url, SOON).await.expect_err("is no TLS");
    assert!(
        error
            .to_string()
            .contains("need http:// instead of https://"),
        "{error}"
    );
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_server_with_tls_but_without_http_gets_no_https_hint() {
    let authority = Authority::new("ours");
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(authority.server(&NAMES)));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await;
    let listener = listener.expect("binds");
    let port = listener.local_addr().expect("is bound").port();
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("accepts");
        let mut stream = acceptor.accept(stream).await.expect("is TLS");
        stream.write_all(b"220 mail, come in\r\n").await
    });
    let url = format!("https://localhost:{port}/v1");
    let server = open(&url, &authority);
    let (error, _) = server.get(&url, SOON).await.expect_err("is no HTTP");
    let said = error.to_string();
    assert!(said.contains("invalid HTTP version"), "{said}");
    assert!(!said.contains("need https"), "{said}");
}

#[tokio::test]
async fn no_redirect_is_followed() {
    let (authority, asked) = (Authority::new("ours"), Arc::default());
    let (port, _) = serve(authority.server(&NAMES), router(&asked)).await;
    let url = format!("https://localhost:{port}/moved");
    let server = open(&url, &authority);
    let (error, _) = server.get(&url, SOON).await.expect_err("is elsewhere");
    let said = error.to_string();
    assert!(
        said.contains("redirected to /v1/echo; not followed"),
        "{said}"
    );
    assert_eq!(asked.load(Ordering::Relaxed), 0);
}
