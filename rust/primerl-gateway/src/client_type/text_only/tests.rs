use super::*;
use crate::client_type::testing::{prompt, request};
use crate::sampling::TurnSampling;
use primerl_render::Message;

fn answer(text: &str) -> ChatAnswer {
    ChatAnswer {
        model: "big-1".into(),
        message: Message::assistant(text),
        finish: FinishReason::Stop,
        stop: None,
        prompt_tokens: 11,
        completion_tokens: 3,
    }
}

#[test]
fn an_answer_is_recorded_as_text_and_read_back() {
    let turn = take_in(&request(), &prompt(), (1, 0), answer("Hello")).expect("is taken in");
    assert!(turn.is_consistent() && turn.sampled.is_empty());
    assert_eq!(turn.answer_tokens(), 3);
    let choice = Choice::of_text(&turn).expect("is read");
    assert_eq!(choice.message, Message::assistant("Hello"));
    assert_eq!(choice.n_tokens(), 3);
    assert_eq!(choice.finish, FinishReason::Stop);
}

#[test]
fn an_answer_that_continues_past_a_stop_sequence_is_truncated() {
    let turn =
        take_in(&request(), &prompt(), (1, 0), answer("Hello END more")).expect("is taken in");
    let choice = Choice::of_text(&turn).expect("is read");
    assert_eq!(choice.message, Message::assistant("Hello "));
    assert_eq!(choice.finish, FinishReason::StopSequence);
    assert_eq!(choice.stop.as_deref(), Some("END"));
}

#[test]
fn what_the_server_cannot_do_is_refused_by_name() {
    let refused = |change: fn(&mut TurnSampling)| {
        let mut request = request();
        change(&mut request.sampling);
        let error = check_for("teacher.client", &request).expect_err("is refused");
        error.param.expect("names a field")
    };
    assert!(check_for("teacher.client", &request()).is_ok());
    assert_eq!(refused(|sampling| sampling.logprobs = Some(0)), "logprobs");
    assert_eq!(refused(|sampling| sampling.truncation.top_k = 4), "top_k");
    assert_eq!(refused(|sampling| sampling.truncation.min_p = 0.1), "min_p");
    let choice = |sampling: &mut TurnSampling| {
        sampling.structured_outputs = Some(json!({"choice": ["a", "b"]}));
    };
    assert_eq!(refused(choice), "structured_outputs");
}

#[test]
fn answer_formats_are_openais_again() {
    let format =
        |outputs: Value| response_format("teacher.client", Some(&outputs)).expect("is known");
    assert_eq!(
        format(json!({"json_object": true})),
        Some(json!({"type": "json_object"}))
    );
    let schema = format(json!({"json": {"type": "object"}})).expect("is there");
    assert_eq!(schema["json_schema"]["schema"], json!({"type": "object"}));
    assert_eq!(
        response_format("teacher.client", None).expect("is nothing"),
        None
    );
}
