use super::*;
use crate::engines::TokenLogprob;
use crate::tls::testing::{Authority, serve};
use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use futures_util::stream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
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
    let mut assembly = Assembly::default();
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
