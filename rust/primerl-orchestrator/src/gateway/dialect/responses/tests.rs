use super::*;
use crate::config::Sampling;
use crate::gateway::request::message_key;
use crate::gateway::text::Delta;
use primerl_core::turn::FinishReason;
use primerl_render::{Content, FunctionCall, Renderer, ToolCall};
use serde_json::json;

const SAMPLING: Sampling = Sampling {
    temperature: 1.0,
    max_tokens: 28,
};

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

fn options(request: &TurnRequest) -> Arc<crate::gateway::request::Options> {
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

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    for (name, value, param) in [
        ("background", json!(true), "background"),
        ("conversation", json!("conv_1"), "conversation"),
        ("prompt", json!({"id": "p"}), "prompt"),
        (
            "context_management",
            json!([{"type": "compaction"}]),
            "context_management",
        ),
        ("moderation", json!({"model": "m"}), "moderation"),
        ("truncation", json!("auto"), "truncation"),
        ("reasoning", json!({"effort": "high"}), "reasoning"),
        ("top_p", json!(0.5), "top_p"),
        ("temperature", json!(0.5), "temperature"),
        ("top_logprobs", json!(2), "top_logprobs"),
        ("stop", json!("x"), "stop"),
        ("n", json!(2), "n"),
        ("max_output_tokens", json!(0), "max_output_tokens"),
        ("include", json!(["file_search_call.results"]), "include[0]"),
        ("text", json!({"verbosity": "low"}), "text.verbosity"),
        (
            "text",
            json!({"format": {"type": "json_object"}}),
            "text.format",
        ),
        (
            "text",
            json!({"format": {"type": "grammar"}}),
            "text.format",
        ),
        ("tool_choice", json!("required"), "tool_choice"),
        ("tools", json!([{"type": "web_search"}]), "tools[0].type"),
        ("tools", json!([{"type": "function"}]), "tools[0].name"),
        (
            "tools",
            json!([{"type": "function", "name": "f", "defer_loading": true}]),
            "tools[0].defer_loading",
        ),
        ("metadata", json!({"a": 1}), "metadata"),
        (
            "stream_options",
            json!({"include_obfuscation": true}),
            "stream_options",
        ),
        ("mystery", json!(1), "mystery"),
        ("input", json!([]), "input"),
        ("input", json!(3), "input"),
    ] {
        let error = refusal(json!({name: value}));
        assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        assert_eq!(error.status, 400);
    }
}

#[test]
fn items_that_cannot_be_honoured_are_refused_by_name() {
    let call = json!({"type": "function_call", "name": "f", "arguments": "{}"});
    for (item, param) in [
        (json!("hi"), "input[1]"),
        (
            json!({"type": "item_reference", "id": "msg_1"}),
            "input[1].type",
        ),
        (
            json!({"type": "web_search_call", "id": "ws_1"}),
            "input[1].type",
        ),
        (json!({"role": "critic", "content": "x"}), "input[1].role"),
        (json!({"role": "user"}), "input[1].content"),
        (json!({"role": "user", "content": 3}), "input[1].content"),
        (
            json!({"role": "user", "content": [{"type": "input_image"}]}),
            "input[1].content[0].type",
        ),
        (
            json!({"role": "user", "content": [{"type": "input_text"}]}),
            "input[1].content[0].text",
        ),
        (
            json!({"role": "assistant", "content": "x", "phase": "commentary"}),
            "input[1].phase",
        ),
        (call, "input[1].call_id"),
        (
            json!({"type": "function_call_output", "call_id": "c"}),
            "input[1].output",
        ),
        (
            json!({"type": "reasoning", "encrypted_content": "x"}),
            "input[1].encrypted_content",
        ),
    ] {
        let error = refusal(json!({"input": [{"role": "user", "content": "hi"}, item]}));
        assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
    }
}

#[test]
fn neutral_and_harmless_fields_pass() {
    let request = parse(json!({
        "background": false, "truncation": "disabled", "reasoning": {"effort": null}, "top_p": 1, "temperature": 1,
        "include": ["message.output_text.logprobs", "reasoning.encrypted_content"], "top_logprobs": 2,
        "text": {"format": {"type": "text"}}, "metadata": {"a": "b"}, "parallel_tool_calls": false, "user": "u",
        "store": false, "service_tier": "auto", "max_output_tokens": 100, "max_tool_calls": 3, "prompt": null,
        "stream_options": {"include_obfuscation": false}, "chat_template_kwargs": {"enable_thinking": false}
    }));
    assert_eq!(request.sampling.logprobs, Some(2));
    assert_eq!(request.sampling.max_tokens, 28);
    assert_eq!(request.parse, Parse::Message { one_call: true });
    let kwargs = &options(&request).render.template_kwargs;
    assert_eq!(kwargs["enable_thinking"], false);
}

#[test]
fn an_evaluation_may_ask_for_a_schema() {
    let schema = json!({"type": "json_schema", "name": "n", "schema": {"type": "object"}});
    let changes = json!({"text": {"format": schema}, "top_p": 0.5});
    let (request, _) = read_in(&Arc::default(), true, changes).expect("is fine");
    let expected = json!({"json": {"type": "object"}});
    assert_eq!(request.sampling.structured_outputs, Some(expected));
}

