//! Answers of every family: what becomes of them, and what holds for any text and any split.

mod families;

use families::{CITY, FAMILIES, Family, renderer};
use primerl_render::testing::fuzz;
use primerl_render::{AnswerContext, CallProblem, Content, Delta, Parsed, Renderer, SegmentKind};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Id, name and arguments.
type WrittenCall<'a> = (Option<&'a str>, &'a str, &'a str);

fn tools() -> Vec<Value> {
    vec![
        json!({"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "exact": {"type": "boolean"},
        "area": {"type": "object"}, "note": {"anyOf": [{"type": "string"}, {"type": "null"}]}}}}}),
    ]
}

fn parse_ids(
    renderer: &Renderer,
    ids: &[u32],
    has_tools: bool,
    starts_in_reasoning: bool,
) -> Parsed {
    let tools = tools();
    let context = AnswerContext {
        tools: has_tools.then_some(&tools),
        starts_in_reasoning,
    };
    renderer.parse_answer(ids, &context).expect("parses")
}

fn parse(family: &'static Family, text: &str) -> Parsed {
    let renderer = renderer(family, true);
    let ids = renderer.tokenizer().encode(text).expect("encodes");
    let parsed = parse_ids(renderer, &ids, true, false);
    check(renderer, &ids, &parsed);
    parsed
}

fn calls(parsed: &Parsed) -> Vec<WrittenCall<'_>> {
    parsed
        .message
        .tool_calls
        .iter()
        .flatten()
        .map(|call| {
            (
                call.id.as_deref(),
                call.function.name.as_str(),
                call.function.arguments.as_str().expect("JSON text"),
            )
        })
        .collect()
}

fn shown(parsed: &Parsed, kind: SegmentKind) -> String {
    let of_kind = parsed
        .segments
        .iter()
        .filter(|segment| segment.kind == kind);
    of_kind
        .map(|segment| &parsed.text[segment.text_range.clone()])
        .collect()
}

/// What holds for every parsed answer.
fn check(renderer: &Renderer, ids: &[u32], parsed: &Parsed) {
    let answer = &ids[..ids.len() - usize::from(parsed.stop_token.is_some())];
    let decoded = renderer.tokenizer().decode(answer, false).expect("decodes");
    assert_eq!(parsed.text, decoded);
    let (mut text, mut token) = (0, 0);
    for segment in &parsed.segments {
        assert_eq!(segment.text_range.start, text, "segments tile the text");
        text = segment.text_range.end;
        assert!(segment.token_range.start <= token, "no token is left out");
        assert!(segment.token_range.end >= token);
        token = segment.token_range.end;
        if !decoded.contains('\u{fffd}') {
            let tokens = &answer[segment.token_range.clone()];
            let touched = renderer.tokenizer().decode(tokens, false).expect("decodes");
            assert!(touched.contains(&parsed.text[segment.text_range.clone()]));
        }
    }
    assert_eq!((text, token), (decoded.len(), answer.len()));
    let content = parsed.message.content.joined().expect("text");
    assert_eq!(shown(parsed, SegmentKind::Content), content);
    let reasoning = parsed.message.reasoning_content.as_deref().unwrap_or("");
    assert_eq!(shown(parsed, SegmentKind::Reasoning), reasoning);
    for (index, _) in parsed.message.tool_calls.iter().flatten().enumerate() {
        assert!(!shown(parsed, SegmentKind::ToolCall(index)).is_empty());
    }
    for malformed in &parsed.malformed {
        assert!(malformed.text_range.end <= decoded.len());
    }
}

/// The message that a client puts together from the deltas.
fn joined(deltas: &[Delta]) -> (String, String, Vec<WrittenCall<'_>>) {
    let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
    for delta in deltas {
        match delta {
            Delta::Content(text) => content.push_str(text),
            Delta::Reasoning(text) => reasoning.push_str(text),
            Delta::ToolCall {
                index,
                id,
                name,
                arguments,
            } => {
                assert_eq!(*index, calls.len());
                calls.push((id.as_deref(), name.as_str(), arguments.as_str()));
            }
        }
    }
    (content, reasoning, calls)
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
    let hermes = families::named("hermes");
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
    let family = families::named("qwen3_coder");
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
    let family = families::named("harmony");
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
        let parsed = parse(families::named(name), text);
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
    let family = families::named("hermes");
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
    let error = families::load("hermse", "think")
        .err()
        .expect("cannot load");
    let text = error.to_string();
    assert!(
        text.contains("\"hermse\"") && text.contains("hermes, qwen3_coder"),
        "{text}"
    );
}

