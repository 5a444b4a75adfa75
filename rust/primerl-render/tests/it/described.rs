//! Parsers that are data read what ours read.

use crate::families::{Family, calls, check, load_with, named, parse_ids, renderer, tokens};
use primerl_render::{Content, Description, ParserSetting, Renderer};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::LazyLock;

/// Formats of ours, as another project would describe them.
fn descriptions() -> [(&'static str, Value); 7] {
    [
        (
            "hermes",
            json!({"format": "json", "call": ["<tool_call>", "</tool_call>"]}),
        ),
        (
            "glm",
            json!({"format": "tagged", "call": ["<tool_call>", "</tool_call>"],
                "tagged": {"key": ["<arg_key>", "</arg_key>"], "value": ["<arg_value>", "</arg_value>"]}}),
        ),
        (
            "minimax",
            json!({"format": "tagged", "calls": ["<minimax:tool_call>", "</minimax:tool_call>"],
                "call": ["<invoke name=", "</invoke>"],
                "tagged": {"name_end": ">", "key": ["<parameter name=", ">"], "value": ["", "</parameter>"], "quoted": true}}),
        ),
        (
            "cohere",
            json!({"format": "json", "calls": ["<|START_ACTION|>", "<|END_ACTION|>"],
                "json": {"name": "tool_name"}, "reasoning": ["<|START_THINKING|>", "<|END_THINKING|>"]}),
        ),
        (
            "kimi",
            json!({"format": "json", "call": ["<|tool_call_begin|>", "<|tool_call_end|>"],
                "calls": ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"],
                "json": {"name_end": "<|tool_call_argument_begin|>"}}),
        ),
        (
            "llama3_pythonic",
            json!({"format": "pythonic", "special_tokens": [
                "<|python_start|>", "<|python_end|>", "<|tool_call_start|>", "<|tool_call_end|>"]}),
        ),
        (
            "mistral",
            json!({"format": "json", "calls": ["[TOOL_CALLS]", ""], "special_tokens": ["[ARGS]", "[CALL_ID]"],
                "reasoning": ["[THINK]", "[/THINK]"]}),
        ),
    ]
}

fn setting(description: Value) -> ParserSetting {
    let description = Description::from_json(description).expect("is right");
    ParserSetting::Description(Box::new(description))
}

/// Models whose parsers are ours, and the same by description.
struct Twins {
    family: &'static Family,
    ours: &'static Renderer,
    described: Renderer,
}

/// Of formats that are described in full.
static TWINS: LazyLock<Vec<Twins>> = LazyLock::new(|| {
    let same = ["hermes", "glm", "minimax", "cohere"];
    let described = descriptions()
        .into_iter()
        .filter(|(name, _)| same.contains(name));
    let twins = described.flat_map(|(name, mut description)| {
        let family = named(name);
        if description.get("reasoning").is_none() {
            description["reasoning"] = json!(["<think>", "</think>"]);
        }
        [true, false].map(|special| Twins {
            family,
            ours: renderer(family, special),
            described: load_with(&tokens(family, special), setting(description.clone()), None)
                .expect("loads"),
        })
    });
    twins.collect()
});

#[test]
fn a_described_parser_reads_calls() {
    for (name, description) in descriptions() {
        let family = named(name);
        let model = load_with(&tokens(family, true), setting(description), None).expect("loads");
        // Without the fields that have no description: Kimi's prefix and number, Mistral's header.
        let text = match name {
            "mistral" => family.two_calls.to_owned(),
            _ => family.call.to_owned(),
        };
        let ids = model.tokenizer().encode(&text).expect("encodes");
        let parsed = parse_ids(&model, &ids, true, false);
        check(&model, &ids, &parsed);
        let expected = match name {
            "mistral" => "{}",
            _ => family.arguments,
        };
        let found = calls(&parsed);
        let (_, called, arguments) = found.first().expect("a call");
        let expected_name = match name {
            "kimi" => "functions.get_weather:0",
            _ => "get_weather",
        };
        assert_eq!((*called, *arguments), (expected_name, expected), "{name}");
        assert_eq!(parsed.message.content, Content::Null, "{name}");
    }
}

#[test]
fn calls_that_come_first_are_none_after_content() {
    let description =
        json!({"format": "json", "position": "start", "call": ["[", "]"], "name": "start"});
    let model = load_with(&[("<|im_end|>", true)], setting(description), None).expect("loads");
    assert_eq!(model.parsers().tool(), "start");
    let parsed = |text: &str| {
        let ids = model.tokenizer().encode(text).expect("encodes");
        let parsed = parse_ids(&model, &ids, true, false);
        check(&model, &ids, &parsed);
        let content = parsed.message.content.joined().expect("text");
        (calls(&parsed).len(), content.into_owned())
    };
    let call = "[{\"name\": \"f\"}]";
    assert_eq!(parsed(call), (1, String::new()));
    assert_eq!(parsed(&format!(" \n{call}\n{call}\n")), (2, String::new()));
    assert_eq!(
        parsed(&format!("{call} So {call}")),
        (1, format!(" So {call}"))
    );
    assert_eq!(parsed(&format!("See {call}")), (0, format!("See {call}")));
}

#[test]
fn a_bad_description_is_refused_by_field_and_value() {
    let call = json!(["<c>", "</c>"]);
    for (description, expected) in [
        (
            json!({"format": "xml"}),
            "format: unknown variant `xml`, expected one of `json`, `pythonic`, `tagged`",
        ),
        (
            json!({"format": "json", "call": ["<c>"]}),
            "call: invalid length 1",
        ),
        (
            json!({"format": "json", "call": ["", "x"]}),
            "call: [\"\", \"x\"] has an empty marker",
        ),
        (
            json!({"format": "json", "call": [" <c>", "x"]}),
            "call: [\" <c>\", \"x\"] begins with white space",
        ),
        (
            json!({"format": "json", "calls": call, "json": {"name_end": "|"}}),
            "json.name_end: needs",
        ),
        (json!({"format": "json"}), "call: is missing"),
        (
            json!({"format": "json", "call": call, "tagged": {"key": call, "value": call}}),
            "tagged: belongs to",
        ),
        (
            json!({"format": "pythonic", "call": call}),
            "call: calls in Python's syntax",
        ),
        (
            json!({"format": "tagged", "call": call}),
            "tagged: is missing",
        ),
        (
            json!({"format": "tagged", "call": call, "tagged": {"key": ["", ">"], "value": call}}),
            "tagged.key[0]: \"\"",
        ),
        (
            json!({"format": "tagged", "call": call, "tagged": {"key": call, "value": 3}}),
            "tagged.value: invalid type: integer `3`",
        ),
        (
            json!({"format": "json", "cal": call}),
            "cal: unknown field `cal`, expected one of `name`, `format`",
        ),
        (json!({"name": "x"}), "format: is missing"),
        (json!([]), "parser: invalid"),
    ] {
        let error = Description::from_json(description.clone()).expect_err("is refused");
        let error = error.to_string();
        assert!(error.starts_with(expected), "{description}: {error}");
    }
}

#[test]
fn a_description_without_a_part_is_no_parser_of_it() {
    let thoughts = setting(json!({"name": "thoughts", "reasoning": ["(", ")"]}));
    let error = load_with(&[("<|im_end|>", true)], thoughts.clone(), None).err();
    let error = error.expect("is refused").to_string();
    assert!(
        error.contains("\"thoughts\" describes no tool parser"),
        "{error}"
    );
    let hermes = ParserSetting::Name("hermes".to_owned());
    let model = load_with(&[("<|im_end|>", true)], hermes, Some(thoughts)).expect("loads");
    assert_eq!(model.parsers().reasoning(), "thoughts");
}

fn piece(family: &'static Family) -> impl Strategy<Value = String> {
    let texts = [
        family.call,
        family.two_calls,
        family.broken,
        family.reasoning,
        family.opener,
    ];
    let texts: Vec<&str> = texts
        .into_iter()
        .chain(family.markers.iter().copied())
        .collect();
    let other = vec![
        "\n",
        " ",
        "é",
        "<",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "<think>",
        "</think>",
        "text",
        "<|im_start|>",
    ];
    let cut = |text: &str, at: usize| {
        let mut letters = text.char_indices().map(|(at, _)| at).collect::<Vec<_>>();
        letters.push(text.len());
        text[..letters[at % letters.len()]].to_owned()
    };
    prop_oneof![
        4 => prop::sample::select(texts.clone()).prop_map(str::to_owned),
        2 => (prop::sample::select(texts), any::<usize>()).prop_map(move |(text, at)| cut(text, at)),
        3 => prop::sample::select(other).prop_map(str::to_owned),
        1 => ".{0,8}",
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(800))]

    #[test]
    fn a_description_of_our_format_reads_any_text_as_ours(
        (index, text) in (0..TWINS.len()).prop_flat_map(|index| {
            let pieces = prop::collection::vec(piece(TWINS[index].family), 0..8);
            (Just(index), pieces.prop_map(|pieces| pieces.concat()))
        }),
        (has_tools, starts_in_reasoning) in any::<(bool, bool)>(),
    ) {
        let twins = &TWINS[index];
        let ids = twins.ours.tokenizer().encode(&text).expect("encodes");
        let ours = parse_ids(twins.ours, &ids, has_tools, starts_in_reasoning);
        let described = parse_ids(&twins.described, &ids, has_tools, starts_in_reasoning);
        prop_assert_eq!(ours, described);
    }
}
