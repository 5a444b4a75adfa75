use super::super::testing::{self, SAMPLING};
use super::*;
use crate::request::message_key;
use crate::text::Delta;
use primerl_core::turn::FinishReason;
use primerl_render::testing::tiny;
use primerl_render::{Content, FunctionCall, ToolCall};
use serde_json::json;

type Parsed = (TurnRequest, Box<dyn Reply>);

fn read_in(store: &Arc<Store>, evaluation: bool, changes: Value) -> Result<Parsed, ApiError> {
    let mut body = json!({"model": "m", "input": "hi"});
    for (name, value) in changes.as_object().expect("an object") {
        body[name] = value.clone();
    }
    let rules = Rules {
        sampling: &SAMPLING,
        evaluation,
    };
    read(body.to_string().as_bytes(), &rules, store, 0)
}

fn parse(changes: Value) -> TurnRequest {
    match read_in(&Arc::default(), false, changes) {
        Ok((request, _)) => request,
        Err(error) => panic!("{error:?}"),
    }
}

fn refusal(changes: Value) -> ApiError {
    match read_in(&Arc::default(), false, changes) {
        Ok((request, _)) => panic!("{request:?} was taken"),
        Err(error) => error,
    }
}

fn messages(request: &TurnRequest) -> Vec<Message> {
    match &request.input {
        Input::Messages { messages, .. } => {
            let read = |message: &Incoming| message.read(0).expect("reads").into_owned();
            messages.iter().map(read).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn options(request: &TurnRequest) -> Arc<crate::request::Options> {
    match &request.input {
        Input::Messages { options, .. } => options.read().expect("reads"),
        other => panic!("{other:?}"),
    }
}

fn called(reasoning: Option<&str>, content: Content, calls: &[(&str, &str)]) -> Message {
    let call = |(id, arguments): &(&str, &str)| ToolCall {
        id: Some((*id).into()),
        kind: Some("function".into()),
        function: FunctionCall {
            name: "f".into(),
            arguments: Value::String((*arguments).into()),
        },
        extra: Map::new(),
    };
    Message {
        content,
        reasoning_content: reasoning.map(str::to_owned),
        tool_calls: Some(calls.iter().map(call).collect()),
        ..Message::assistant("")
    }
}

fn answer(id: &str, message: Message, finish: FinishReason) -> Answer {
    let mut answer = testing::answer(message, finish);
    answer.head.id = id.into();
    answer
}

fn whole(reply: &dyn Reply, answer: &Answer) -> Value {
    let body = reply.whole(answer, tiny().tokenizer());
    serde_json::from_slice(&body).expect("is JSON")
}

fn thinking_call() -> Message {
    called(
        Some("hm"),
        Content::Text("a".into()),
        &[("c1", "{\"x\":1}")],
    )
}

#[test]
fn a_whole_answer_has_openais_shape() {
    let changes = json!({"metadata": {"k": "v"}, "max_output_tokens": 9, "instructions": "i",
        "include": ["message.output_text.logprobs"], "tools": [{"type": "function", "name": "f"}]});
    let (_, reply) = read_in(&Arc::default(), false, changes).expect("is fine");
    let body = whole(
        reply.as_ref(),
        &answer("7-0", thinking_call(), FinishReason::Length),
    );
    assert_eq!(body["id"], "resp_7-0");
    assert_eq!(body["status"], "incomplete");
    assert_eq!(
        body["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    assert_eq!(body["metadata"], json!({"k": "v"}));
    assert_eq!(body["max_output_tokens"], 9);
    assert_eq!(body["instructions"], "i");
    assert_eq!(
        body["tools"][0],
        json!({"type": "function", "name": "f", "parameters": null, "strict": null})
    );
    assert_eq!(body["usage"]["total_tokens"], 5);
    let output = &body["output"];
    assert_eq!(
        output[0]["content"],
        json!([{"type": "reasoning_text", "text": "hm"}])
    );
    assert_eq!(output[0]["status"], "completed");
    assert_eq!(output[1]["content"][0]["text"], "a");
    assert_eq!(
        output[1]["content"][0]["logprobs"][1]["token"],
        "<|im_end|>"
    );
    assert_eq!(
        output[2],
        json!({"id": "fc_7-0_2", "type": "function_call", "call_id": "c1", "name": "f",
            "arguments": "{\"x\":1}", "status": "incomplete"})
    );
    let body = whole(
        reply.as_ref(),
        &answer("7-0", Message::assistant(""), FinishReason::Stop),
    );
    assert_eq!(body["output"][0]["content"][0]["text"], "");
    assert_eq!(body["status"], "completed");
}

#[test]
fn items_that_come_back_are_the_answer_that_was_given() {
    for message in [
        thinking_call(),
        Message::assistant("a"),
        called(None, Content::Null, &[("c", "{}")]),
    ] {
        let (_, reply) = read_in(&Arc::default(), false, json!({})).expect("is fine");
        let body = whole(
            reply.as_ref(),
            &answer("7-0", message.clone(), FinishReason::Stop),
        );
        let request = parse(json!({"input": body["output"]}));
        assert_eq!(messages(&request), [message]);
    }
}

/// Answers the request in `store`; returns the response's id.
fn answered(store: &Arc<Store>, id: &str, changes: Value, said: &str) -> String {
    let (_, reply) = read_in(store, false, changes).expect("is fine");
    let answer = answer(id, Message::assistant(said), FinishReason::Stop);
    whole(reply.as_ref(), &answer)["id"]
        .as_str()
        .expect("an id")
        .to_owned()
}

#[test]
fn a_request_continues_a_response_without_its_instructions() {
    let store = Arc::default();
    let first = answered(
        &store,
        "7-0",
        json!({"instructions": "i", "input": "q1"}),
        "a1",
    );
    let second = json!({"input": "q2", "previous_response_id": first});
    let second = answered(&store, "7-1", second, "a2");
    let (request, _) = read_in(
        &store,
        false,
        json!({"input": "q3", "previous_response_id": second}),
    )
    .expect("is fine");
    let expected = [
        Message::user("q1"),
        Message::assistant("a1"),
        Message::user("q2"),
        Message::assistant("a2"),
        Message::user("q3"),
    ];
    assert_eq!(messages(&request), expected);
    let Input::Messages { messages, .. } = &request.input else {
        panic!("{request:?}");
    };
    let keys: Vec<_> = messages.iter().map(Incoming::key).collect();
    assert_eq!(
        keys,
        expected
            .each_ref()
            .map(|message| Some(message_key(message)))
    );
    let items = store
        .find(&second)
        .expect("is kept")
        .link
        .input_newest_first();
    let texts: Vec<&Value> = items
        .iter()
        .map(|item| &item["content"][0]["text"])
        .collect();
    assert_eq!(texts, ["q2", "a1", "q1"]);
    store.delete(&first).expect("is kept");
    assert!(store.find(&first).is_err());
    assert_eq!(
        store.find(&second).expect("is kept").link.history().len(),
        4
    );
}

#[test]
fn a_response_that_is_not_stored_cannot_be_continued() {
    let store = Arc::default();
    let id = answered(&store, "7-0", json!({"store": false}), "a");
    let error = read_in(&store, false, json!({"previous_response_id": id}))
        .map(drop)
        .expect_err("is refused");
    assert_eq!(error.status, 400);
    assert_eq!(error.code, Some("previous_response_not_found"));
    assert_eq!(error.param.as_deref(), Some("previous_response_id"));
}

#[test]
fn a_long_chain_is_dropped_without_recursion() {
    let message = KeyedMessage::new(Message::user("x"));
    let link = |previous| Link {
        id: "x".into(),
        previous,
        messages: Vec::new(),
        answer: Arc::clone(&message),
    };
    let mut last = Arc::new(link(None));
    for _ in 0..200_000 {
        last = Arc::new(link(Some(last)));
    }
    drop(last);
}

mod requests;
mod streamed;
