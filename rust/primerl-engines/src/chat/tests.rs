use super::*;
use crate::PromptIds;
use primerl_core::Truncation;
use primerl_core::conversation::History;
use serde_json::Map;
use std::sync::Arc;

fn config() -> EnginesConfig {
    EnginesConfig {
        model: "m".into(),
        request_timeout: Duration::from_secs(20),
        update_timeout: Duration::from_secs(20),
        stop_token_ids: vec![256],
        vocabulary_size: Some(300),
        seq_len: 512,
        max_tokens: 12,
        needs_processed: false,
        returns_experts: false,
        probe_tolerance: 0.5,
        written_ids: Arc::default(),
        engines_render: true,
    }
}

fn answer() -> Value {
    json!({"prompt_token_ids": [1, 2], "choices": [{"index": 0, "token_ids": [5, 256], "finish_reason": "stop",
        "logprobs": {"content": [
            {"token": "token_id:5", "logprob": -2.5, "top_logprobs": [
                {"token": "token_id:5", "logprob": -2.5}, {"token": "token_id:9", "logprob": -0.5},
                {"token": "token_id:8", "logprob": -1.5}]},
            {"token": "token_id:256", "logprob": -0.1, "top_logprobs": [
                {"token": "token_id:256", "logprob": -0.1}, {"token": "token_id:7", "logprob": -3.0},
                {"token": "token_id:6", "logprob": -4.0}]}]}}]})
}

fn read_of(answer: &Value) -> Result<Choice, EngineError> {
    read(
        answer.to_string().as_bytes(),
        &[1, 2],
        "3",
        &Named::weights("m", PolicyVersion(3)),
    )
}

fn refused(answer: &Value) -> String {
    match read_of(answer) {
        Ok(_) => panic!("{answer} was taken"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn ids_logprobs_and_alternatives_are_read() {
    let history = History::default();
    let request = SampleRequest {
        max_tokens: 4,
        top_logprobs: 2,
        ..SampleRequest::one_token(
            "proof",
            PromptIds {
                history: &history,
                suffix: &[1, 2],
            },
        )
    };
    let choice = read_of(&answer()).expect("is whole");
    let generated = choice
        .check(&request.bounds(&config()), None)
        .expect("is checked");
    assert_eq!(generated.token_ids, [5, 256]);
    assert_eq!(generated.logprobs, [-2.5, -0.1]);
    let runs = generated
        .versions
        .iter()
        .map(|run| (run.version.0, run.n_tokens));
    assert_eq!(runs.collect::<Vec<_>>(), [(3, 2)]);
    // Three ids have the same text: the sampled one counts where it is one of the two most likely.
    let top = [vec![(9, -0.5), (8, -1.5)], vec![(256, -0.1), (7, -3.0)]];
    assert_eq!(generated.top, top);
}

#[test]
fn what_is_missing_or_another_prompt_is_named() {
    let without = |pointer: &str| {
        let mut answer = answer();
        *answer.pointer_mut(pointer).expect("is there") = Value::Null;
        refused(&answer)
    };
    assert!(without("/prompt_token_ids").contains("prompt_token_ids"));
    assert!(without("/choices/0/token_ids").contains("no token_ids"));
    assert!(without("/choices/0/logprobs").contains("no logprobs"));
    let mut words = answer();
    words["choices"][0]["logprobs"]["content"][0]["token"] = "five".into();
    assert!(refused(&words).contains("return_tokens_as_token_ids"));
    let mut other = answer();
    other["prompt_token_ids"] = json!([1, 2, 3]);
    assert!(refused(&other).contains("a prompt of 3 tokens"));
}

#[test]
fn every_way_to_sample_is_named() {
    let chat = ChatMessages {
        messages: Bytes::from_static(br#"[{"role":"user","content":"a"}]"#),
        tools: Some(vec![json!({"type": "function"})]),
        template_kwargs: Map::new(),
    };
    let history = History::default();
    let request = SampleRequest {
        prompt: PromptIds {
            history: &history,
            suffix: &[1],
        },
        truncation: Truncation::default(),
        temperature: 0.7,
        max_tokens: 9,
        top_logprobs: 3,
        ..SampleRequest::one_token(
            "proof",
            PromptIds {
                history: &history,
                suffix: &[1],
            },
        )
    };
    let body = body(
        &chat,
        &request,
        &config(),
        &Named::weights("m", PolicyVersion(4)),
    )
    .expect("is written");
    let body: Value = serde_json::from_slice(&body).expect("is JSON");
    // Omitted settings would come from the model's generation_config.json.
    for (name, value) in [
        ("temperature", json!(0.7)),
        ("top_p", json!(1.0)),
        ("top_k", json!(0)),
        ("min_p", json!(0.0)),
        ("repetition_penalty", json!(1.0)),
        ("max_completion_tokens", json!(9)),
        ("top_logprobs", json!(4)),
        ("tool_choice", json!("none")),
        ("cache_salt", json!("4")),
        ("stop_token_ids", json!([256])),
        ("messages", json!([{"role": "user", "content": "a"}])),
    ] {
        assert_eq!(body[name], value, "{name}");
    }
}
