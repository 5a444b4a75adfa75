//! How answers, deltas and errors are written.

use super::*;
use crate::answer::{Answer, Tokens};
use crate::dialect::testing;
use crate::text::Delta;
use primerl_core::turn::FinishReason;
use primerl_render::testing::tiny;

const FORM: Form = Form {
    stream: true,
    omit_thinking: false,
};
const NOTHING: Tokens<'_> = Tokens {
    ids: &[],
    logprobs: &[],
    top: &[],
};

fn answer(message: Value, finish: FinishReason, stop: Option<&str>) -> Answer {
    let message = serde_json::from_value(message).expect("a message");
    let mut answer = testing::answer(message, finish);
    answer.choices[0].stop = stop.map(str::to_owned);
    answer
}

fn calling() -> Answer {
    let message = json!({"role": "assistant", "content": "Now.", "reasoning_content": "Hm.",
        "tool_calls": [{"id": "abc123xyz", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]});
    answer(message, FinishReason::Stop, None)
}

fn whole(form: Form, answer: &Answer) -> Value {
    serde_json::from_slice(&form.whole(answer, tiny().tokenizer())).expect("is JSON")
}

/// The data of each event, whose name and type are the same.
fn events(out: &[u8]) -> Vec<Value> {
    let text = std::str::from_utf8(out).expect("is text");
    assert!(text.ends_with("\n\n"));
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let data: Value =
            serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("is JSON");
        assert_eq!(name.strip_prefix("event: "), data["type"].as_str());
        data
    };
    text.split_terminator("\n\n").map(event).collect()
}

fn streamed(form: Form, answer: &Answer, deltas: &[&[Delta]]) -> Vec<Value> {
    let (renderer, mut out) = (tiny(), Vec::new());
    let mut writer = form.events();
    writer.begin(&answer.head, &mut out);
    for deltas in deltas {
        writer.progress(0, deltas, NOTHING, renderer.tokenizer(), &mut out);
    }
    writer.end(answer, &mut out);
    events(&out)
}

/// The message that an SDK makes of events.
fn accumulated(events: &[Value]) -> Value {
    let mut message = events[0]["message"].clone();
    let mut inputs = std::collections::HashMap::<u64, String>::new();
    for event in &events[1..] {
        let index = event["index"].as_u64().unwrap_or(0);
        let block = index as usize;
        match event["type"].as_str().expect("a type") {
            "content_block_start" => {
                let blocks = message["content"].as_array_mut().expect("a list");
                assert_eq!(blocks.len(), block);
                blocks.push(event["content_block"].clone());
            }
            "content_block_delta" => {
                let delta = event["delta"].as_object().expect("an object");
                let (name, added) = delta
                    .iter()
                    .find(|(name, _)| *name != "type")
                    .expect("a field");
                let added = added.as_str().expect("text");
                if name == "partial_json" {
                    inputs.entry(index).or_default().push_str(added);
                } else {
                    let before = message["content"][block][name]
                        .as_str()
                        .expect("text")
                        .to_owned();
                    message["content"][block][name] = json!(before + added);
                }
            }
            "content_block_stop" => {
                if let Some(input) = inputs.remove(&index) {
                    message["content"][block]["input"] =
                        serde_json::from_str(&input).expect("JSON");
                }
            }
            "message_delta" => {
                message["usage"] = event["usage"].clone();
                message["stop_reason"] = event["delta"]["stop_reason"].clone();
                message["stop_sequence"] = event["delta"]["stop_sequence"].clone();
            }
            "message_stop" | "ping" => {}
            other => panic!("{other}"),
        }
    }
    message
}

