use super::*;
use crate::clients::server::parse_base_url;
use axum::Router;
use axum::http::{HeaderMap as Headers, StatusCode};
use axum::routing::post;
use parking_lot::Mutex;
use serde_json::json;
use std::sync::Arc;

const VARIABLE: &str = "PRIMERL_TEST_ENDPOINT_PATH";

/// Answers with these, one after the other, and then with the last; the bodies it got.
async fn server(answers: Vec<(u16, Value)>) -> (String, Arc<Mutex<Vec<(Headers, Value)>>>) {
    let seen: Arc<Mutex<Vec<(Headers, Value)>>> = Arc::default();
    let asked = Arc::clone(&seen);
    let handler = move |headers: Headers, axum::Json(body): axum::Json<Value>| async move {
        let mut asked = asked.lock();
        let (status, answer) = answers[asked.len().min(answers.len() - 1)].clone();
        asked.push((headers, body));
        let status = StatusCode::from_u16(status).expect("is a status");
        (status, [("retry-after", "0")], axum::Json(answer))
    };
    let router = Router::new().route("/v1/chat/completions", post(handler));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("binds");
    let address = listener.local_addr().expect("is bound");
    tokio::spawn(async move { axum::serve(listener, router).await });
    (format!("http://{address}/v1"), seen)
}

fn config(base_url: &str) -> ClientConfig {
    ClientConfig {
        base_urls: vec![base_url.into()],
        model: "big".into(),
        api_key_env: None,
        client_type: None,
        timeout_s: 20.0,
    }
}

fn request() -> ChatRequest<'static> {
    ChatRequest {
        model: "big",
        messages: br#"[{"role":"user","content":"Hi"}]"#,
        temperature: Some(0.5),
        max_completion_tokens: 7,
        stop: &[],
        others: Map::new(),
    }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

fn good() -> Value {
    json!({"model": "big-1", "choices": [{"message": {"role": "assistant", "content": "Yo"}, "finish_reason": "stop"}]})
}

#[tokio::test]
async fn it_is_asked_again_while_that_may_help() {
    let busy = json!({"error": {"message": "busy"}});
    let (url, seen) = server(vec![(429, busy.clone()), (503, busy), (200, good())]).await;
    let endpoint = Endpoint::open("client", &config(&url)).expect("opens");
    let answer = endpoint.ask(&request(), soon()).await.expect("answers");
    assert_eq!(answer.model, "big-1");
    let seen = seen.lock();
    assert_eq!(seen.len(), 3);
    let expected = json!({"model": "big", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.5,
        "max_completion_tokens": 7});
    assert_eq!(seen[2].1, expected);
    assert!(seen[2].0.get("authorization").is_none());
}

#[tokio::test]
async fn a_refusal_is_returned_at_once() {
    let refusal =
        json!({"error": {"message": "temperature is not supported", "param": "temperature"}});
    let (url, seen) = server(vec![(400, refusal)]).await;
    let endpoint = Endpoint::open("client", &config(&url)).expect("opens");
    let error = endpoint
        .ask(&request(), soon())
        .await
        .expect_err("is refused");
    assert!(error.is_refusal(), "{error}");
    assert!(error.to_string().contains("temperature is not supported"));
    assert_eq!(seen.lock().len(), 1);
}

#[tokio::test]
async fn it_ends_at_the_deadline_and_after_its_attempts() {
    let (url, _) = server(vec![(500, json!({}))]).await;
    let endpoint = Endpoint::open("client", &config(&url)).expect("opens");
    let error = endpoint.ask(&request(), Instant::now()).await;
    assert!(matches!(error, Err(EndpointError::Deadline { .. })));
    // Its request may still arrive: the next one is another server's.
    let (url, seen) = server(vec![(500, json!({}))]).await;
    let endpoint = Endpoint::open("client", &config(&url)).expect("opens");
    let error = endpoint.ask(&request(), soon()).await.expect_err("fails");
    assert!(!error.is_refusal());
    assert_eq!(seen.lock().len(), MAX_ATTEMPTS as usize);
}

/// `PATH` is set wherever tests run, so that no test has to change its environment.
#[tokio::test]
async fn the_key_is_sent_and_never_shown() {
    let key = std::env::var("PATH").expect("is set");
    let echo = json!({"error": {"message": format!("Incorrect API key provided: {key}.")}});
    let (url, seen) = server(vec![(401, echo)]).await;
    let with_key = ClientConfig {
        api_key_env: Some("PATH".into()),
        ..config(&url)
    };
    let endpoint = Endpoint::open("client", &with_key).expect("opens");
    let error = endpoint
        .ask(&request(), soon())
        .await
        .expect_err("is refused");
    let text = error.to_string();
    assert!(text.contains("PATH") && text.contains("***"), "{text}");
    assert!(!text.contains(&key) && !format!("{endpoint:?}").contains(&key));
    let sent = seen.lock()[0].0["authorization"].clone();
    assert_eq!(sent.to_str().expect("is text"), format!("Bearer {key}"));
}

#[tokio::test]
async fn what_is_cut_off_is_no_part_of_the_key_and_no_control_character() {
    let key = std::env::var("PATH").expect("is set");
    // No error in OpenAI's shape: the text is shown as it is.
    let text = json!(format!("{}{key}{}", "x".repeat(490), "y".repeat(600)));
    let (url, _) = server(vec![(400, text)]).await;
    let with_key = ClientConfig {
        api_key_env: Some("PATH".into()),
        ..config(&url)
    };
    let endpoint = Endpoint::open("client", &with_key).expect("opens");
    let error = endpoint.ask(&request(), soon()).await;
    let text = error.expect_err("is refused").to_string();
    let part: String = key.chars().take(4).collect();
    assert!(text.contains("***") && !text.contains(&part), "{text}");
    assert!(text.ends_with("[...]") && text.len() < 600, "{text}");
    let (url, _) = server(vec![(400, json!({"error": {"message": "a\u{1b}[2Jb\nc"}}))]).await;
    let endpoint = Endpoint::open("client", &config(&url)).expect("opens");
    let error = endpoint.ask(&request(), soon()).await;
    let text = error.expect_err("is refused").to_string();
    assert!(text.ends_with("a [2Jb c"), "{text}");
}

#[test]
fn a_key_that_is_not_set_is_refused_by_the_variables_name() {
    let without = ClientConfig {
        api_key_env: Some(VARIABLE.into()),
        ..config("http://127.0.0.1:1/v1")
    };
    let error = Endpoint::open("eval.env.x.client", &without).expect_err("is refused");
    let text = error.to_string();
    assert!(text.starts_with("eval.env.x.client.api_key_env"), "{text}");
    assert!(text.contains(VARIABLE), "{text}");
}

#[test]
fn urls_are_checked() {
    let fine = parse_base_url("http://host:8000/v1/").expect("is fine");
    assert_eq!(fine, "http://host:8000/v1");
    let fine = parse_base_url("https://api.example.com/v1").expect("is fine");
    assert_eq!(fine, "https://api.example.com/v1");
    for (url, why) in [
        ("ftp://host", "neither http nor https"),
        ("host", "not a URL"),
        ("http://host/v1?a=b", "a query"),
    ] {
        let problem = parse_base_url(url).expect_err(url);
        assert!(problem.contains(why), "{problem}");
    }
    let problem = parse_base_url("http://user:hunter2@host/v1").expect_err("a password");
    assert!(!problem.contains("hunter2"));
}
