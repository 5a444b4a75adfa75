//! What is told about a model's template before a run.

use primerl_render::testing::{TestModel, write_tiny_model};
use primerl_render::{CheckError, Renderer, Verdict};
use std::path::PathBuf;

fn tiny(folder: &std::path::Path) -> Renderer {
    write_tiny_model(folder).expect("model folder");
    Renderer::load(folder).expect("loads")
}

fn written(folder: &std::path::Path, text: &str) -> PathBuf {
    let path = folder.join("rows.jsonl");
    std::fs::write(&path, text).expect("written");
    path
}

#[test]
fn chatml_extends_by_whatever_it_can_render() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let turns = tiny(folder.path()).check_scenarios();
    assert_eq!(turns.len(), 12);
    for turn in &turns {
        match &turn.verdict {
            Verdict::Extends { closes_with, .. } => assert_eq!(closes_with, "<|im_end|>"),
            // The template concatenates the content of a call, which is null.
            Verdict::Refused { .. } => assert!(turn.new_messages.contains(&"tool".to_owned())),
            other => panic!("{}: {other:?}", turn.conversation),
        }
    }
}

#[test]
fn reads_conversations_and_skips_what_no_request_continued() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let user = r#"{"role": "user", "content": "x"}"#;
    let answer = r#"{"role": "assistant", "content": "y"}"#;
    let path = written(
        folder.path(),
        &format!(
            "{{\"messages\": [{user}, {answer}, {user}, {answer}, {answer}, {user}, {answer}], \"id\": 3}}\n\n{{\"messages\": [{user}]}}\n"
        ),
    );
    let turns = tiny(folder.path()).check_file(&path).expect("reads");
    let told: Vec<_> = turns
        .iter()
        .map(|turn| (turn.conversation.as_str(), turn.answer))
        .collect();
    assert_eq!(told, [("line 1", 1), ("line 1", 4)]);
}

#[test]
fn a_bad_row_is_named() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let renderer = tiny(folder.path());
    for (text, expected) in [
        ("{\"messages\": []}\n{", "line 2: no JSON object"),
        ("{\"prompt\": 1}", "line 1: messages: expected a list"),
        (
            "{\"messages\": [{\"role\": \"user\"}, {\"content\": \"x\"}]}",
            "line 1: messages[1]: missing field `role`",
        ),
        ("{\"messages\": [], \"tools\": 3}", "line 1: tools: "),
    ] {
        let error = renderer
            .check_file(&written(folder.path(), text))
            .expect_err("refused");
        assert!(matches!(error, CheckError::Row { .. }));
        assert!(error.to_string().contains(expected), "{error}");
    }
    let missing = renderer.check_file(&folder.path().join("nowhere.jsonl"));
    assert!(matches!(missing, Err(CheckError::Read { .. })));
}

#[test]
fn forks_are_told_with_their_reason() {
    let model = TestModel {
        template: "{% for m in messages %}{{ loop.index }}{{ m.content }}<|im_end|>{% endfor %}",
        ..TestModel::default()
    };
    let turns = model.renderer().check_scenarios();
    assert!(
        matches!(&turns[0].verdict, Verdict::Forks { reason, .. } if reason == "depends_on_history")
    );
}
