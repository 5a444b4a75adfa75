//! Answers drawn from masks obey their spec, and are replayed.

use primerl_grammar::{GrammarError, Mask, Masks, Reasoning, Spec, Vocabulary, replay};
use primerl_render::Tokenizer;
use primerl_render::testing::{
    END_OF_TEXT, IM_END, IM_START, VOCABULARY_SIZE, write_model, write_tiny_model,
};
use proptest::prelude::*;
use serde::de::IgnoredAny;
use serde_json::{Value, json};
use std::sync::LazyLock;

fn tokenizer() -> &'static Tokenizer {
    static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
        let folder = tempfile::tempdir().expect("a folder");
        write_tiny_model(folder.path()).expect("writes");
        Tokenizer::load(&folder.path().join("tokenizer.json")).expect("loads")
    });
    &TOKENIZER
}

fn vocabulary() -> &'static Vocabulary {
    static VOCABULARY: LazyLock<Vocabulary> =
        LazyLock::new(|| Vocabulary::new(tokenizer(), VOCABULARY_SIZE).expect("has bytes"));
    &VOCABULARY
}

fn spec(structured_outputs: Value) -> Spec {
    Spec {
        structured_outputs,
        reasoning: None,
        ends: vec![IM_END, END_OF_TEXT],
    }
}

fn allowed(mask: &Mask) -> Vec<u32> {
    let bits = |(word, bits): (usize, &u32)| {
        (0..32)
            .filter(move |bit| bits & (1 << bit) != 0)
            .map(move |bit| word as u32 * 32 + bit)
            .collect::<Vec<_>>()
    };
    mask.iter().enumerate().flat_map(bits).collect()
}

/// Tokens drawn alike among the allowed ones, until one ends the answer.
fn drawn(spec: &Spec, seed: u64, most: usize) -> Vec<u32> {
    let mut tokens = Vec::new();
    let mut masks = vocabulary().compile(spec).expect("compiles");
    draw(spec, &mut masks, &mut tokens, seed, most);
    tokens
}

/// Up to `most` more tokens, or to the end.
fn draw(spec: &Spec, masks: &mut Masks, tokens: &mut Vec<u32>, mut seed: u64, most: usize) {
    let most = tokens.len() + most;
    while tokens.len() < most {
        let allowed = allowed(&masks.mask().expect("has a mask"));
        seed = seed
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        let token = allowed[((seed >> 33) % allowed.len() as u64) as usize];
        tokens.push(token);
        if spec.ends.contains(&token) {
            return;
        }
        masks.push(token).expect("is allowed");
    }
}

/// A token for each byte.
fn bytes(text: &str) -> Vec<u32> {
    let id = |byte| tokenizer().token_id(&char::from(byte).to_string());
    text.bytes().map(|byte| id(byte).expect("a byte")).collect()
}

fn text(tokens: &[u32]) -> String {
    tokenizer().decode(tokens, true).expect("decodes")
}

fn schema() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["name", "age", "kind"], "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["a", "b"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2}},
        "$defs": {"tag": {"type": "boolean"}}})
}

mod calls;
mod families;

