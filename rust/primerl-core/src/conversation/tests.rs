use super::*;
use crate::testing::turn;
use proptest::prelude::*;

/// A chat as the gateway sees it: messages by text; an assistant's is `a:said` or `a:said|reasoning`.
fn key(text: &str) -> MessageKey {
    let hash = |text: &str| message_hash(text.as_bytes());
    let answer = text
        .strip_prefix("a:")
        .map(|text| match text.split_once('|') {
            Some((said, reasoning)) => AnswerKey {
                said: hash(said.trim()),
                reasoning: Some(hash(reasoning)),
            },
            None => AnswerKey {
                said: hash(text.trim()),
                reasoning: None,
            },
        });
    MessageKey {
        exact: hash(text),
        answer,
    }
}

fn keys(messages: &[&str]) -> Vec<MessageKey> {
    messages.iter().map(|text| key(text)).collect()
}

fn planned(conversation: &Conversation, tools: &str, messages: &[&str]) -> Planned {
    conversation.plan(digest_start(tools.as_bytes()), &keys(messages))
}

fn plan(conversation: &Conversation, tools: &str, messages: &[&str]) -> Plan {
    planned(conversation, tools, messages).plan
}

fn extend(parent: TurnIndex, first_new_message: usize) -> Plan {
    Plan::Extend {
        parent,
        first_new_message,
    }
}

/// Answers `messages` with `answer`, on the plan the conversation makes.
fn answer(
    conversation: &mut Conversation,
    tools: &str,
    messages: &[&str],
    answer: &str,
    sampled: &[u32],
) -> TurnIndex {
    let index = TurnIndex(conversation.len() as u32);
    let planned = planned(conversation, tools, messages);
    let lengths = |messages: &[&str]| messages.iter().map(|text| text.len() as u32).collect();
    let (parent, suffix): (Option<TurnIndex>, Vec<u32>) = match planned.plan {
        Plan::Extend {
            parent,
            first_new_message,
        } => (Some(parent), lengths(&messages[first_new_message..])),
        Plan::Fork { .. } => (None, lengths(messages)),
    };
    let mut turn = turn(parent.map(|parent| parent.0), &suffix, sampled, 0);
    turn.start_digest = digest_start(tools.as_bytes());
    turn.context_digest = planned.context_digest;
    turn.answer = key(answer).answer.expect("an answer");
    conversation.record(index, &turn);
    index
}

fn fork(reason: ForkReason) -> Plan {
    Plan::Fork { reason }
}

#[test]
fn a_conversation_that_goes_on_extends_its_last_turn() {
    let mut chat = Conversation::default();
    assert_eq!(plan(&chat, "", &["u1"]), fork(ForkReason::FirstTurn));
    let first = answer(&mut chat, "", &["u1"], "a:1", &[100, 101]);
    assert_eq!(plan(&chat, "", &["u1", "a:1", "u2"]), extend(first, 2));
    let second = answer(&mut chat, "", &["u1", "a:1", "u2"], "a:2", &[102]);
    let expected = extend(second, 4);
    assert_eq!(
        plan(&chat, "", &["u1", "a:1", "u2", "a:2", "tool", "u3"]),
        expected
    );

    assert_eq!(chat.prompt_of(second), [2, 100, 101, 2]);
    let history = chat.history(second);
    assert_eq!(
        (history.to_vec(), history.len()),
        (vec![2, 100, 101, 2, 102], 5)
    );
    assert_eq!(history.prompt_with(&[7, 8]), [2, 100, 101, 2, 102, 7, 8]);
    assert_eq!(history.finish, Some(FinishReason::Stop));
}

#[test]
fn a_walk_is_gone_on_from_until_another_answer_may_have_come_into_it() {
    let mut chat = Conversation::default();
    let walk = planned(&chat, "", &["u1"]).walk;
    let first = answer(&mut chat, "", &["u1"], "a:1", &[100]);
    let went_on = chat.go_on(&walk, &keys(&["a:1", "u2"])).expect("continues");
    assert_eq!(went_on.plan, extend(first, 2));
    let walk = went_on.walk;
    assert_eq!(walk.messages(), 3);
    answer(&mut chat, "", &["u1", "a:1", "u2"], "a:2", &[101]);
    assert!(chat.go_on(&walk, &keys(&["a:2", "u3"])).is_some());
    // Equal words, other reasoning: what `a:1` means is another turn now.
    answer(&mut chat, "", &["u1"], "a:1|because", &[102]);
    assert!(chat.go_on(&walk, &keys(&["a:2", "u3"])).is_none());
}

/// Answers as [`answer`] does, without a stop token.
fn answer_unfinished(chat: &mut Conversation, messages: &[&str], answer: &str) -> TurnIndex {
    let index = TurnIndex(chat.len() as u32);
    let planned = planned(chat, "", messages);
    let mut turn = turn(None, &[1], &[100 + index.0], 0);
    turn.finish = FinishReason::StopSequence;
    turn.start_digest = digest_start(b"");
    turn.context_digest = planned.context_digest;
    turn.answer = key(answer).answer.expect("an answer");
    chat.record(index, &turn);
    index
}

