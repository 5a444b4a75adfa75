use super::super::testing::{self, SAMPLING, chunks};
use super::*;
use primerl_core::turn::FinishReason;
use primerl_render::Message;
use primerl_render::testing::tiny;

fn read_as(changes: Value) -> Result<(TurnRequest, Box<dyn Reply>), ApiError> {
    let mut body = json!({"model": "m", "prompt": "hi"});
    for (name, value) in changes.as_object().expect("an object") {
        body[name] = value.clone();
    }
    let rules = Rules {
        sampling: &SAMPLING,
        evaluation: false,
    };
    read(body.to_string().as_bytes(), &rules, 0)
}

fn parse(changes: Value) -> TurnRequest {
    match read_as(changes) {
        Ok((request, _)) => request,
        Err(error) => panic!("{error:?}"),
    }
}

#[test]
fn a_field_that_is_given_twice_is_refused() {
    let rules = Rules {
        sampling: &SAMPLING,
        evaluation: false,
    };
    let body = br#"{"prompt": "a", "prompt": "b"}"#;
    let error = read(body, &rules, 0).err().expect("is refused");
    assert!(error.message.contains("`prompt`"), "{error:?}");
}

#[test]
fn what_cannot_be_honoured_is_refused_by_name() {
    for (name, value) in [
        ("prompt", json!(null)),
        ("skip_special_tokens", json!(false)),
        ("include_reasoning", json!(false)),
        ("prompt", json!([])),
        ("prompt", json!(["a", "b"])),
        ("prompt", json!([[1], [2]])),
        ("prompt", json!([1, "a"])),
        ("prompt", json!([1, -2])),
        ("prompt", json!([1.5])),
        ("prompt", json!({"text": "a"})),
        ("echo", json!(true)),
        ("suffix", json!("x")),
        ("best_of", json!(2)),
        ("logprobs", json!(21)),
        ("logprobs", json!(true)),
        ("max_tokens", json!(0)),
        ("temperature", json!(0.5)),
        ("top_p", json!(0.5)),
        ("logit_bias", json!({"5": 1})),
        ("frequency_penalty", json!(0.5)),
        ("add_special_tokens", json!(true)),
        ("prompt_logprobs", json!(1)),
        ("response_format", json!({"type": "shoe"})),
        ("mystery", json!(1)),
    ] {
        let error = read_as(json!({name: value})).map(drop).expect_err(name);
        assert_eq!(error.param.as_deref(), Some(name), "{}", error.message);
        assert_eq!(error.status, 400);
    }
    let error = read_as(json!({"prompt": [4, 5, "x"]}))
        .map(drop)
        .expect_err("is refused");
    assert!(error.message.contains("prompt[2]"), "{}", error.message);
}

#[test]
fn prompts_are_a_text_or_ids() {
    for prompt in [json!("hi"), json!(["hi"])] {
        assert!(
            matches!(parse(json!({"prompt": prompt})).input, Input::Text(text) if text == "hi")
        );
    }
    for prompt in [json!([1, 2]), json!([[1, 2]])] {
        assert!(matches!(parse(json!({"prompt": prompt})).input, Input::Ids(ids) if ids == [1, 2]));
    }
}

#[test]
fn neutral_and_harmless_fields_pass() {
    let request = parse(
        json!({"n": 2, "best_of": 2, "echo": false, "suffix": null, "logprobs": 0, "stop": ["x"],
        "presence_penalty": 0, "seed": 3, "user": "u", "add_special_tokens": false, "stream_options": null}),
    );
    assert_eq!(request.choices, 2);
    assert_eq!(request.sampling.stop, ["x"]);
    assert_eq!(request.sampling.logprobs, Some(0));
    assert_eq!(request.sampling.max_tokens, 28);
    assert_eq!(request.parse, Parse::Text);
    assert_eq!(parse(json!({"max_tokens": 5})).sampling.max_tokens, 5);
}

fn answer() -> Answer {
    let mut answer = testing::answer(Message::assistant("hi"), FinishReason::Length);
    answer.head.prompt_tokens = 2;
    answer.head.prompt = Some([1, 2].into());
    let choice = &mut answer.choices[0];
    choice.sampled = vec![71, 256].into();
    choice.top = vec![vec![(72, -0.25)], vec![(256, -1.0)]];
    answer
}

#[test]
fn a_whole_answer_has_openais_shape() {
    let renderer = tiny();
    let changes =
        json!({"logprobs": 1, "return_token_ids": true, "return_tokens_as_token_ids": true});
    let (_, reply) = read_as(changes).expect("is fine");
    assert!(reply.shows_prompt());
    let body = reply.whole(&answer(), renderer.tokenizer());
    let body: Value = serde_json::from_slice(&body).expect("is JSON");
    assert_eq!(body["object"], "text_completion");
    assert_eq!(
        body["choices"][0],
        json!({"index": 0, "text": "hi", "finish_reason": "length", "token_ids": [71, 256],
            "prompt_token_ids": [1, 2], "logprobs": {
                "tokens": ["token_id:71", "token_id:256"], "token_logprobs": [-0.5, -1.0], "text_offset": [0, 1],
                "top_logprobs": [{"token_id:72": -0.25, "token_id:71": -0.5}, {"token_id:256": -1.0}]}})
    );
    assert_eq!(body["usage"]["total_tokens"], 4);
}

#[test]
fn offsets_count_characters() {
    let mut characters = 0;
    let pieces: [&[u8]; 5] = [b"a", &[0xF0, 0x9F], &[0x98, 0x80], b"bc", b"d"];
    let offsets = pieces.map(|bytes| begin(bytes, &mut characters));
    assert_eq!(offsets, [0, 1, 1, 2, 4]);
}

#[test]
fn chunks_carry_text_tokens_and_the_end() {
    let renderer = tiny();
    let changes = json!({"logprobs": 1, "return_token_ids": true, "stream": true,
        "stream_options": {"include_usage": true}});
    let (_, reply) = read_as(changes).expect("is fine");
    let (mut events, mut out) = (reply.events(), Vec::new());
    let answer = answer();
    events.begin(&answer.head, &mut out);
    let tokens = answer.choices[0].tokens();
    let deltas = [Delta::Content("h".into()), Delta::Content("i".into())];
    events.progress(0, &deltas, tokens, renderer.tokenizer(), &mut out);
    events.end(&answer, &mut out);
    let chunks = chunks(out);
    assert_eq!(chunks[0]["choices"][0]["prompt_token_ids"], json!([1, 2]));
    assert_eq!(chunks[1]["choices"][0]["text"], "hi");
    assert_eq!(chunks[1]["choices"][0]["token_ids"], json!([71, 256]));
    assert_eq!(
        chunks[1]["choices"][0]["logprobs"]["text_offset"],
        json!([0, 1])
    );
    assert_eq!(chunks[2]["choices"][0]["finish_reason"], "length");
    assert_eq!(chunks[3]["usage"]["total_tokens"], 4);
    assert_eq!(chunks[3]["choices"], json!([]));
}