#[test]
fn tools_are_shown_to_templates_as_chat_has_them() {
    let tool = json!({"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"},
        "strict": true});
    let request = parse(json!({"tools": [tool]}));
    let expected = json!([{"type": "function", "function": {"name": "f", "description": "d",
        "parameters": {"type": "object"}}}]);
    assert_eq!(json!(options(&request).render.tools), expected);
    let request = parse(json!({"tools": [tool], "tool_choice": "none"}));
    assert_eq!(options(&request).render.tools, None);
}

#[test]
fn instructions_and_leading_system_messages_are_one() {
    let input = json!([{"role": "developer", "content": "b"}, {"role": "user", "content": [
        {"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"role": "developer", "content": "c"}]);
    let request = parse(json!({"instructions": "a", "input": input}));
    let expected = [
        Message::text("system", "a\n\nb"),
        Message::user("one\ntwo"),
        Message::text("system", "c"),
    ];
    assert_eq!(messages(&request), expected);
}

#[test]
fn the_items_of_a_turn_are_one_message() {
    let reasoning = |id: &str| {
        json!({"type": "reasoning", "id": id, "summary": [],
            "content": [{"type": "reasoning_text", "text": "hm"}]})
    };
    let said = |id: &str| {
        json!({"type": "message", "id": id, "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "a", "annotations": [], "logprobs": []}]})
    };
    let call = |id: &str, call: &str| {
        json!({"type": "function_call", "id": id, "call_id": call, "name": "f",
            "arguments": "{}", "status": "completed"})
    };
    let output = json!({"type": "function_call_output", "call_id": "c1", "output": "r"});
    let tool = Message {
        tool_call_id: Some("c1".into()),
        ..Message::text("tool", "r")
    };
    let text = |text: &str| Content::Text(text.into());
    for (items, expected) in [
        // By our ids.
        (
            json!([
                reasoning("rs_7-0_0"),
                said("msg_7-0_1"),
                call("fc_7-0_2", "c1"),
                said("msg_7-0_3"),
                output
            ]),
            vec![
                called(Some("hm"), text("aa"), &[("c1", "{}")]),
                tool.clone(),
            ],
        ),
        (
            json!([said("msg_7-0_0"), said("msg_7-1_0")]),
            vec![Message::assistant("a"), Message::assistant("a")],
        ),
        // By their order: ids of elsewhere, or none.
        (
            json!([reasoning("r"), call("x", "c1"), call("y", "c2"), output]),
            vec![
                called(Some("hm"), Content::Null, &[("c1", "{}"), ("c2", "{}")]),
                tool.clone(),
            ],
        ),
        (
            json!([{"role": "assistant", "content": "a"}, call("", "c1"), {"role": "assistant", "content": "b"}]),
            vec![
                called(None, text("a"), &[("c1", "{}")]),
                Message::assistant("b"),
            ],
        ),
        (
            json!([{"type": "reasoning", "id": null, "summary": [{"type": "summary_text", "text": "s"}],
                "content": null}, said("x")]),
            vec![Message {
                reasoning_content: Some("s".into()),
                ..Message::assistant("a")
            }],
        ),
        (
            json!([{"type": "function_call_output", "call_id": "c1", "status": null, "name": null,
                "output": [{"type": "input_text", "text": "r"}]}]),
            vec![tool.clone()],
        ),
    ] {
        assert_eq!(
            messages(&parse(json!({"input": items}))),
            expected,
            "{items}"
        );
    }
}

fn renderer() -> Renderer {
    let folder = tempfile::tempdir().expect("temporary folder");
    primerl_render::testing::write_tiny_model(folder.path()).expect("model folder");
    Renderer::load(folder.path()).expect("loads")
}

fn answer(id: &str, message: Message, finish: FinishReason) -> Answer {
    Answer {
        head: Head {
            id: id.into(),
            created: 1,
            model: "m".into(),
            prompt_tokens: 3,
            choices: 1,
            prompt: None,
        },
        choices: vec![Choice {
            message,
            finish,
            stop: None,
            sampled: vec![4, 256].into(),
            logprobs: vec![-0.5, -1.0].into(),
            top: vec![],
        }],
    }
}

fn whole(reply: &dyn Reply, answer: &Answer) -> Value {
    let body = reply.whole(answer, renderer().tokenizer());
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

/// Answers the request in `store`; the result is the response's id.
fn answered(store: &Arc<Store>, id: &str, changes: Value, said: &str) -> String {
    let (_, reply) = read_in(store, false, changes).expect("is fine");
    let answer = answer(id, Message::assistant(said), FinishReason::Stop);
    whole(reply.as_ref(), &answer)["id"]
        .as_str()
        .expect("an id")
        .to_owned()
}

#[test]
fn a_request_goes_on_from_a_response_without_its_instructions() {
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
fn what_is_not_stored_cannot_be_gone_on_from() {
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

mod streamed;
