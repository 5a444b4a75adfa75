//! Answers of every family: what becomes of them.

use crate::families::{CITY, FAMILIES, Family, calls, check, parse_ids, renderer};
use primerl_render::{CallProblem, Content, Parsed};
use serde_json::Value;

fn parse(family: &'static Family, text: &str) -> Parsed {
    let renderer = renderer(family, true);
    let ids = renderer.tokenizer().encode(text).expect("encodes");
    let parsed = parse_ids(renderer, &ids, true, false);
    check(renderer, &ids, &parsed);
    parsed
}

#[test]
fn every_family_reads_its_call() {
    for family in FAMILIES {
        for special in [true, false] {
            let renderer = renderer(family, special);
            let text = format!("{}I look.{}", family.reasoning, family.call);
            let ids = renderer.tokenizer().encode(&text).expect("encodes");
            let parsed = parse_ids(renderer, &ids, true, false);
            check(renderer, &ids, &parsed);
            if !family.content_before_call {
                continue;
            }
            assert_eq!(
                calls(&parsed),
                [(family.id, "get_weather", family.arguments)],
                "{}: {:?}",
                family.name,
                parsed
            );
            assert_eq!(
                parsed.message.content,
                Content::Text("I look.".to_owned()),
                "{}",
                family.name
            );
            assert!(parsed.malformed.is_empty());
        }
    }
}

#[test]
fn a_call_alone_leaves_the_content_null() {
    for family in FAMILIES {
        let parsed = parse(family, &format!("{}{}", family.reasoning, family.call));
        assert_eq!(
            calls(&parsed),
            [(family.id, "get_weather", family.arguments)],
            "{}: {parsed:?}",
            family.name
        );
        assert_eq!(parsed.message.content, Content::Null, "{}", family.name);
        let thought = (!family.reasoning.is_empty()).then_some("Hm.\nOk");
        assert_eq!(
            parsed.message.reasoning_content.as_deref(),
            thought,
            "{}",
            family.name
        );
    }
}

#[test]
fn two_calls_in_a_row_are_two() {
    for family in FAMILIES {
        let parsed = parse(family, family.two_calls);
        let names: Vec<_> = calls(&parsed).iter().map(|call| call.1).collect();
        assert_eq!(
            names,
            ["get_weather", "clock"],
            "{}: {parsed:?}",
            family.name
        );
        assert!(parsed.malformed.is_empty(), "{}", family.name);
        assert_eq!(parsed.message.content, Content::Null, "{}", family.name);
    }
}

#[test]
fn a_call_cut_off_by_the_end_is_text_with_a_flag() {
    for family in FAMILIES {
        let cut = family.call.find(CITY).expect("the city");
        let text = &family.call[..cut + 3];
        let parsed = parse(family, text);
        assert_eq!(parsed.message.tool_calls, None, "{}", family.name);
        assert_eq!(parsed.malformed.len(), 1, "{}: {parsed:?}", family.name);
        let malformed = &parsed.malformed[0];
        assert_eq!(malformed.reason, CallProblem::CutOff, "{}", family.name);
        let shown = parsed.message.content.joined().expect("text");
        assert_eq!(shown, text[malformed.text_range.clone()], "{}", family.name);
    }
}

#[test]
fn a_broken_call_is_text_with_a_flag_and_the_next_call_counts() {
    for family in FAMILIES {
        let parsed = parse(family, family.broken);
        assert_eq!(
            parsed.message.tool_calls, None,
            "{}: {parsed:?}",
            family.name
        );
        assert_eq!(parsed.malformed.len(), 1, "{}: {parsed:?}", family.name);
        if family.marked {
            let parsed = parse(family, &format!("{}{}", family.broken, family.call));
            assert_eq!(calls(&parsed).len(), 1, "{}: {parsed:?}", family.name);
            assert_eq!(parsed.malformed.len(), 1, "{}: {parsed:?}", family.name);
        }
    }
}

#[test]
fn without_tools_calls_stay_text() {
    for family in FAMILIES {
        for special in [true, false] {
            let renderer = renderer(family, special);
            let ids = renderer.tokenizer().encode(family.call).expect("encodes");
            let parsed = parse_ids(renderer, &ids, false, false);
            check(renderer, &ids, &parsed);
            assert_eq!(
                parsed.message.content,
                Content::Text(family.call.to_owned()),
                "{}",
                family.name
            );
            assert!(parsed.message.tool_calls.is_none() && parsed.malformed.is_empty());
        }
    }
}

#[test]
fn reasoning_opened_by_the_prompt_goes_to_its_close_or_to_the_end() {
    let hermes = crate::families::named("hermes");
    let renderer = renderer(hermes, true);
    let encode = |text| renderer.tokenizer().encode(text).expect("encodes");
    for (text, reasoning, content) in [
        ("Hm.\n</think>\n\nYes", Some("Hm."), "Yes"),
        ("<think>\nHm.\n</think>\n\nYes", Some("Hm."), "Yes"),
        ("Hm.\n\n", Some("Hm.\n\n"), ""),
        (
            "Hm. <tool_call>{}</tool_call>",
            Some("Hm. <tool_call>{}</tool_call>"),
            "",
        ),
        ("\n</think>\n\n<think>", None, "<think>"),
    ] {
        let parsed = parse_ids(renderer, &encode(text), true, true);
        assert_eq!(
            parsed.message.reasoning_content.as_deref(),
            reasoning,
            "{text}"
        );
        assert_eq!(
            parsed.message.content.joined().expect("text"),
            content,
            "{text}"
        );
    }
    let plain = parse_ids(renderer, &encode("a </think> b"), true, false);
    assert_eq!(plain.message.reasoning_content, None);
    assert!(renderer.starts_in_reasoning(&encode("<|im_start|>assistant\n<think>\n")));
    assert!(!renderer.starts_in_reasoning(&encode("<think>\n\n</think>\n\n")));
    assert!(!renderer.starts_in_reasoning(&[]));
}

