use super::*;
use crate::client_type::testing::{prompt, request};
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
