use super::*;
use crate::answer::Tokens;

const NOTHING: Tokens<'static> = Tokens {
    ids: &[],
    logprobs: &[],
    top: &[],
};

/// The name and the data of each event.
fn events(out: Vec<u8>) -> Vec<(String, Value)> {
    let text = String::from_utf8(out).expect("is text");
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').expect("two lines");
        let name = name.strip_prefix("event: ").expect("is named");
        let data = data.strip_prefix("data: ").expect("has data");
        let data: Value = serde_json::from_str(data).expect("is JSON");
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    };
    let events: Vec<_> = text.split_terminator("\n\n").map(event).collect();
    for (number, (_, data)) in events.iter().enumerate() {
        assert_eq!(data["sequence_number"], number);
    }
    events
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    let short = |name: &'_ str| name.strip_prefix("response.").unwrap_or(name).len();
    events
        .iter()
        .map(|(name, _)| &name[name.len() - short(name)..])
        .collect()
}

fn call(index: usize, arguments: &str) -> Delta {
    Delta::ToolCall {
        index,
        id: format!("c{}", index + 1),
        name: "f".into(),
        arguments: arguments.into(),
    }
}

#[test]
fn all_kinds_of_items_are_streamed_completely() {
    let store = Arc::default();
    let changes = json!({"stream": true, "include": ["message.output_text.logprobs"]});
    let (_, reply) = read_in(&store, false, changes).expect("is fine");
    let renderer = tiny();
    let answer = answer("7-0", thinking_call(), FinishReason::Stop);
    let (mut writer, mut out) = (reply.events(), Vec::new());
    writer.begin(&answer.head, &mut out);
    let tokens = answer.choices[0].tokens();
    let reasoning = [Delta::Reasoning("h".into()), Delta::Reasoning("m".into())];
    writer.progress(0, &reasoning, tokens, renderer.tokenizer(), &mut out);
    let rest = [
        Delta::Content("a".into()),
        call(0, "{\"x\""),
        call(0, ":1}"),
    ];
    writer.progress(0, &rest, NOTHING, renderer.tokenizer(), &mut out);
    writer.end(&answer, &mut out);
    let events = events(out);
    assert_eq!(
        names(&events),
        [
            "created",
            "in_progress",
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "content_part.added",
            "output_text.delta",
            "output_text.done",
            "content_part.done",
            "output_item.done",
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
            "completed",
        ]
    );
    let data = |index: usize| &events[index].1;
    assert_eq!(data(0)["response"]["status"], "in_progress");
    assert_eq!(data(0)["response"]["usage"], Value::Null);
    assert_eq!(data(2)["item"]["content"], json!([]));
    assert_eq!(data(6)["text"], "hm");
    assert_eq!(data(11)["delta"], "a");
    assert_eq!(data(11)["logprobs"].as_array().map(Vec::len), Some(2));
    assert_eq!(data(18)["arguments"], "{\"x\":1}");
    assert_eq!(data(18)["name"], "f");
    assert_eq!(data(19)["output_index"], 2);
    // A stream ends with the same response that an unstreamed request returns, and it is stored in the same way.
    let last = &data(20)["response"];
    let mut again = whole(reply.as_ref(), &answer);
    assert_eq!(last["output"], again["output"]);
    assert_eq!(
        last.as_object().map(|last| last.len()),
        again.as_object_mut().map(|again| again.len())
    );
    assert!(store.find("resp_7-0").is_ok());
}

#[test]
fn a_second_call_and_words_after_it_are_items_of_their_own() {
    let (_, reply) = read_in(&Arc::default(), false, json!({"stream": true})).expect("is fine");
    let renderer = tiny();
    let answer = answer("7-0", thinking_call(), FinishReason::Length);
    let (mut writer, mut out) = (reply.events(), Vec::new());
    writer.begin(&answer.head, &mut out);
    let deltas = [call(0, "{}"), call(1, "{}"), Delta::Content("b".into())];
    writer.progress(0, &deltas, NOTHING, renderer.tokenizer(), &mut out);
    writer.end(&answer, &mut out);
    let events = events(out);
    let (name, last) = events.last().expect("is not empty");
    assert_eq!(name, "response.incomplete");
    let output = last["response"]["output"].as_array().expect("a list");
    let statuses: Vec<&Value> = output.iter().map(|item| &item["status"]).collect();
    assert_eq!(statuses, ["completed", "completed", "incomplete"]);
    let ids: Vec<&Value> = output.iter().map(|item| &item["id"]).collect();
    assert_eq!(ids, ["fc_7-0_0", "fc_7-0_1", "msg_7-0_2"]);
}

#[test]
fn an_empty_answer_is_an_empty_message() {
    let (_, reply) = read_in(&Arc::default(), false, json!({"stream": true})).expect("is fine");
    let answer = answer("7-0", Message::assistant(""), FinishReason::Stop);
    let (mut writer, mut out) = (reply.events(), Vec::new());
    writer.begin(&answer.head, &mut out);
    writer.end(&answer, &mut out);
    let events = events(out);
    let last = &events.last().expect("is not empty").1["response"];
    assert_eq!(last["output"][0]["content"][0]["text"], "");
}

#[test]
fn a_failure_is_reported_and_nothing_is_stored() {
    let store = Arc::default();
    let (_, reply) = read_in(&store, false, json!({"stream": true})).expect("is fine");
    let renderer = tiny();
    let answer = answer("7-0", thinking_call(), FinishReason::Stop);
    let (mut writer, mut out) = (reply.events(), Vec::new());
    writer.begin(&answer.head, &mut out);
    let deltas = [Delta::Content("a".into())];
    writer.progress(0, &deltas, NOTHING, renderer.tokenizer(), &mut out);
    writer.error(
        &ApiError::unavailable("engine_unavailable", "gone"),
        &mut out,
    );
    let events = events(out);
    assert_eq!(
        names(&events)[events.len() - 3..],
        ["output_item.done", "error", "failed"]
    );
    assert_eq!(events[events.len() - 2].1["code"], "engine_unavailable");
    let failed = &events[events.len() - 1].1["response"];
    assert_eq!(failed["status"], "failed");
    assert_eq!(
        failed["error"],
        json!({"code": "server_error", "message": "gone"})
    );
    assert_eq!(failed["output"][0]["status"], "incomplete");
    assert!(store.find("resp_7-0").is_err());
}
