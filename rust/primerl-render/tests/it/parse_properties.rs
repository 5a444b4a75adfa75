//! What holds for any answer in any split: the same result, tiled segments, linear time.

use crate::families::{FAMILIES, Family, WrittenCall, calls, check, parse_ids, renderer, tools};
use primerl_render::testing::fuzz;
use primerl_render::{AnswerContext, Delta};
use proptest::prelude::*;
use std::time::{Duration, Instant};

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
fn a_flood_without_an_end_takes_linear_time() {
    // Half a megabyte takes half a second in a debug build; read again with each token it would take hours.
    let limit = Duration::from_secs(20);
    let tools = tools();
    for family in FAMILIES {
        let renderer = renderer(family, true);
        let marker = family.markers[0];
        for (beginning, unit) in [
            (family.opener, "{\"a < [b\": 'c'}\n\n"),
            (marker, " "),
            (family.two_calls, "\n"),
            (family.two_calls, "; "),
            (family.reasoning, marker),
        ] {
            let text = format!("{beginning}{}", unit.repeat(500_000 / unit.len()));
            let ids = renderer.tokenizer().encode(&text).expect("encodes");
            let started = Instant::now();
            let mut stream = renderer.answer_stream(&AnswerContext {
                tools: Some(&tools),
                starts_in_reasoning: false,
            });
            for ids in ids.chunks(7) {
                stream.push(renderer, ids).expect("pushes");
            }
            let (_, parsed) = stream.finish(renderer).expect("finishes");
            assert_eq!(parsed.text.len(), text.len());
            let took = started.elapsed();
            assert!(took < limit, "{} {unit:?}: {took:?}", family.name);
        }
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
        for parser in 0..fuzz::names().count() {
            fuzz::run(parser, &data);
            fuzz::run(parser, &[&head[..], text.as_bytes()].concat());
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
