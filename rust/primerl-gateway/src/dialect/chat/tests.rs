use super::super::testing::{self, SAMPLING, chunks};
use super::*;
use crate::Sampling;
use crate::sampling::Demanded;
use primerl_core::Truncation;
use primerl_render::Message;
use primerl_render::testing::tiny;

fn read_as(evaluation: bool, changes: Value) -> Result<(TurnRequest, Box<dyn Reply>), ApiError> {
    let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    for (name, value) in changes.as_object().expect("an object") {
        body[name] = value.clone();
    }
    let rules = Rules {
        sampling: &SAMPLING,
        evaluation,
    };
    let (request, _) = read(&body.to_string().into(), &rules, 0, None)?;
    Ok(request)
}

fn parse(changes: Value) -> Result<TurnRequest, ApiError> {
    read_as(false, changes).map(|(request, _)| request)
}

fn refusal(evaluation: bool, changes: Value) -> ApiError {
    match read_as(evaluation, changes) {
        Ok((request, _)) => panic!("{request:?} was taken"),
        Err(error) => error,
    }
}

#[test]
fn the_answer_is_capped_by_the_rollout_and_by_the_request() {
    let capped = |changes| parse(changes).expect("is fine").sampling.max_tokens;
    assert_eq!(capped(json!({})), 28);
    assert_eq!(capped(json!({"max_tokens": 100})), 28);
    assert_eq!(
        capped(json!({"max_tokens": 9, "max_completion_tokens": 5})),
        5
    );
    assert!(parse(json!({"max_tokens": 0})).is_err());
}

#[test]
fn fields_that_change_the_distribution_are_named() {
    for (name, value) in [
        ("top_p", json!(0.9)),
        ("top_k", json!(5)),
        ("min_p", json!(0.1)),
        ("temperature", json!(0.7)),
        ("logit_bias", json!({"5": 1})),
        ("frequency_penalty", json!(0.5)),
        ("tool_choice", json!("always")),
        ("tool_choice", json!({"type": "allowed_tools"})),
        ("response_format", json!({"type": "shoe"})),
        ("guided_regex", json!("a+")),
        ("top_logprobs", json!(3)),
        ("n", json!(0)),
        ("stop", json!([""])),
        ("reasoning_effort", json!("high")),
    ] {
        let error = refusal(false, json!({name: value}));
        assert_eq!(error.param.as_deref(), Some(name));
        assert_eq!(error.status, 400);
    }
}

#[test]
fn an_evaluation_samples_as_it_likes() {
    let changes = json!({"temperature": 0.0, "top_p": 0.9, "top_k": 5,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}});
    let (request, _) = read_as(true, changes).expect("is fine");
    assert_eq!(request.sampling.temperature, 0.0);
    assert_eq!(request.sampling.truncation.top_p, 0.9);
    assert_eq!(request.sampling.truncation.top_k, 5);
    assert_eq!(
        request.sampling.structured_outputs,
        Some(json!({"json": {"type": "object"}}))
    );
    let error = refusal(true, json!({"frequency_penalty": 0.5}));
    assert_eq!(error.param.as_deref(), Some("frequency_penalty"));
}

#[test]
fn a_training_rollout_truncates_where_that_is_replayed() {
    let own = Truncation {
        top_p: 0.9,
        top_k: 40,
        min_p: 0.0,
    };
    let sampling = Sampling {
        replayed: Some(own),
        ..SAMPLING
    };
    let of = |changes: Value, evaluation| {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in changes.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let rules = Rules {
            sampling: &sampling,
            evaluation,
        };
        let read = read(&body.to_string().into(), &rules, 0, None);
        read.map(|((request, _), _)| request.sampling.truncation)
    };
    let taken = |changes, evaluation| of(changes, evaluation).expect("is fine");
    assert_eq!(taken(json!({}), false), own, "the run's own");
    let asked = json!({"top_p": 1, "top_k": -1, "min_p": 0.25});
    let expected = Truncation {
        min_p: 0.25,
        ..Truncation::default()
    };
    assert_eq!(taken(asked, false), expected, "as asked");
    let part = Truncation { top_k: 5, ..own };
    assert_eq!(taken(json!({"top_k": 5}), false), part);
    assert_eq!(taken(json!({}), true), Truncation::default());
    for (name, value) in [
        ("top_p", json!(0)),
        ("top_p", json!(1.5)),
        ("top_k", json!(2.5)),
        ("top_k", json!(-2)),
        ("min_p", json!(-0.1)),
        ("temperature", json!(0.7)),
    ] {
        let error = of(json!({name: value}), false).expect_err("is out of bounds");
        assert_eq!(error.param.as_deref(), Some(name));
    }
    let refused = refusal(false, json!({"min_p": 0.1}));
    assert!(refused.message.contains("sampling.truncated = \"replay\""));
}