proptest! {
    #[test]
    fn what_is_drawn_obeys_its_schema_and_is_replayed(seed: u64) {
        let spec = spec(json!({"json": schema()}));
        let tokens = drawn(&spec, seed, 2000);
        prop_assert!(spec.ends.contains(tokens.last().expect("has tokens")));
        let value: Value = serde_json::from_str(&text(&tokens)).expect("is JSON");
        prop_assert!(value["name"].as_str().is_some_and(|name| name.chars().count() <= 6));
        prop_assert!(value["age"].as_u64().is_some_and(|age| age <= 150));
        prop_assert!(value["kind"] == "a" || value["kind"] == "b");
        let known = ["name", "age", "kind", "tags"];
        prop_assert!(value.as_object().is_some_and(|object| object.keys().all(|key| known.contains(&key.as_str()))));

        let replayed = replay(vocabulary(), &spec, &tokens).expect("was sampled so");
        prop_assert_eq!(replayed.index.len(), tokens.len());
        let mut masks = vocabulary().compile(&spec).expect("compiles").fork();
        for (token, place) in tokens.iter().zip(&replayed.index) {
            prop_assert_eq!(&masks.mask().expect("has a mask"), &replayed.masks[*place as usize]);
            if !spec.ends.contains(token) {
                masks.push(*token).expect("is allowed");
            }
        }
        // The front of an answer has the front of its masks.
        let front = replay(vocabulary(), &spec, &tokens[..tokens.len() / 2]).expect("was sampled so");
        prop_assert_eq!(&front.index[..], &replayed.index[..front.index.len()]);
    }

    #[test]
    fn other_kinds_are_obeyed_too(seed: u64) {
        let number = drawn(&spec(json!({"regex": "[0-9]{3}-[a-f]+"})), seed, 300);
        let number = text(&number);
        prop_assert!(number.len() > 4 && number[..3].bytes().all(|byte| byte.is_ascii_digit()));
        let chosen = text(&drawn(&spec(json!({"choice": ["yes", "no \"way\""]})), seed, 50));
        prop_assert!(chosen == "yes" || chosen == "no \"way\"");
        let sum = text(&drawn(&spec(json!({"grammar": "start: \"1\" (\"+\" \"1\")*"})), seed, 300));
        prop_assert!(sum.split('+').all(|one| one == "1"));
        let object = drawn(&spec(json!({"json_object": true})), seed, 4000);
        if spec(json!(null)).ends.contains(object.last().expect("has tokens")) {
            // Its numbers may be larger than any that is read.
            let text = text(&object);
            let is_object = serde_json::from_str::<IgnoredAny>(&text).is_ok() && text.starts_with('{');
            prop_assert!(is_object, "{}", text);
        }
    }

    #[test]
    fn reasoning_comes_first_and_is_free(seed: u64) {
        let reasoning = |open: Option<&str>| Some(Reasoning { open: open.map(str::to_owned), close: "</t>".to_owned() });
        let answer = json!({"json": {"type": "boolean"}});
        let begun = Spec { reasoning: reasoning(None), ..spec(answer.clone()) };
        let (mut masks, mut tokens) = (vocabulary().compile(&begun).expect("compiles"), Vec::new());
        draw(&begun, &mut masks, &mut tokens, seed, 30);
        prop_assert_eq!(tokens.len(), 30, "nothing ends it but its marker");
        // In the middle of a character there is no marker.
        while !allowed(&masks.mask().expect("has a mask")).contains(&bytes("<")[0]) {
            draw(&begun, &mut masks, &mut tokens, seed, 1);
        }
        for token in bytes("</t>") {
            tokens.push(token);
            masks.push(token).expect("is free");
        }
        draw(&begun, &mut masks, &mut tokens, seed, 1000);
        if begun.ends.contains(tokens.last().expect("has tokens")) {
            let text = text(&tokens);
            let (_, rest) = text.split_once("</t>").expect("ends its reasoning");
            prop_assert!(["true", "false"].contains(&rest.trim_start()), "{}", rest);
        }
        let mut masks = vocabulary().compile(&begun).expect("compiles");
        for token in bytes("<hm> \"x\" </t>\n\ntru") {
            masks.push(token).expect("is free");
        }
        prop_assert_eq!(allowed(&masks.mask().expect("has a mask")).len(), 1);
        let optional = Spec { reasoning: reasoning(Some("<t>")), ..spec(answer) };
        let first = vocabulary().compile(&optional).expect("compiles").mask().expect("has a mask");
        prop_assert_eq!(allowed(&first).len(), 3, "< of the block, t and f of the answer");
    }
}

#[test]
fn no_special_token_is_text() {
    let mut masks = vocabulary()
        .compile(&spec(json!({"json": {"type": "string"}})))
        .expect("compiles");
    masks.push(u32::from(b'"' - b'!')).expect("a quote");
    let inside = allowed(&masks.mask().expect("has a mask"));
    assert!(inside.len() > 100);
    // `system` is an added token, but text; ids without a token are never allowed.
    assert!(inside.contains(&259));
    for id in [IM_END, END_OF_TEXT, IM_START, 262, 263] {
        assert!(!inside.contains(&id), "{id}");
    }
}

