use super::*;
use crate::testing::turn;
use proptest::prelude::*;

/// A chat as the gateway sees it: messages by text, an assistant's prefixed with `a:`.
fn digests(messages: &[&str]) -> (Vec<u128>, Vec<bool>) {
    messages
        .iter()
        .map(|text| (message_hash(text.as_bytes()), text.starts_with("a:")))
        .unzip()
}

fn plan(conversation: &Conversation, tools: &str, messages: &[&str]) -> Plan {
    let (hashes, is_assistant) = digests(messages);
    conversation.plan(digest_start(tools.as_bytes()), &hashes, &is_assistant)
}

/// Answers `messages` with `answer`, on the plan the conversation makes.
fn answer(
    conversation: &mut Conversation,
    tools: &str,
    messages: &[&str],
    answer: &str,
    sampled: &[u32],
) -> TurnIndex {
    let start = digest_start(tools.as_bytes());
    let (hashes, _) = digests(messages);
    let index = TurnIndex(conversation.len() as u32);
    let (parent, suffix): (Option<TurnIndex>, Vec<u32>) = match plan(conversation, tools, messages)
    {
        Plan::Extend {
            parent,
            first_new_message,
        } => (
            Some(parent),
            messages[first_new_message..]
                .iter()
                .map(|text| text.len() as u32)
                .collect(),
        ),
        Plan::Fork { .. } => (
            None,
            messages.iter().map(|text| text.len() as u32).collect(),
        ),
    };
    let mut turn = turn(parent.map(|parent| parent.0), &suffix, sampled, 0);
    turn.context_digest = digest_messages(start, &hashes);
    turn.answer_digest = digest_next(turn.context_digest, message_hash(answer.as_bytes()));
    turn.start_digest = start;
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
    assert_eq!(
        plan(&chat, "", &["u1", "a:1", "u2"]),
        Plan::Extend {
            parent: first,
            first_new_message: 2
        }
    );
    let second = answer(&mut chat, "", &["u1", "a:1", "u2"], "a:2", &[102]);
    let expected = Plan::Extend {
        parent: second,
        first_new_message: 4,
    };
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
fn an_earlier_turn_can_be_extended_again() {
    let mut chat = Conversation::default();
    let first = answer(&mut chat, "", &["u1"], "a:1", &[100]);
    answer(&mut chat, "", &["u1", "a:1", "u2"], "a:2", &[101]);
    assert_eq!(
        plan(&chat, "", &["u1", "a:1", "u2, in other words"]),
        Plan::Extend {
            parent: first,
            first_new_message: 2
        }
    );
}

#[test]
fn edited_answers_fork() {
    let mut chat = Conversation::default();
    answer(&mut chat, "", &["u1"], "a:1", &[100]);
    answer(&mut chat, "", &["u1", "a:1", "u2"], "a:2", &[101]);
    assert_eq!(
        plan(&chat, "", &["u1", "a:other", "u2"]),
        fork(ForkReason::HistoryEdited)
    );
    // The first answer is ours, the second is not: a template need not render it as it renders ours.
    assert_eq!(
        plan(&chat, "", &["u1", "a:1", "u2", "a:other", "u3"]),
        fork(ForkReason::HistoryEdited)
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
    assert_eq!(
        plan(&chat, "", &["u1", "a:1", "u2"]),
        Plan::Extend {
            parent: second,
            first_new_message: 2
        }
    );
    let (hashes, _) = digests(&["u1"]);
    assert_eq!(
        chat.answered(digest_messages(digest_start(b""), &hashes)),
        Some(second)
    );
}

#[test]
fn digests_tell_order_split_and_kind_apart() {
    let of = |messages: &[&str]| digest_messages(digest_start(b""), &digests(messages).0);
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
        for (number, (from, question, repeat)) in steps.into_iter().enumerate() {
            let (mut messages, before) = answered[from % answered.len()].clone();
            messages.push(format!("u{question}"));
            if repeat {
                messages.push("u again".to_owned());
            }
            let texts: Vec<&str> = messages.iter().map(String::as_str).collect();
            let (hashes, is_assistant) = digests(&texts);
            let plan = chat.plan(digest_start(b""), &hashes, &is_assistant);
            let fits = match plan {
                Plan::Fork { .. } => before.is_empty(),
                Plan::Extend { parent, first_new_message } => {
                    chat.history(parent).to_vec() == before && is_assistant[first_new_message - 1]
                }
            };
            prop_assert!(fits, "{texts:?}: {plan:?}");
            // Answers are unique, so that only one turn has each.
            let reply = format!("a:{number}");
            let index = answer(&mut chat, "", &texts, &reply, &[1000 + number as u32]);
            messages.push(reply.clone());
            answered.push((messages, chat.history(index).to_vec()));
        }
    }
}
