use super::*;
use crate::TokenLogprob;
use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use futures_util::stream;
use primerl_service::tls::testing::{Authority, serve};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Notify;

#[test]
fn urls_are_checked() {
    for (url, checked) in [
        ("http://127.0.0.1:8000/", "http://127.0.0.1:8000"),
        ("https://host:1", "https://host:1"),
    ] {
        assert_eq!(parse_url(url).as_deref(), Ok(checked));
    }
    let problem = parse_url("ftp://host").expect_err("is another protocol");
    assert!(problem.contains("neither http nor https"), "{problem}");
    assert!(parse_url("host").is_err());
}

/// Tells when it has seen something.
struct Seen(Arc<Notify>);

impl Progress for Seen {
    fn tokens(&mut self, _: &[u32], _: &[TokenLogprob]) -> Option<usize> {
        self.0.notify_one();
        None
    }

    fn go_on(&mut self, _: &[u32]) -> bool {
        false
    }
}

fn event(token: u32, rest: &str) -> String {
    format!(
        "data: {{\"choices\":[{{\"token_ids\":[{token}],\"logprobs\":{{\"content\":[{{\"token_id\":{token},\
         \"logprob\":-1.0}}]}}{rest}}}]}}\n\n"
    )
}

#[tokio::test]
async fn an_answer_is_streamed_over_tls() {
    let (authority, seen) = (Authority::new("ours"), Arc::new(Notify::new()));
    let first_is_seen = Arc::clone(&seen);
    let answer = move || async move {
        // The second event is sent when the first has arrived.
        let events = stream::unfold(0, move |sent| {
            let first_is_seen = Arc::clone(&first_is_seen);
            async move {
                let event = match sent {
                    0 => event(5, ""),
                    1 => {
                        first_is_seen.notified().await;
                        event(6, ",\"finish_reason\":\"stop\"")
                    }
                    _ => return None,
                };
                Some((Ok::<_, std::io::Error>(event), sent + 1))
            }
        });
        Body::from_stream(events)
    };
    let router = Router::new()
        .route("/inference/v1/generate", post(answer))
        .route("/health", get(|| async {}));
    let (port, connections) = serve(authority.server(&["localhost"]), router).await;
    let url = format!("https://localhost:{port}");
    let client = EngineClient::over(url, |url| authority.client(url)).expect("opens");
    client.health().await.expect("is well");
    let mut assembly = Assembly::new(2);
    let limit = Duration::from_secs(20);
    client
        .generate_streamed(
            RequestBody::default(),
            "1",
            limit,
            &mut Seen(seen),
            &mut assembly,
        )
        .await
        .expect("answers");
    let choice = assembly.finish(false).expect("is whole");
    assert_eq!(choice.token_ids, [5, 6]);
    assert_eq!(connections.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn an_engine_that_is_not_trusted_says_why() {
    let router = Router::new().route("/health", get(|| async {}));
    let (port, _) = serve(Authority::new("theirs").server(&["localhost"]), router).await;
    let authority = Authority::new("ours");
    let url = format!("https://localhost:{port}");
    let client = EngineClient::over(url, |url| authority.client(url)).expect("opens");
    let said = client.health().await.expect_err("is refused").to_string();
    assert!(said.contains("SSL_CERT_"), "{said}");
}

/// An engine that sends `piece` without end, from the end of its headers on. The count is of bytes that were sent.
async fn endless(piece: String) -> (EngineClient, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("is bound"));
    let sent = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&sent);
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.expect("a client");
        let mut request = vec![0; 1 << 16];
        let _ = stream.read(&mut request).await;
        let head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
        stream.write_all(head).await.expect("is read");
        let pieces = piece.repeat((1 << 16) / piece.len());
        while stream.write_all(pieces.as_bytes()).await.is_ok() {
            count.fetch_add(pieces.len(), Ordering::SeqCst);
        }
    });
    (EngineClient::new(url).expect("is a URL"), sent)
}

const BOUNDS: Bounds<'static> = Bounds {
    max_tokens: 8,
    top_logprobs: 0,
    vocabulary_size: None,
    lowest_logprob: -104.0,
    stop_token_ids: &[],
    experts: None,
    experts_rows: 0,
};
/// Nothing here takes long.
const LIMIT: Duration = Duration::from_secs(20);
/// What sockets hold, of both ends.
const ON_ITS_WAY: usize = 16 << 20;

fn malformed(error: EngineError) -> String {
    match error {
        EngineError::Malformed { problem, .. } => problem,
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn an_answer_without_end_is_not_read_to_its_end() {
    let longest = BOUNDS.longest_answer();
    assert!(longest < 2 << 20, "{longest}");
    let (client, sent) = endless("{\"choices\":[]},".into()).await;
    let named = Named::weights("m", primerl_core::PolicyVersion(0));
    let answer = client.generate(RequestBody::default(), &named, BOUNDS, LIMIT);
    let problem = malformed(answer.await.expect_err("is no answer"));
    assert_eq!(problem, format!("it is longer than {longest} bytes"));
    assert!(sent.load(Ordering::SeqCst) < longest + ON_ITS_WAY);

    // Other calls have a bound, too, whatever the route.
    let (client, sent) = endless("x".into()).await;
    let problem = malformed(client.metrics().await.expect_err("is no answer"));
    assert!(problem.contains("longer than"), "{problem}");
    assert!(sent.load(Ordering::SeqCst) < LARGEST_ANSWER + ON_ITS_WAY);
}

#[tokio::test]
async fn a_stream_without_end_is_left_when_it_brings_more_tokens_than_were_asked_for() {
    let (client, sent) = endless(event(5, "")).await;
    let mut assembly = Assembly::new(BOUNDS.max_tokens);
    let mut seen = Seen(Arc::new(Notify::new()));
    let body = RequestBody::default();
    let answer = client.generate_streamed(body, "1", LIMIT, &mut seen, &mut assembly);
    let problem = malformed(answer.await.expect_err("is no answer"));
    assert!(problem.contains("more tokens came than the 8"), "{problem}");
    assert!(sent.load(Ordering::SeqCst) < ON_ITS_WAY);
}