#[test]
fn neutral_and_harmless_fields_pass() {
    let request = parse(json!({
        "n": 2, "top_p": 1, "top_k": -1, "min_p": 0.0, "temperature": 1.0, "stop": "x", "logit_bias": {},
        "tool_choice": "auto", "response_format": {"type": "text"}, "user": "u", "seed": 3, "logprobs": true,
        "top_logprobs": 2, "presence_penalty": null, "parallel_tool_calls": false, "stream_options": null
    }))
    .expect("is fine");
    assert_eq!(request.choices, 2);
    assert_eq!(request.sampling.stop, ["x"]);
    assert_eq!(request.sampling.logprobs, Some(2));
    assert_eq!(request.parse, Parse::Message { one_call: true });
}

#[test]
fn a_training_rollout_may_ask_for_a_format_or_a_call() {
    let asked = |changes| parse(changes).expect("is fine").sampling;
    let format = asked(json!({"response_format": {"type": "json_object"}}));
    assert_eq!(
        format.structured_outputs,
        Some(json!({"json_object": true}))
    );
    let own = asked(json!({"structured_outputs": {"regex": "a+"}}));
    assert_eq!(own.structured_outputs, Some(json!({"regex": "a+"})));
    assert_eq!(own.demanded, None);
    let any = asked(json!({"tool_choice": "required"}));
    assert_eq!(any.demanded, Some(Demanded::Any));
    let named = json!({"type": "function", "function": {"name": "f"}});
    let named = asked(json!({"tool_choice": named}));
    assert_eq!(named.demanded, Some(Demanded::Tool("f".to_owned())));
}

#[test]
fn tools_are_left_out_where_the_client_says_so() {
    let tools = |choice: &str| {
        let tools = json!([{"type": "function", "function": {"name": "f"}}]);
        let request = parse(json!({"tools": tools, "tool_choice": choice})).expect("is fine");
        match request.input {
            Input::Messages { options, .. } => options.read().expect("reads").render.tools.clone(),
            other => panic!("{other:?}"),
        }
    };
    assert!(tools("auto").is_some());
    assert!(tools("none").is_none());
}

#[test]
fn a_body_of_another_shape_is_explained() {
    assert!(
        refusal(false, json!({"messages": []}))
            .message
            .contains("messages")
    );
    let request = parse(json!({"messages": [{"content": "x"}]})).expect("is read later");
    match request.input {
        Input::Messages { messages, .. } => {
            let error = messages[0].read(0).expect_err("has no role");
            assert!(error.message.contains("messages[0]") && error.message.contains("role"));
        }
        other => panic!("{other:?}"),
    }
    let rules = Rules {
        sampling: &SAMPLING,
        evaluation: false,
    };
    for bytes in ["{", "[]", "{\"messages\": 3}", "null"] {
        assert!(read(&Bytes::from_static(bytes.as_bytes()), &rules, 0, None).is_err());
    }
}

