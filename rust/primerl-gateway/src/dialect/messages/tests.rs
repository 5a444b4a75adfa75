use super::super::testing::SAMPLING;
use super::*;
use crate::sampling::Demanded;
use primerl_render::{Content, Message};

mod prompts;
mod replies;

fn body(changes: &Value) -> Value {
    let mut body =
        json!({"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in changes.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body
}

fn read_as(evaluation: bool, changes: &Value) -> Result<(TurnRequest, Box<dyn Reply>), ApiError> {
    let rules = Rules {
        sampling: &SAMPLING,
        evaluation,
    };
    read(&body(changes).to_string().into(), &rules, 0)
}

fn parse(changes: &Value) -> TurnRequest {
    match read_as(false, changes) {
        Ok((request, _)) => request,
        Err(error) => panic!("{changes}: {error:?}"),
    }
}

fn refusal_of(evaluation: bool, changes: &Value) -> ApiError {
    match read_as(evaluation, changes) {
        Ok((request, _)) => panic!("{changes} was taken: {request:?}"),
        Err(error) => error,
    }
}

fn refused(changes: &Value) -> String {
    let error = refusal_of(false, changes);
    assert_eq!(error.status, 400);
    let param = error.param.unwrap_or_default();
    assert!(error.message.contains(&param), "{}: {param}", error.message);
    param
}

fn messages_of(input: &Input) -> Vec<Message> {
    match input {
        Input::Messages { messages, .. } => {
            let read = |message: &Incoming| message.read(0).expect("reads").into_owned();
            messages.iter().map(read).collect()
        }
        other => panic!("{other:?}"),
    }
}

fn options_of(input: &Input) -> Arc<Options> {
    match input {
        Input::Messages { options, .. } => options.read().expect("reads"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn fields_of_sampling() {
    let request = parse(
        &json!({"max_tokens": 9, "stop_sequences": ["a", "b"], "temperature": 1,
        "top_p": 1, "top_k": 0, "stream": false}),
    );
    assert_eq!(request.sampling.max_tokens, 9);
    assert_eq!(request.sampling.stop, ["a", "b"]);
    assert_eq!(request.choices, 1);
    assert_eq!(request.parse, Parse::Message { one_call: false });
    assert_eq!(parse(&json!({"max_tokens": 900})).sampling.max_tokens, 28);
    assert_eq!(refused(&json!({"max_tokens": null})), "max_tokens");
    assert_eq!(refused(&json!({"max_tokens": 0})), "max_tokens");
    assert_eq!(refused(&json!({"stop_sequences": [""]})), "stop_sequences");
    let changes = json!({"temperature": 0, "top_p": 0.9, "top_k": 5,
        "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}});
    let (request, _) = read_as(true, &changes).expect("is fine");
    assert_eq!(request.sampling.temperature, 0.0);
    assert_eq!(request.sampling.truncation.top_k, 5);
    assert_eq!(
        request.sampling.structured_outputs,
        Some(json!({"json": {"type": "object"}}))
    );
}

#[test]
fn fields_without_influence_pass() {
    parse(
        &json!({"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": {"type": "ephemeral"},
        "inference_geo": "eu", "speed": "fast", "diagnostics": {"previous_message_id": null}, "container": null,
        "user_profile_id": "u", "workspace_id": "w", "mcp_servers": [], "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}),
    );
}

#[test]
fn fields_that_cannot_be_honoured_are_named() {
    for (name, value) in [
        ("top_p", json!(0.9)),
        ("top_k", json!(5)),
        ("temperature", json!(0.5)),
        ("container", json!("c")),
        ("mcp_servers", json!([{"url": "u"}])),
        (
            "context_management",
            json!({"edits": [{"type": "compact_20260112"}]}),
        ),
        ("output_format", json!({"type": "shoe"})),
        ("tool_choice", json!({"type": "always"})),
        ("seed", json!(3)),
        ("stream", json!("yes")),
        ("mystery", json!(1)),
    ] {
        assert_eq!(refused(&json!({name: value})), name);
    }
    assert_eq!(
        refused(&json!({"tool_choice": {"type": "tool"}})),
        "tool_choice.name"
    );
    assert_eq!(
        refused(&json!({"output_config": {"effort": "low"}})),
        "output_config.effort"
    );
    let error = refusal_of(
        true,
        &json!({"output_config": {"format": {"type": "regex"}}}),
    );
    assert_eq!(error.param.as_deref(), Some("output_config.format"));
}

#[test]
fn a_training_rollout_may_ask_for_a_format_or_a_call() {
    let asked = |changes| parse(&changes).sampling;
    let format = json!({"type": "json_schema", "schema": {"type": "object"}});
    for changes in [
        json!({"output_config": {"format": format}}),
        json!({"output_format": format}),
    ] {
        let expected = json!({"json": {"type": "object"}});
        assert_eq!(asked(changes).structured_outputs, Some(expected));
    }
    let any = asked(json!({"tool_choice": {"type": "any"}}));
    assert_eq!(any.demanded, Some(Demanded::Any));
    let named = asked(json!({"tool_choice": {"type": "tool", "name": "f"}}));
    assert_eq!(named.demanded, Some(Demanded::Tool("f".to_owned())));
}

/// On this code, Anthropic's SDK sends the whole conversation instead; on any other refusal it gives up.
#[test]
fn a_thread_is_refused_in_the_words_that_the_sdk_knows() {
    let error = refusal_of(false, &json!({"thread": {"type": "create"}}));
    assert_eq!(
        reply::envelope(&error)["error"]["details"],
        json!({"error_code": "thread_unsupported_request"})
    );
    assert_eq!(refused(&json!({"thread": {"type": "create"}})), "thread");
    let other = refusal_of(false, &json!({"top_p": 0.5}));
    assert!(reply::envelope(&other)["error"].get("details").is_none());
    parse(&json!({"thread": null}));
}

#[test]
fn thinking_is_a_switch() {
    let switch = |thinking: Value| {
        let options = options_of(&parse(&json!({"thinking": thinking})).input);
        options
            .render
            .template_kwargs
            .get("enable_thinking")
            .cloned()
    };
    assert_eq!(switch(json!(null)), None);
    assert_eq!(switch(json!({"type": "disabled"})), Some(json!(false)));
    assert_eq!(
        switch(json!({"type": "adaptive", "display": "summarized"})),
        Some(json!(true))
    );
    // The answer has at most 20 tokens: a budget of 19 is all of them.
    assert_eq!(
        switch(json!({"type": "enabled", "budget_tokens": 19})),
        Some(json!(true))
    );
    let refused = |thinking: Value| refused(&json!({"thinking": thinking}));
    assert_eq!(
        refused(json!({"type": "enabled", "budget_tokens": 18})),
        "thinking.budget_tokens"
    );
    assert_eq!(
        refused(json!({"type": "enabled"})),
        "thinking.budget_tokens"
    );
    assert_eq!(refused(json!({"type": "between_tools"})), "thinking.type");
    assert_eq!(
        refused(json!({"type": "adaptive", "display": "short"})),
        "thinking.display"
    );
    assert_eq!(
        refused(json!({"type": "adaptive", "effort": 1})),
        "thinking.effort"
    );
    assert_eq!(refused(json!("on")), "thinking");
    // The rollout's own limit applies, too.
    let long = json!({"max_tokens": 32000, "thinking": {"type": "enabled", "budget_tokens": 1024}});
    parse(&long);
    let twice = json!({"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!(
        refusal_of(false, &twice).param.as_deref(),
        Some("chat_template_kwargs")
    );
}

#[test]
fn a_body_of_another_shape_is_explained() {
    for bytes in [
        "{",
        "[]",
        "null",
        "{\"messages\": 3}",
        "{\"messages\": []}",
        "",
    ] {
        let rules = Rules {
            sampling: &SAMPLING,
            evaluation: false,
        };
        let bytes = Bytes::from_static(bytes.as_bytes());
        assert!(read(&bytes, &rules, 0).is_err());
        assert!(read_input(&bytes, None).is_err());
    }
}

#[test]
fn a_count_takes_the_request_that_is_to_be_made() {
    let count = |changes: Value| read_input(&body(&changes).to_string().into(), None);
    let input = count(json!({"max_tokens": null, "system": "s"})).expect("is fine");
    assert_eq!(
        messages_of(&input),
        [Message::text("system", "s"), Message::user("hi")]
    );
    let input = count(
        json!({"temperature": 0.1, "stream": true, "thinking": {"type": "enabled", "budget_tokens": 1},
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}),
    );
    assert_eq!(messages_of(&input.expect("is fine")).len(), 2);
    let error = count(json!({"container": "c"})).expect_err("is refused");
    assert_eq!(error.param.as_deref(), Some("container"));
}

#[test]
fn thinking_of_a_request_counts_before_the_runs() {
    let own = json!({"enable_thinking": false, "style": "short"});
    let sampling = Sampling {
        template_kwargs: own.as_object().cloned().map(std::sync::Arc::new),
        ..SAMPLING
    };
    let of = |changes: Value| {
        let input = read_input(&body(&changes).to_string().into(), Some(&sampling));
        let Input::Messages { options, .. } = input.expect("is fine") else {
            panic!("messages were sent");
        };
        let options = options.read().expect("is fine");
        Value::Object(options.render.template_kwargs.clone())
    };
    assert_eq!(of(json!({})), own);
    let asked = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    assert_eq!(
        of(asked),
        json!({"enable_thinking": true, "style": "short"})
    );
}