#[test]
fn bare_values_follow_the_schema() {
    let family = crate::families::named("qwen3_coder");
    let parameter = |key: &str, value: &str| format!("<parameter={key}>\n{value}\n</parameter>\n");
    let arguments = |parameters: &str| {
        let text =
            format!("<tool_call>\n<function=get_weather>\n{parameters}</function>\n</tool_call>");
        let parsed = parse(family, &text);
        calls(&parsed)[0].2.to_owned()
    };
    for (key, value, expected) in [
        ("city", "12", "\"12\""),
        ("city", " two\nlines ", "\" two\\nlines \""),
        ("city", "null", "\"null\""),
        ("days", "12", "12"),
        ("days", "twelve", "\"twelve\""),
        ("exact", "True", "true"),
        ("exact", "false", "false"),
        ("area", "{\"a\": [1]}", "{\"a\": [1]}"),
        ("area", "{'a': (1, None)}", "{\"a\": [1, null]}"),
        ("note", "None", "null"),
        ("note", "7", "\"7\""),
        ("unknown", "7", "7"),
        ("unknown", "seven", "\"seven\""),
    ] {
        let expected = format!("{{{}: {expected}}}", Value::from(key));
        assert_eq!(arguments(&parameter(key, value)), expected);
    }
    let twice = parameter("days", "1") + &parameter("city", "x") + &parameter("days", "2");
    assert_eq!(arguments(&twice), "{\"days\": 2, \"city\": \"x\"}");
}

#[test]
fn harmony_channels() {
    let family = crate::families::named("harmony");
    let text = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look. \
        <|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>";
    let parsed = parse(family, text);
    assert_eq!(parsed.message.reasoning_content.as_deref(), Some("Hm."));
    assert_eq!(
        parsed.message.content,
        Content::Text("I look. Done.".to_owned())
    );
    let plain = parse(family, "No header at all.");
    assert_eq!(
        plain.message.content,
        Content::Text("No header at all.".to_owned())
    );
    let cut = parse(
        family,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assis",
    );
    assert_eq!(cut.message.content, Content::Text(String::new()));
    // The stop token <|call|> is not in the text; complete arguments are enough.
    let open = parse(family, family.call.trim_end_matches("<|call|>"));
    assert_eq!(calls(&open).len(), 1);
}

#[test]
fn plain_text_that_resembles_a_call_is_an_answer() {
    for (name, text) in [
        ("llama3_json", "{\"name\": \"Ada\", \"age\": 36}"),
        ("llama3_json", "{not json"),
        (
            "llama3_json",
            "Use {\"name\": \"f\", \"parameters\": {}} for it.",
        ),
        ("llama3_pythonic", "[a link](https://example.org) and more"),
        ("llama3_pythonic", "[]"),
        ("llama3_pythonic", "[don't"),
        ("hermes", "a < b <tool_cal"),
    ] {
        let parsed = parse(crate::families::named(name), text);
        assert_eq!(
            parsed.message.content,
            Content::Text(text.to_owned()),
            "{name}"
        );
        assert!(parsed.message.tool_calls.is_none() && parsed.malformed.is_empty());
    }
}

#[test]
fn arguments_keep_the_text_that_was_sampled() {
    let family = crate::families::named("hermes");
    let arguments = "{ \"b\":1.50,\"a\" : \"\\u00e9 é, {x}\" }";
    let text =
        format!("<tool_call>\n{{\"arguments\": {arguments}, \"name\": \"f\"}}\n</tool_call>");
    assert_eq!(calls(&parse(family, &text)), [(None, "f", arguments)]);
    for (call, reason) in [
        ("[]", CallProblem::NotAnObject("call")),
        ("{\"arguments\": {}}", CallProblem::NoName),
        ("{\"name\": \"\"}", CallProblem::NoName),
        (
            "{\"name\": \"f\", \"arguments\": \"{}\"}",
            CallProblem::NotAnObject("value of the arguments"),
        ),
    ] {
        let text = format!("<tool_call>{call}</tool_call>");
        let parsed = parse(family, &text);
        assert_eq!(parsed.malformed[0].reason, reason);
        assert_eq!(parsed.message.content, Content::Text(text));
    }
}

#[test]
fn an_unknown_parser_is_an_error_that_lists_the_known() {
    let error = crate::families::load("hermse", "think")
        .err()
        .expect("cannot load");
    let text = error.to_string();
    assert!(
        text.contains("\"hermse\"") && text.contains("hermes, qwen3_coder"),
        "{text}"
    );
}
