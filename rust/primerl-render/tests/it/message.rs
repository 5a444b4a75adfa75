//! Messages on the wire, and when two of them are the same.

use primerl_render::{Content, Message, answer_words, canonical};
use serde_json::{Value, json};

fn message(value: Value) -> Message {
    serde_json::from_value(value).expect("a message")
}

fn same(left: Value, right: Value) -> bool {
    canonical(&message(left)) == canonical(&message(right))
}

#[test]
fn keeps_what_came_over_the_wire() {
    for value in [
        json!({"role": "user", "content": "x"}),
        json!({"role": "assistant", "content": null}),
        json!({"role": "assistant"}),
        json!({"role": "user", "content": [{"type": "text", "text": "x"}]}),
        json!({"role": "assistant", "content": "x", "reasoning_content": "y", "refusal": null, "thinking": "z"}),
        json!({"role": "tool", "content": "x", "tool_call_id": "1", "name": "f"}),
        json!({"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, "index": 0}]}),
    ] {
        assert_eq!(
            serde_json::to_value(message(value.clone())).expect("JSON"),
            value
        );
    }
}

#[test]
fn tells_absent_null_and_empty_content_apart() {
    assert_eq!(
        message(json!({"role": "assistant"})).content,
        Content::Absent
    );
    assert_eq!(
        message(json!({"role": "assistant", "content": null})).content,
        Content::Null
    );
    assert_eq!(
        message(json!({"role": "assistant", "content": ""})).content,
        Content::Text(String::new())
    );
}

#[test]
fn the_meaning_of_content_counts_not_its_form() {
    let assistant = |content: Value| json!({"role": "assistant", "content": content});
    assert!(same(assistant(json!(null)), assistant(json!(""))));
    assert!(same(json!({"role": "assistant"}), assistant(json!([]))));
    assert!(same(
        assistant(json!([{"type": "text", "text": "ab"}])),
        assistant(json!("ab"))
    ));
    assert!(same(
        assistant(json!([{"type": "text", "text": "a"}, {"type": "output_text", "text": "b"}])),
        assistant(json!("a\nb"))
    ));
    assert!(!same(assistant(json!("a")), assistant(json!("a "))));
    assert!(!same(
        assistant(json!("a")),
        json!({"role": "user", "content": "a"})
    ));
    let image = |url: &str| assistant(json!([{"type": "image_url", "image_url": {"url": url}}]));
    assert!(!same(image("a"), image("b")));
    assert!(!same(image("a"), assistant(json!(""))));
}

#[test]
fn tool_arguments_compare_as_values() {
    let with = |arguments: Value| {
        json!({"role": "assistant", "content": null, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]})
    };
    assert!(same(
        with(json!("{\"a\": 1, \"b\": [true, null]}")),
        with(json!("{\"b\":[true,null],\"a\":1}"))
    ));
    assert!(same(
        with(json!("{\"a\": {\"y\": 1, \"x\": 2}}")),
        with(json!({"a": {"x": 2, "y": 1}}))
    ));
    assert!(!same(with(json!("{\"a\": 1}")), with(json!("{\"a\": 2}"))));
    assert!(
        !same(with(json!("{\"a\": 1")), with(json!("{\"a\":1"))),
        "broken JSON is text"
    );
}

#[test]
fn left_overs_of_streaming_do_not_count_but_calls_do() {
    let call =
        |id: &str, name: &str| json!({"id": id, "function": {"name": name, "arguments": "{}"}});
    let mut indexed = call("1", "f");
    indexed["index"] = json!(0);
    indexed["type"] = json!("function");
    let with = |calls: Value| json!({"role": "assistant", "content": "x", "tool_calls": calls});
    assert!(same(with(json!([indexed])), with(json!([call("1", "f")]))));
    assert!(!same(
        with(json!([call("1", "f")])),
        with(json!([call("1", "g")]))
    ));
    assert!(!same(
        with(json!([call("1", "f")])),
        with(json!([call("2", "f")]))
    ));
    assert!(!same(
        with(json!([call("1", "f")])),
        with(json!([call("1", "f"), call("1", "f")]))
    ));
    assert!(same(
        with(json!([])),
        json!({"role": "assistant", "content": "x"})
    ));
}

#[test]
fn unknown_fields_count_except_on_our_own_answers() {
    assert!(same(
        json!({"role": "assistant", "content": "x", "refusal": null, "annotations": []}),
        json!({"role": "assistant", "content": "x"})
    ));
    assert!(same(
        json!({"role": "user", "content": "x", "audio": null}),
        json!({"role": "user", "content": "x"})
    ));
    assert!(!same(
        json!({"role": "user", "content": "x", "lang": "de"}),
        json!({"role": "user", "content": "x"})
    ));
    assert!(!same(
        json!({"role": "assistant", "content": "x", "reasoning_content": "y"}),
        json!({"role": "assistant", "content": "x"})
    ));
}

#[test]
fn no_content_can_imitate_a_field() {
    let user = message(json!({"role": "user", "content": "a", "name": "b"}));
    let joined = String::from_utf8_lossy(&canonical(&user)).into_owned();
    for content in [joined.as_str(), "an\u{1}\0\0\0\0\0\0\0b", "a\nb"] {
        assert_ne!(canonical(&Message::user(content)), canonical(&user));
    }
}

#[test]
fn a_wrong_shape_says_which_field() {
    let error = |value: Value| {
        serde_json::from_value::<Message>(value)
            .expect_err("refused")
            .to_string()
    };
    assert!(error(json!({"content": "x"})).contains("missing field `role`"));
    assert!(
        error(json!({"role": "user", "content": 1}))
            .contains("content must be a string, null, or a list")
    );
}

#[test]
fn a_number_in_an_answers_arguments_counts_by_its_value() {
    let said = |arguments: Value| {
        let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}});
        answer_words(&message(json!({"role": "assistant", "tool_calls": [call]})))
    };
    let two = said(json!({"x": [2, 0.5], "y": {"z": -1000}}));
    for same in [
        r#"{"x": [2.0, 5e-1], "y": {"z": -1e3}}"#,
        r#"{"y": {"z": -1000.0}, "x": [2, 0.5]}"#,
    ] {
        assert_eq!(said(same.into()), two, "{same}");
    }
    for other in [
        r#"{"x": [2.5, 0.5], "y": {"z": -1000}}"#,
        r#"{"x": ["2", 0.5], "y": {"z": -1000}}"#,
        r#"{"x": [2, 0.5], "y": {"z": 1000}}"#,
    ] {
        assert_ne!(said(other.into()), two, "{other}");
    }
    // A client in JavaScript has one floating-point number for both, and sends back the second.
    for (sampled, sent) in [
        ("9007199254740993", "9007199254740992"),
        ("18446744073709551615", "18446744073709552000"),
        ("123456789012345678901234567890", "1.2345678901234568e+29"),
    ] {
        assert_eq!(said(sampled.into()), said(sent.into()), "{sampled}");
    }
    assert_ne!(
        said("9007199254740991".into()),
        said("9007199254740990".into())
    );
    assert_eq!(said("no JSON 2.0".into()), said("no JSON 2.0".into()));
    assert_ne!(said("no JSON 2.0".into()), said("no JSON 2".into()));
}
