//! Messages and tools in the form in which the template gets them.

use super::*;
use crate::request::{answer_key, message_key};

const CALL: &str = "abc123xyz";

fn read_messages(messages: Value) -> Vec<Message> {
    messages_of(&parse(&json!({"messages": messages})).input)
}

fn tool_use(input: Value) -> Value {
    json!({"type": "tool_use", "id": CALL, "name": "f", "input": input})
}

fn result(content: Value) -> Value {
    json!({"type": "tool_result", "tool_use_id": CALL, "content": content})
}

fn refused_in(role: &str, block: Value) -> String {
    let first = json!({"role": "user", "content": "go"});
    let call = json!({"role": "assistant", "content": [tool_use(json!({}))]});
    let messages = json!([first, call, {"role": role, "content": [block]}, first]);
    refused(&json!({"messages": messages}))
}

#[test]
fn texts_may_be_blocks() {
    let text = |text: &str| json!({"type": "text", "text": text, "cache_control": {"type": "ephemeral"}, "citations": null});
    let request = parse(
        &json!({"system": [text("a"), text(""), text("b")], "messages": [
            {"role": "user", "content": [text("c"), text("d")]},
            {"role": "user", "content": "e"},
            {"role": "system", "content": [text("f")]},
            {"role": "user", "content": ""}
        ]}),
    );
    let expected = [
        Message::text("system", "a\nb"),
        Message::user("c\nd\ne"),
        Message::text("system", "f"),
        Message::user(""),
    ];
    assert_eq!(messages_of(&request.input), expected);
    let without = parse(&json!({"system": ""}));
    assert_eq!(messages_of(&without.input), [Message::user("hi")]);
}

#[test]
fn an_answers_blocks_are_one_message() {
    let messages = read_messages(json!([
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm. ", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "thinking", "thinking": "Yes.", "signature": ""},
            {"type": "text", "text": "I "},
            {"type": "text", "text": "will."},
        ]},
        {"role": "assistant", "content": [tool_use(json!({"b": 1, "a": [2]}))]},
        {"role": "user", "content": [result(json!("done"))]}
    ]));
    let answer = &messages[1];
    assert_eq!(answer.content, Content::Text("I will.".into()));
    assert_eq!(answer.reasoning_content.as_deref(), Some("Hm. Yes."));
    let calls = answer.tool_calls.as_deref().expect("calls");
    assert_eq!(calls[0].id.as_deref(), Some(CALL));
    assert_eq!(calls[0].function.arguments, json!({"b": 1, "a": [2]}));
    assert_eq!(messages.len(), 3);
    assert_eq!(messages[2].role, "tool");
    assert_eq!(messages[2].name.as_deref(), Some("f"));
    assert_eq!(messages[2].tool_call_id.as_deref(), Some(CALL));
}

/// Answers as our parsers produce them, and as clients send them back.
#[test]
fn our_answers_are_recognised() {
    for (text, arguments) in [
        ("", json!({"a": 1})),
        ("I call.", json!("{\"a\":  1}")),
        ("", json!("{\"a\": ")),
        ("", json!([1])),
        ("Words only.", Value::Null),
    ] {
        let mut ours = Message::assistant(text);
        ours.reasoning_content = Some("Hm.".into());
        let mut content = vec![json!({"type": "thinking", "thinking": "Hm.", "signature": "x"})];
        if !text.is_empty() {
            content.push(json!({"type": "text", "text": text}));
        }
        if !arguments.is_null() {
            content.push(tool_use(blocks::input_of(&arguments)));
            let call = json!({"function": {"name": "f", "arguments": arguments}});
            ours.tool_calls = Some(vec![serde_json::from_value(call).expect("a call")]);
        }
        let messages = read_messages(json!([
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": content},
            {"role": "user", "content": "on"}
        ]));
        assert_eq!(
            message_key(&messages[1]).answer,
            Some(answer_key(&ours)),
            "{arguments}"
        );
    }
    let empty = read_messages(json!([{"role": "user", "content": "go"},
        {"role": "assistant", "content": []}, {"role": "user", "content": "on"}]));
    assert_eq!(answer_key(&empty[1]), answer_key(&Message::assistant("")));
}

#[test]
fn results_and_words_keep_their_order() {
    let call = |id: &str| json!({"type": "tool_use", "id": id, "name": id, "input": {}, "caller": {"type": "direct"}});
    let messages = read_messages(json!([
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [call("one"), call("two")]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "two", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"type": "tool_result", "tool_use_id": "one", "is_error": true, "cache_control": null},
            {"type": "text", "text": "Go on."},
        ]}
    ]));
    assert_eq!(messages[1].content, Content::Null);
    let told: Vec<(&str, Option<&str>, &Content)> = messages[2..]
        .iter()
        .map(|message| (&*message.role, message.name.as_deref(), &message.content))
        .collect();
    let [ab, empty, words] = ["a\nb", "", "Go on."].map(|text| Content::Text(text.into()));
    assert_eq!(
        told,
        [
            ("tool", Some("two"), &ab),
            ("tool", Some("one"), &empty),
            ("user", None, &words)
        ]
    );
    assert_eq!(messages[3].extra.get("is_error"), Some(&json!(true)));
    assert!(messages[2].extra.is_empty());
}