#[test]
fn a_whole_answer_has_anthropics_shape() {
    let body = whole(FORM, &calling());
    let signature = body["content"][0]["signature"].as_str().expect("text");
    assert!(!signature.is_empty());
    assert_eq!(
        body,
        json!({"id": "msg_7-0", "type": "message", "role": "assistant", "model": "m", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": signature},
            {"type": "text", "text": "Now."},
            {"type": "tool_use", "id": "abc123xyz", "name": "f", "input": {"a": 1}},
        ], "stop_reason": "tool_use", "stop_sequence": null, "usage": {"input_tokens": 3,
            "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, "output_tokens": 2}})
    );
    let omitting = Form {
        omit_thinking: true,
        ..FORM
    };
    let thinking = &whole(omitting, &calling())["content"][0];
    assert_eq!(
        thinking,
        &json!({"type": "thinking", "thinking": "", "signature": signature})
    );
}

#[test]
fn why_an_answer_stopped() {
    let text = json!({"role": "assistant", "content": "x"});
    let reason = |finish, stop| {
        let body = whole(FORM, &answer(text.clone(), finish, stop));
        (body["stop_reason"].clone(), body["stop_sequence"].clone())
    };
    assert_eq!(
        reason(FinishReason::Stop, None),
        (json!("end_turn"), Value::Null)
    );
    assert_eq!(
        reason(FinishReason::Length, None),
        (json!("max_tokens"), Value::Null)
    );
    assert_eq!(
        reason(FinishReason::StopSequence, Some("y")),
        (json!("stop_sequence"), json!("y"))
    );
    let empty = answer(
        json!({"role": "assistant", "content": ""}),
        FinishReason::Stop,
        None,
    );
    assert_eq!(whole(FORM, &empty)["content"], json!([]));
}

#[test]
fn events_add_up_to_the_whole_answer() {
    let call = Delta::ToolCall {
        index: 0,
        id: "abc123xyz".into(),
        name: "f".into(),
        arguments: "{\"a\": 1}".into(),
    };
    let (think, say) = (
        |text: &str| Delta::Reasoning(text.into()),
        |text: &str| Delta::Content(text.into()),
    );
    let deltas: &[&[Delta]] = &[
        &[think("H")],
        &[],
        &[think("m."), say("No")],
        &[say("w."), call],
    ];
    for omit_thinking in [false, true] {
        let form = Form {
            omit_thinking,
            ..FORM
        };
        let events = streamed(form, &calling(), deltas);
        assert_eq!(accumulated(&events), whole(form, &calling()));
        assert_eq!(events[0]["message"]["stop_reason"], Value::Null);
        assert_eq!(events[1], json!({"type": "ping"}));
        assert_eq!(events.last(), Some(&json!({"type": "message_stop"})));
    }
}

#[test]
fn blocks_follow_each_other() {
    let call = |index: usize| Delta::ToolCall {
        index,
        id: format!("call{index}"),
        name: "f".into(),
        arguments: if index == 0 {
            "{}".into()
        } else {
            "{\"a\": ".into()
        },
    };
    let say = |text: &str| Delta::Content(text.into());
    let events = streamed(
        FORM,
        &calling(),
        &[&[say("\"a\n"), call(0), call(1), say("é")]],
    );
    let message = accumulated(&events);
    assert_eq!(
        message["content"],
        json!([
            {"type": "text", "text": "\"a\n"},
            {"type": "tool_use", "id": "call0", "name": "f", "input": {}},
            {"type": "tool_use", "id": "call1", "name": "f", "input": {"raw_arguments": "{\"a\": "}},
            {"type": "text", "text": "é"},
        ])
    );
    let open: Vec<&Value> = events
        .iter()
        .filter(|event| event["type"] == "content_block_start")
        .collect();
    let shut = events
        .iter()
        .filter(|event| event["type"] == "content_block_stop")
        .count();
    assert_eq!((open.len(), shut), (4, 4));
    // The answer is empty: no block is opened.
    assert_eq!(
        accumulated(&streamed(FORM, &calling(), &[]))["content"],
        json!([])
    );
}

#[test]
fn errors_have_anthropics_types() {
    for (error, kind) in [
        (ApiError::invalid("m"), "invalid_request_error"),
        (ApiError::gone("rollout_over", "m"), "invalid_request_error"),
        (
            ApiError::not_found("rollout_unknown", "m"),
            "not_found_error",
        ),
        (
            ApiError::unavailable("engine_unavailable", "m"),
            "overloaded_error",
        ),
        (ApiError::internal("m"), "api_error"),
    ] {
        let mut out = Vec::new();
        FORM.events().error(&error, &mut out);
        let event = events(&out).remove(0);
        assert_eq!(event["error"]["type"], kind);
        assert_eq!(event["error"]["message"], "m");
        assert_eq!(
            event["error"].get("code"),
            error.code.map(Value::from).as_ref()
        );
        assert_eq!(refusal(&error).status(), error.status);
    }
    let named = ApiError::invalid("m").param("top_p").code("c");
    let mut out = Vec::new();
    FORM.events().error(&named, &mut out);
    let expected = json!({"type": "error",
        "error": {"type": "invalid_request_error", "message": "m", "code": "c", "param": "top_p"}});
    assert_eq!(events(&out), [expected]);
}
