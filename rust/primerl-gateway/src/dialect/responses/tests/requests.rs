use super::*;

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
            json!({"format": {"type": "grammar"}}),
            "text.format",
        ),
        ("tool_choice", json!("always"), "tool_choice"),
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
fn the_call_that_was_demanded_is_shown() {
    let named = json!({"type": "function", "name": "f"});
    for choice in [named, json!("required"), json!("auto"), json!("none")] {
        let changes = json!({"tool_choice": choice});
        let (request, reply) = read_in(&Arc::default(), false, changes).expect("is fine");
        let answer = answer("x", Message::assistant("a"), FinishReason::Stop);
        let shown = reply.whole(&answer, tiny().tokenizer());
        let shown: Value = serde_json::from_slice(&shown).expect("is JSON");
        assert_eq!(shown["tool_choice"], choice);
        let demands = choice != "auto" && choice != "none";
        assert_eq!(request.sampling.demanded.is_some(), demands);
    }
}

#[test]
fn a_schema_may_be_asked_for() {
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
        // By their order: ids of another server, or none.
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
        // litellm's bridge from /messages: a turn's calls, then its text.
        (
            json!([call("", "c1"), {"role": "assistant", "content": "a"}, output]),
            vec![called(None, text("a"), &[("c1", "{}")]), tool.clone()],
        ),
        // A response's own ids show that these are two turns.
        (
            json!([call("fc_7-0_0", "c1"), said("msg_8-0_0")]),
            vec![
                called(None, Content::Null, &[("c1", "{}")]),
                Message::assistant("a"),
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