#[test]
fn blocks_that_no_template_knows_are_named() {
    for kind in [
        "image",
        "document",
        "search_result",
        "container_upload",
        "tool_use",
        "thinking",
        "mystery",
    ] {
        let block = json!({"type": kind, "source": {}});
        assert_eq!(
            refused_in("user", block),
            "messages.2.content.0.type",
            "{kind}"
        );
    }
    for kind in [
        "server_tool_use",
        "web_search_tool_result",
        "tool_result",
        "image",
    ] {
        assert_eq!(
            refused_in("assistant", json!({"type": kind})),
            "messages.2.content.0.type"
        );
    }
    let image = json!([{"type": "text", "text": "x"}, {"type": "image", "source": {}}]);
    assert_eq!(
        refused_in("user", result(image)),
        "messages.2.content.0.content.1.type"
    );
    assert_eq!(
        refused_in("user", result(json!(5))),
        "messages.2.content.0.content"
    );
    let refused_user = |block: Value| refused_in("user", block);
    assert_eq!(refused_user(json!("text")), "messages.2.content.0");
    assert_eq!(
        refused_user(json!({"text": "x"})),
        "messages.2.content.0.type"
    );
    assert_eq!(
        refused_user(json!({"type": "text"})),
        "messages.2.content.0.text"
    );
    let cited = json!({"type": "text", "text": "x", "citations": [{"type": "char_location"}]});
    assert_eq!(refused_user(cited), "messages.2.content.0.citations");
    let foreign = json!({"type": "tool_result", "tool_use_id": "other"});
    assert_eq!(refused_user(foreign), "messages.2.content.0.tool_use_id");
    assert_eq!(
        refused_in("assistant", tool_use(json!("{}"))),
        "messages.2.content.0.input"
    );
    let called = json!({"type": "tool_use", "id": "i", "name": "f", "input": {}, "caller": {"type": "code"}});
    assert_eq!(
        refused_in("assistant", called),
        "messages.2.content.0.caller"
    );
    let unsigned = json!({"type": "thinking", "thinking": "x", "signature": 5});
    assert_eq!(
        refused_in("assistant", unsigned),
        "messages.2.content.0.signature"
    );
}

#[test]
fn messages_of_another_shape_are_named() {
    for (message, param) in [
        (json!("hi"), "messages.0"),
        (json!({"content": "hi"}), "messages.0.role"),
        (json!({"role": "tool", "content": "hi"}), "messages.0.role"),
        (json!({"role": "user"}), "messages.0.content"),
        (json!({"role": "user", "content": []}), "messages.0.content"),
        (json!({"role": "user", "content": 5}), "messages.0.content"),
        (
            json!({"role": "user", "content": "hi", "name": "n"}),
            "messages.0.name",
        ),
    ] {
        assert_eq!(refused(&json!({"messages": [message]})), param);
    }
    assert_eq!(refused(&json!({"system": 5})), "system");
    let image = json!([{"type": "image", "source": {}}]);
    assert_eq!(refused(&json!({"system": image})), "system.0.type");
    let prefill = json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
    assert_eq!(refused(&json!({"messages": prefill})), "messages");
}

#[test]
fn tools_become_functions() {
    let tool = json!({"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom",
        "cache_control": {"type": "ephemeral"}, "strict": false, "eager_input_streaming": true,
        "allowed_callers": ["direct"], "defer_loading": false, "input_examples": []});
    let bare = json!({"name": "g", "input_schema": {}, "type": null});
    let tools = |choice: Value| {
        let request = parse(&json!({"tools": [tool, bare], "tool_choice": choice}));
        (
            options_of(&request.input).render.tools.clone(),
            request.parse,
        )
    };
    let functions = vec![
        json!({"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}),
        json!({"type": "function", "function": {"name": "g", "parameters": {}}}),
    ];
    let several = Parse::Message { one_call: false };
    assert_eq!(tools(Value::Null), (Some(functions.clone()), several));
    assert_eq!(tools(json!({"type": "none"})), (None, several));
    let one = json!({"type": "auto", "disable_parallel_tool_use": true});
    assert_eq!(
        tools(one),
        (Some(functions), Parse::Message { one_call: true })
    );
}

#[test]
fn tools_that_cannot_be_offered_are_named() {
    let refused_tool = |changes: Value| {
        let mut tool = json!({"name": "f", "input_schema": {}});
        for (name, value) in changes.as_object().expect("an object") {
            tool[name] = value.clone();
        }
        refused(&json!({"tools": [tool]}))
    };
    for (name, value) in [
        ("type", json!("web_search_20250305")),
        ("type", json!("bash_20250124")),
        ("name", Value::Null),
        ("input_schema", Value::Null),
        ("input_schema", json!("{}")),
        ("strict", json!(true)),
        ("defer_loading", json!(true)),
        ("input_examples", json!([{}])),
        ("allowed_callers", json!(["code_execution_20250825"])),
        ("mystery", json!(1)),
    ] {
        assert_eq!(
            refused_tool(json!({name: value})),
            format!("tools.0.{name}")
        );
    }
    assert_eq!(refused(&json!({"tools": ["f"]})), "tools.0");
    assert_eq!(refused(&json!({"tools": {}})), "tools");
    assert_eq!(refused(&json!({"tool_choice": "auto"})), "tool_choice");
    assert_eq!(
        refused(&json!({"tool_choice": {"type": "auto", "x": 1}})),
        "tool_choice.x"
    );
}