#[test]
fn markers_that_are_special_tokens_are_met_as_such() {
    let folder = tempfile::tempdir().expect("a folder");
    let added = [("<|end|>", true), ("<think>", true), ("</think>", true)];
    write_model(
        folder.path(),
        &added,
        &[("t", "r"), ("tr", "ue")].as_slice()[..1],
        "",
        "<|end|>",
        "<|end|>",
    )
    .expect("writes");
    let tokenizer = Tokenizer::load(&folder.path().join("tokenizer.json")).expect("loads");
    let id = |text| tokenizer.added_token(text).expect("was added");
    let vocabulary = Vocabulary::new(&tokenizer, 264).expect("has bytes");
    let spec = Spec {
        structured_outputs: json!({"json": {"type": "boolean"}}),
        reasoning: Some(Reasoning {
            open: Some("<think>".to_owned()),
            close: "</think>".to_owned(),
        }),
        ends: vec![id("<|end|>")],
    };
    let mut masks = vocabulary.compile(&spec).expect("compiles");
    assert!(allowed(&masks.mask().expect("has a mask")).contains(&id("<think>")));
    masks.push(id("<think>")).expect("opens");
    for token in tokenizer.encode("hm </").expect("encodes") {
        masks.push(token).expect("is text");
    }
    assert!(allowed(&masks.mask().expect("has a mask")).contains(&id("</think>")));
    masks.push(id("</think>")).expect("closes");
    masks
        .push(tokenizer.token_id("tr").expect("a merge"))
        .expect("begins");
    assert_eq!(allowed(&masks.mask().expect("has a mask")).len(), 1);
}

#[test]
fn what_cannot_be_enforced_is_refused_by_name() {
    let refused = |outputs: Value| match vocabulary().compile(&spec(outputs)) {
        Err(error @ GrammarError::Unsupported { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    };
    for (schema, keyword) in [
        (json!({"type": "array", "uniqueItems": true}), "uniqueItems"),
        (
            json!({"type": "string", "format": "shoe-size"}),
            "shoe-size",
        ),
        (
            json!({"type": "object", "propertyNames": {"pattern": "a"}}),
            "propertyNames",
        ),
        (json!({"not": {"type": "string"}}), "not"),
        (json!({"type": "shoe"}), "shoe"),
        (json!({"type": "string", "pattern": "(?=a)"}), "look-around"),
    ] {
        let message = refused(json!({"json": schema}));
        assert!(
            message.starts_with("structured_outputs.json: ") && message.contains(keyword),
            "{message}"
        );
        assert!(
            message.len() < 500 && !message.contains("<state>"),
            "{message}"
        );
    }
    for (outputs, part) in [
        (json!({"json": {}, "regex": "a"}), "exactly one"),
        (json!({"json": null}), "must have one of"),
        (
            json!({"structural_tag": "x"}),
            "structured_outputs.structural_tag: is not supported",
        ),
        (json!({"regex": "("}), "structured_outputs.regex: "),
        (json!({"choice": []}), "structured_outputs.choice: "),
        (json!({"choice": [1]}), "structured_outputs.choice: "),
        (
            json!({"grammar": "start: nowhere"}),
            "structured_outputs.grammar: ",
        ),
        (json!("x"), "must be an object"),
        (json!({"json": "{"}), "is not JSON"),
        (json!({"json_object": 3}), "must be true"),
    ] {
        let message = refused(outputs);
        assert!(message.contains(part), "{message}");
    }
    let endless = Spec {
        ends: vec![],
        ..spec(json!({"json": {}}))
    };
    assert!(matches!(
        vocabulary().compile(&endless),
        Err(GrammarError::Unsupported { .. })
    ));
}

#[test]
fn an_answer_of_another_grammar_is_no_replay() {
    let boolean = spec(json!({"json": {"type": "boolean"}}));
    let tokens = tokenizer().encode("trup").expect("encodes");
    let refused = replay(vocabulary(), &boolean, &tokens);
    assert!(
        matches!(refused, Err(GrammarError::Disallowed { index: 3, .. })),
        "{refused:?}"
    );
}

#[test]
fn identities_name_the_tokens() {
    assert_eq!(
        vocabulary().identity(),
        Vocabulary::new(tokenizer(), VOCABULARY_SIZE)
            .expect("has bytes")
            .identity()
    );
    let smaller = Vocabulary::new(tokenizer(), VOCABULARY_SIZE - 1).expect("has bytes");
    assert_ne!(vocabulary().identity(), smaller.identity());
}

/// What is too large is an error once its share of work is used up, not a stall.
#[test]
fn work_is_limited() {
    let ambiguous = spec(json!({"grammar": "start: a\na: a a | \"x\" | \"xx\""}));
    let mut masks = vocabulary().compile(&ambiguous).expect("compiles");
    let x = tokenizer().token_id("x").expect("a byte");
    for _ in 0..50 {
        masks.push(x).expect("is allowed");
    }
    assert!(allowed(&masks.mask().expect("has a mask")).contains(&x));
    let long = "a".repeat(1 << 20);
    let refused = vocabulary().compile(&spec(json!({"choice": [long]})));
    assert!(
        refused
            .expect_err("is too long")
            .to_string()
            .contains("longer than")
    );
}