#[test]
fn a_field_that_is_given_twice_is_refused() {
    let rules = Rules {
        sampling: &SAMPLING,
        evaluation: false,
    };
    let messages = r#""messages": [{"role": "user", "content": "hi"}]"#;
    for (name, twice) in [
        ("messages", format!("{messages}, {messages}")),
        (
            "tools",
            format!(r#"{messages}, "tools": [{{}}], "tools": []"#),
        ),
        (
            "chat_template_kwargs",
            format!(r#"{messages}, "chat_template_kwargs": {{}}, "chat_template_kwargs": {{}}"#),
        ),
        ("n", format!(r#"{messages}, "n": 1, "n": 2"#)),
    ] {
        let body = format!("{{{twice}}}");
        let error = read(&body.into(), &rules, 0, None).err();
        let error = error.expect("is refused");
        assert!(error.message.contains(&format!("`{name}`")), "{error:?}");
    }
}

#[test]
fn tools_and_documents_are_objects() {
    for name in ["tools", "documents"] {
        let request = parse(json!({name: [{"type": "function"}, "x"]})).expect("is not read yet");
        let Input::Messages { options, .. } = request.input else {
            panic!("has messages");
        };
        let error = options.read().expect_err("is refused");
        assert_eq!(error.param, Some(format!("{name}[1]")));
    }
}

fn answer() -> Answer {
    let mut answer = testing::answer(Message::assistant("hi"), FinishReason::Stop);
    answer.head.prompt = Some([1, 2, 3].into());
    answer
}

const FORM: Form = Form {
    stream: StreamForm {
        stream: false,
        include_usage: true,
    },
    logprobs: true,
    token_ids: true,
    tokens_as_ids: true,
};

#[test]
fn a_whole_answer_has_openais_shape() {
    let renderer = tiny();
    let body = FORM.whole(&answer(), renderer.tokenizer());
    let body: Value = serde_json::from_slice(&body).expect("is JSON");
    assert_eq!(body["object"], "chat.completion");
    let choice = &body["choices"][0];
    assert_eq!(
        choice["message"],
        json!({"role": "assistant", "content": "hi"})
    );
    assert_eq!(choice["finish_reason"], "stop");
    assert_eq!(choice["token_ids"], json!([4, 256]));
    assert_eq!(body["prompt_token_ids"], json!([1, 2, 3]));
    assert_eq!(choice["logprobs"]["content"][1]["token"], "token_id:256");
    assert_eq!(
        body["usage"],
        json!({"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5})
    );
    let as_text = Form {
        tokens_as_ids: false,
        ..FORM
    };
    let body = as_text.whole(&answer(), renderer.tokenizer());
    let body: Value = serde_json::from_slice(&body).expect("is JSON");
    let token = &body["choices"][0]["logprobs"]["content"][1];
    assert_eq!(token["token"], "<|im_end|>");
    assert_eq!(token["bytes"], json!("<|im_end|>".as_bytes()));
}

#[test]
fn events_end_with_done_and_carry_the_usage() {
    let renderer = tiny();
    let mut events = FORM.events();
    let (answer, mut out) = (answer(), Vec::new());
    events.begin(&answer.head, &mut out);
    let deltas = [Delta::Content("h".into()), Delta::Content("\"i\n".into())];
    let tokens = answer.choices[0].tokens();
    events.progress(0, &deltas, tokens, renderer.tokenizer(), &mut out);
    events.end(&answer, &mut out);
    let chunks = chunks(out);
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(chunks[0]["prompt_token_ids"], json!([1, 2, 3]));
    assert_eq!(chunks[1]["choices"][0]["delta"]["content"], "h");
    assert_eq!(chunks[1]["choices"][0]["token_ids"], json!([4, 256]));
    assert_eq!(chunks[2]["choices"][0]["delta"]["content"], "\"i\n");
    assert_eq!(chunks[2]["choices"][0]["logprobs"], Value::Null);
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "stop");
    assert_eq!(chunks[4]["usage"]["total_tokens"], 5);
    assert_eq!(chunks[4]["choices"], json!([]));
}

#[test]
fn the_runs_template_variables_are_added_to_the_requests() {
    let own = json!({"enable_thinking": false, "style": "short"});
    let sampling = Sampling {
        template_kwargs: own.as_object().cloned().map(Arc::new),
        ..SAMPLING
    };
    let of = |sampling: &Sampling, changes: Value| {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        for (name, value) in changes.as_object().expect("an object") {
            body[name] = value.clone();
        }
        let rules = Rules {
            sampling,
            evaluation: false,
        };
        let (request, _) = read(&body.to_string().into(), &rules, 0, None)?.0;
        let Input::Messages { options, .. } = request.input else {
            panic!("messages were sent");
        };
        Ok::<_, ApiError>(Value::Object(
            options.read()?.render.template_kwargs.clone(),
        ))
    };
    assert_eq!(of(&sampling, json!({})).expect("is fine"), own);
    let asked = json!({"chat_template_kwargs": {"enable_thinking": true, "more": 1}});
    assert_eq!(
        of(&sampling, asked.clone()).expect("is fine"),
        json!({"enable_thinking": true, "style": "short", "more": 1})
    );
    assert_eq!(
        of(&SAMPLING, asked).expect("is fine"),
        json!({"enable_thinking": true, "more": 1})
    );
    let error = of(&sampling, json!({"chat_template_kwargs": 3})).expect_err("is refused");
    assert_eq!(error.param.as_deref(), Some("chat_template_kwargs"));
}