#[test]
fn an_answer_that_was_continued_is_one_of_its_own() {
    let mut chat = Conversation::default();
    let first = answer_unfinished(&mut chat, &["u1"], "a:1");
    let continued = ["u1", "a:1 and more", "u2"];
    let stuck = planned(&chat, "", &continued);
    assert_eq!(stuck.plan, fork(ForkReason::AnswerEdited));
    let stuck = stuck.walk.stuck().expect("is stuck");
    assert_eq!(stuck.message, 1);
    assert_eq!(chat.unfinished(stuck.context).collect::<Vec<_>>(), [first]);

    chat.continue_answer(stuck.context, key("a:1 and more").exact, first);
    let went_on = planned(&chat, "", &continued);
    assert_eq!(went_on.plan, extend(first, 2));
    assert!(went_on.continued && went_on.walk.stuck().is_none());
    // The answer as it was, and in other words, are other conversations.
    let plain = planned(&chat, "", &["u1", "a:1", "u2"]);
    assert_eq!(plain.plan, extend(first, 2));
    assert!(!plain.continued);
    assert_ne!(plain.context_digest, went_on.context_digest);
    let second = answer(&mut chat, "", &continued, "a:2", &[200]);
    let later = planned(&chat, "", &["u1", "a:1 and more", "u2", "a:2", "u3"]);
    assert_eq!(later.plan, extend(second, 4));
    assert!(!later.continued, "its last answer is as it was");
    assert_eq!(
        plan(&chat, "", &["u1", "a:1", "u2", "a:2", "u3"]),
        fork(ForkReason::HistoryEdited)
    );
    assert_eq!(
        plan(&chat, "", &["u1", "a:1 and less", "u2"]),
        fork(ForkReason::AnswerEdited)
    );
}

#[test]
fn an_answer_with_a_stop_token_has_no_more_behind_it() {
    let mut chat = Conversation::default();
    answer(&mut chat, "", &["u1"], "a:1", &[100]);
    let stuck = planned(&chat, "", &["u1", "a:1 and more", "u2"])
        .walk
        .stuck();
    let context = stuck.expect("is stuck").context;
    assert_eq!(chat.unfinished(context).count(), 0);
}

#[test]
fn an_earlier_turn_can_be_extended_again() {
    let mut chat = Conversation::default();
    let first = answer(&mut chat, "", &["u1"], "a:1", &[100]);
    answer(&mut chat, "", &["u1", "a:1", "u2"], "a:2", &[101]);
    assert_eq!(
        plan(&chat, "", &["u1", "a:1", "u2, in other words"]),
        extend(first, 2)
    );
}

#[test]
fn edited_answers_fork() {
    let mut chat = Conversation::default();
    answer(&mut chat, "", &["u1"], "a:1", &[100]);
    answer(&mut chat, "", &["u1", "a:1", "u2"], "a:2", &[101]);
    assert_eq!(
        plan(&chat, "", &["u1", "a:other", "u2"]),
        fork(ForkReason::AnswerEdited)
    );
    // The first answer is ours, the second is not: a template need not render it as it renders ours.
    assert_eq!(
        plan(&chat, "", &["u1", "a:1", "u2", "a:other", "u3"]),
        fork(ForkReason::AnswerEdited)
    );
    assert_eq!(
        plan(&chat, "", &["system", "u1", "a:1", "u2"]),
        fork(ForkReason::HistoryEdited)
    );
}

#[test]
fn other_conversations_fork() {
    let mut chat = Conversation::default();
    answer(&mut chat, "", &["u1"], "a:1", &[100]);
    assert_eq!(plan(&chat, "", &["u1"]), fork(ForkReason::NewConversation));
    assert_eq!(
        plan(&chat, "", &["v1", "v2"]),
        fork(ForkReason::NewConversation)
    );
}

#[test]
fn changed_tools_are_named() {
    let mut chat = Conversation::default();
    answer(&mut chat, "tool a", &["u1"], "a:1", &[100]);
    assert_eq!(
        plan(&chat, "tool b", &["u1", "a:1", "u2"]),
        fork(ForkReason::ToolsChanged)
    );
    assert_eq!(
        plan(&chat, "tool b", &["u1"]),
        fork(ForkReason::ToolsChanged)
    );
    assert_eq!(
        plan(&chat, "tool b", &["v1"]),
        fork(ForkReason::NewConversation)
    );
}

#[test]
fn of_two_equal_answers_the_later_one_is_extended() {
    let mut chat = Conversation::default();
    answer(&mut chat, "", &["u1"], "a:1", &[100]);
    let second = answer(&mut chat, "", &["u1"], "a:1", &[101]);
    assert_eq!(plan(&chat, "", &["u1", "a:1", "u2"]), extend(second, 2));
}