#[test]
fn a_megabyte_without_an_end_takes_linear_time() {
    // Debug builds are some twenty times slower than the second that a release build may take for much more.
    let limit = Duration::from_secs(20);
    for family in FAMILIES {
        let renderer = renderer(family, true);
        let unit = "{\"a < [b\": 'c'}\n\n";
        let text = format!("{}{}", family.opener, unit.repeat(1_000_000 / unit.len()));
        let ids = renderer.tokenizer().encode(&text).expect("encodes");
        let started = Instant::now();
        let tools = tools();
        let mut stream = renderer.answer_stream(&AnswerContext {
            tools: Some(&tools),
            starts_in_reasoning: false,
        });
        for ids in ids.chunks(7) {
            stream.push(renderer, ids).expect("pushes");
        }
        let (_, parsed) = stream.finish(renderer).expect("finishes");
        assert_eq!(parsed.text.len(), text.len());
        assert!(
            started.elapsed() < limit,
            "{}: {:?}",
            family.name,
            started.elapsed()
        );
    }
}

/// Pieces of answers: a family's own texts and markers, whole and cut, and what has nothing to do with it.
fn piece(family: &'static Family) -> impl Strategy<Value = String> {
    let own = vec![
        family.call,
        family.two_calls,
        family.broken,
        family.reasoning,
        family.opener,
    ];
    let markers: Vec<&str> = family.markers.to_vec();
    let common = vec![
        "\n",
        "\n\n",
        " ",
        "é",
        "👩‍👩‍👧",
        "<",
        "<|",
        "[",
        "{",
        "}",
        "]",
        ";",
        "\"",
        "'",
        "\\",
        "</think>",
        "<think>",
        "text",
        "<|im_start|>",
        "to=",
    ];
    let cut = |text: &str, at: usize| {
        let at = (0..=at % (text.len() + 1))
            .rev()
            .find(|at| text.is_char_boundary(*at));
        text[..at.unwrap_or(0)].to_owned()
    };
    prop_oneof![
        3 => prop::sample::select(own.clone()).prop_map(str::to_owned),
        2 => (prop::sample::select(own), any::<usize>()).prop_map(move |(text, at): (&str, usize)| cut(text, at)),
        4 => prop::sample::select(markers).prop_map(str::to_owned),
        4 => prop::sample::select(common).prop_map(str::to_owned),
        1 => ".{0,8}",
    ]
}

fn answer() -> impl Strategy<Value = (&'static Family, String, Vec<u32>)> {
    (0..FAMILIES.len()).prop_flat_map(|index| {
        let family = &FAMILIES[index];
        (
            Just(family),
            prop::collection::vec(piece(family), 0..8).prop_map(|pieces| pieces.concat()),
            prop::collection::vec(0u32..300, 0..3),
        )
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn any_bytes_go_through_every_parser(
        data in prop::collection::vec(any::<u8>(), 0..64),
        (_, text, _) in answer(),
        head in any::<[u8; 2]>(),
    ) {
        for (_, entry) in fuzz::ENTRIES {
            entry(&data);
            entry(&[&head[..], text.as_bytes()].concat());
        }
    }

    #[test]
    fn any_split_gives_the_same_answer(
        (family, text, noise) in answer(),
        sizes in prop::collection::vec(0usize..9, 1..20),
        (special, has_tools, starts_in_reasoning) in any::<(bool, bool, bool)>(),
    ) {
        let renderer = renderer(family, special);
        let mut ids = renderer.tokenizer().encode(&text).expect("encodes");
        let middle = ids.len() / 2;
        ids.splice(middle..middle, noise);
        let whole = parse_ids(renderer, &ids, has_tools, starts_in_reasoning);
        check(renderer, &ids, &whole);

        let tools = tools();
        let mut stream = renderer.answer_stream(&AnswerContext {
            tools: has_tools.then_some(&tools),
            starts_in_reasoning,
        });
        let mut deltas = Vec::new();
        let mut rest = &ids[..];
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at((*size + usize::from(sizes.iter().sum::<usize>() == 0)).min(rest.len()));
            deltas.extend(stream.push(renderer, now).expect("pushes"));
            rest = later;
        }
        let (last, parsed) = stream.finish(renderer).expect("finishes");
        deltas.extend(last);
        prop_assert_eq!(&parsed, &whole);
        let (content, reasoning, found) = joined(&deltas);
        prop_assert_eq!(content, whole.message.content.joined().expect("text"));
        prop_assert_eq!(reasoning, whole.message.reasoning_content.clone().unwrap_or_default());
        prop_assert_eq!(found, calls(&whole));
    }
}
