use super::*;
use primerl_render::testing::tiny;
use proptest::prelude::*;

#[test]
fn the_beginning_of_a_stop_is_held_back() {
    let mut cut = StopCut::new(&["<end>".into(), "xx".into()]);
    assert_eq!(cut.push("a<e".into()), "a");
    assert_eq!(cut.push("q".into()), "<eq");
    assert_eq!(cut.push("x".into()), "");
    assert_eq!(cut.push("yé<en".into()), "xyé");
    assert_eq!(cut.push("d> more".into()), "");
    assert_eq!(cut.push("more".into()), "");
    assert_eq!(cut.finish(), "");
}

fn reading(stop: &[&str]) -> Arc<Reading> {
    Arc::new(Reading {
        parse: Parse::Text,
        options: None,
        starts_in_reasoning: false,
        stop: stop.iter().map(|&stop| stop.into()).collect(),
        request_digest: 0,
    })
}

#[test]
fn characters_are_whole_wherever_plain_text_is_cut() {
    let renderer = tiny();
    let text = format!("x{}", "é漢🚆 ".repeat(12));
    let ids = renderer.tokenizer().encode(&text).expect("has tokens");
    for length in 1..ids.len() {
        let mut choice = ChoiceText::new(&renderer, &reading(&[]), 0);
        let mut deltas: Vec<Delta> = Vec::new();
        for piece in ids.chunks(length) {
            deltas.extend(choice.push(&renderer, piece).expect("has text"));
        }
        deltas.extend(choice.finish(&renderer).expect("has text"));
        let content = |delta| match delta {
            Delta::Content(text) => text,
            other => panic!("{other:?}"),
        };
        let shown: String = deltas.into_iter().map(content).collect();
        assert_eq!(shown, text, "pieces of {length} tokens");
    }
}

#[test]
fn what_ended_the_answer_is_named_though_it_is_not_shown() {
    let renderer = tiny();
    let reading = Reading {
        parse: Parse::Message { one_call: false },
        starts_in_reasoning: true,
        stop: vec!["</think>".into()],
        ..Arc::into_inner(reading(&[])).expect("is the only one")
    };
    let ids = renderer.tokenizer().encode("one two\n</think>");
    let read = reading.read(&renderer, &ids.expect("has tokens"), 0);
    assert_eq!(
        read.expect("is read").stop.as_deref(),
        Some("</think>"),
        "it parts reasoning from content"
    );
}

proptest! {
    /// However the text is split, the part before the first sequence is shown.
    #[test]
    fn pieces_add_up(pieces in prop::collection::vec("[ab<é]{0,4}", 0..12), stop in prop::collection::vec("[ab<é]{1,3}", 0..3)) {
        let text = pieces.concat();
        let expected = first_stop(&text, &stop).map_or(text.as_str(), |(at, _)| &text[..at]);
        let mut cut = StopCut::new(&stop);
        let mut shown: String = pieces.into_iter().map(|piece| cut.push(piece)).collect();
        shown.push_str(&cut.finish());
        prop_assert_eq!(shown, expected);
    }
}