#[test]
fn answers_are_recognised_by_their_meaning() {
    let mut chat = Conversation::default();
    let first = answer(&mut chat, "", &["u1"], "a:1|because", &[100]);
    for echo in ["a:1|because", "a:1", "a: 1 "] {
        assert_eq!(
            plan(&chat, "", &["u1", echo, "u2"]),
            extend(first, 2),
            "{echo}"
        );
    }
    // Reasoning that we did not give, and an answer's words where we were not asked.
    for (foreign, reason) in [
        (["u1", "a:1|why not", "u2"], ForkReason::AnswerEdited),
        (["u2", "a:1", "u1"], ForkReason::HistoryEdited),
    ] {
        assert_eq!(plan(&chat, "", &foreign), fork(reason), "{foreign:?}");
    }
    // However the first answer was sent back, the second turn is found by either.
    let second = answer(&mut chat, "", &["u1", "a:1", "u2"], "a:2", &[101]);
    assert_eq!(
        plan(&chat, "", &["u1", "a:1|because", "u2", "a: 2", "u3"]),
        extend(second, 4)
    );
}

#[test]
fn equal_words_with_other_reasoning_are_told_apart() {
    let mut chat = Conversation::default();
    let first = answer(&mut chat, "", &["u1"], "a:1|one way", &[100]);
    let second = answer(&mut chat, "", &["u1"], "a:1|another", &[101]);
    assert_eq!(
        plan(&chat, "", &["u1", "a:1|one way", "u2"]),
        extend(first, 2)
    );
    assert_eq!(plan(&chat, "", &["u1", "a:1", "u2"]), extend(second, 2));
    let third = answer(&mut chat, "", &["u1", "a:1|one way", "u2"], "a:3", &[102]);
    assert_eq!(
        plan(&chat, "", &["u1", "a:1|one way", "u2", "a:3", "u4"]),
        extend(third, 4)
    );
    assert_eq!(
        plan(&chat, "", &["u1", "a:1|another", "u2", "a:3", "u4"]),
        fork(ForkReason::HistoryEdited)
    );
}

#[test]
fn messages_of_the_client_are_compared_in_full() {
    let mut chat = Conversation::default();
    answer(&mut chat, "", &["u1", "a:example", "u2"], "a:1", &[100]);
    assert_eq!(
        plan(&chat, "", &["u1", "a: example", "u2", "a:1", "u3"]),
        fork(ForkReason::HistoryEdited)
    );
}

#[test]
fn digests_tell_order_split_and_kind_apart() {
    let of = |messages: &[&str]| planned(&Conversation::default(), "", messages).context_digest;
    assert_ne!(of(&["x", "y"]), of(&["y", "x"]));
    assert_ne!(of(&["xy"]), of(&["x", "y"]));
    assert_ne!(of(&["x"]), of(&["x", ""]));
    assert_ne!(digest_start(b"x"), message_hash(b"x"));
}

#[test]
fn unknown_turns_have_no_tokens() {
    let history = Conversation::default().history(TurnIndex(3));
    assert!(history.is_empty());
    assert_eq!(history.finish, None);
}

proptest! {
    /// Whatever is asked, in whatever order: an extension's prompt is the tokens of exactly the messages before it.
    #[test]
    fn extensions_stand_for_their_messages(steps in prop::collection::vec((0_usize..6, 0_u8..3, any::<bool>()), 1..24)) {
        let mut chat = Conversation::default();
        // Message lists that were answered, with the answer, and the tokens they stand for.
        let mut answered: Vec<(Vec<String>, Vec<u32>)> = vec![(vec![], vec![])];
        // Requests so far, and how they went through the turns.
        let mut asked: Vec<(Vec<String>, Walk)> = Vec::new();
        for (number, (from, question, repeat)) in steps.into_iter().enumerate() {
            let (mut messages, before) = answered[from % answered.len()].clone();
            messages.push(format!("u{question}"));
            if repeat {
                messages.push("u again".to_owned());
            }
            let texts: Vec<&str> = messages.iter().map(String::as_str).collect();
            let plan = plan(&chat, "", &texts);
            let fits = match plan {
                Plan::Fork { .. } => before.is_empty(),
                Plan::Extend { parent, first_new_message } => {
                    chat.history(parent).to_vec() == before && texts[first_new_message - 1].starts_with("a:")
                }
            };
            prop_assert!(fits, "{texts:?}: {plan:?}");
            // Where it can be continued from an earlier request, that leads to the same.
            let whole = planned(&chat, "", &texts);
            for (list, walk) in asked.iter().filter(|(list, _)| messages.starts_with(list)) {
                if let Some(went_on) = chat.go_on(walk, &keys(&texts[list.len()..])) {
                    prop_assert_eq!((went_on.plan, went_on.context_digest), (plan, whole.context_digest));
                }
            }
            asked.push((messages.clone(), whole.walk));
            // Answers are unique, so that only one turn has each.
            let reply = format!("a:{number}");
            let index = answer(&mut chat, "", &texts, &reply, &[1000 + number as u32]);
            messages.push(reply.clone());
            answered.push((messages, chat.history(index).to_vec()));
        }
    }
}
