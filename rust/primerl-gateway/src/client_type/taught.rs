//! Writes a teacher's answer as the policy's model would have written it.

use crate::prompt::Prompt;
use crate::request::{TurnRequest, answer_key};
use crate::text::Reading;
use primerl_core::Turn;
use primerl_core::turn::{FinishReason, ForkReason};
use primerl_render::{Message, RenderOptions, Renderer};
use std::sync::Arc;

/// Gives a turn of text its ids: the prompt as the policy would get it, and the answer. If the template writes the
/// conversation so far differently once it is answered, the turn is a fork that holds all of it. The written answer is
/// parsed again as the policy's own answers are: the policy must not learn an answer that would be parsed differently.
///
/// # Errors
/// A message that says why the policy cannot learn the answer.
pub(crate) fn write(
    renderer: &Renderer,
    request: &TurnRequest,
    prompt: &Prompt,
    answer: &Message,
    turn: &mut Turn,
) -> Result<(), String> {
    // A truncated answer has no end that the policy could learn.
    let was_cut = turn.finish != FinishReason::Stop;
    check_words(answer, was_cut)?;
    let answer = renderer.with_renderable_content(answer.clone());
    write_ids(renderer, prompt, &answer, was_cut, turn)?;
    check_read_again(renderer, request, prompt, &answer, turn)
}

fn check_read_again(
    renderer: &Renderer,
    request: &TurnRequest,
    prompt: &Prompt,
    answer: &Message,
    turn: &Turn,
) -> Result<(), String> {
    let options = prompt.options.clone();
    let reading = Reading::new(renderer, request, options, &turn.prompt_suffix);
    let read = reading.read(renderer, &turn.sampled, 0);
    let read = read.map_err(|error| error.to_string())?;
    let (written, said) = (answer_key(&read.message), answer_key(answer));
    // Some templates omit reasoning.
    let reasons = written.reasoning.is_none() || written.reasoning == said.reasoning;
    if written.said == said.said && reasons {
        return Ok(());
    }
    Err("the model's template writes it in a form that would be parsed as another answer (its text has a special token, \
         or the template omits a tool call or writes it in a way that is not recognised)"
        .to_owned())
}

fn write_ids(
    renderer: &Renderer,
    prompt: &Prompt,
    answer: &Message,
    was_cut: bool,
    turn: &mut Turn,
) -> Result<(), String> {
    let unnamed = RenderOptions::default();
    let options = prompt.options.as_ref();
    let options = options.map_or(&unnamed, |options| &options.render);
    let ids = renderer.answer_ids(answer, was_cut, options);
    if let Some(ids) = ids.map_err(|error| error.to_string())? {
        turn.prompt_suffix = Arc::clone(&prompt.suffix);
        turn.sampled = ids.into();
        return Ok(());
    }
    let messages = messages(renderer, prompt)?;
    let both = renderer.prompt_and_answer(&messages, answer, was_cut, options);
    let (before, ids) = both.map_err(|error| error.to_string())?;
    turn.parent = None;
    turn.fork.get_or_insert(ForkReason::TemplateNotExtendable);
    turn.prompt_suffix = before.into();
    turn.sampled = ids.into();
    Ok(())
}

/// A policy that learns from empty answers learns to answer nothing.
fn check_words(answer: &Message, was_cut: bool) -> Result<(), String> {
    let content = answer.content.joined().unwrap_or_default();
    let has_words = !content.trim().is_empty() || answer.has_tool_calls();
    match (has_words, was_cut && answer.reasoning_content.is_some()) {
        (true, _) => Ok(()),
        (false, true) => Err("it was truncated within its reasoning".to_owned()),
        (false, false) => Err("it has neither content nor tool calls".to_owned()),
    }
}

/// The messages that the teacher was sent.
fn messages(renderer: &Renderer, prompt: &Prompt) -> Result<Vec<Message>, String> {
    let sent = prompt.chat.as_ref().map(|chat| &chat.messages[..]);
    let messages: Vec<Message> =
        serde_json::from_slice(sent.unwrap_or(b"[]")).map_err(|error| error.to_string())?;
    let read = |(index, message)| renderer.renderable(message, index);
    let messages: Result<_, _> = messages.into_iter().enumerate().map(read).collect();
    messages.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client_type::testing;
    use crate::request::Options;
    use primerl_core::TurnIndex;
    use primerl_core::testing::turn;
    use primerl_engines::ChatMessages;
    use primerl_render::testing::{CHATML, write_model};
    use primerl_render::{FunctionCall, ToolCall};
    use serde_json::Map;

    fn renderer(template: &str) -> Renderer {
        let folder = tempfile::tempdir().expect("temporary folder");
        let added = [("<|im_end|>", true), ("<|im_start|>", true)];
        write_model(
            folder.path(),
            &added,
            &[],
            template,
            "<|im_end|>",
            "<|im_end|>",
        )
        .expect("model folder");
        Renderer::load(folder.path()).expect("loads")
    }

    /// A taught turn that extends another turn.
    fn taught(renderer: &Renderer, finish: FinishReason) -> Turn {
        learn(renderer, finish, &Message::assistant("Yo")).expect("is written")
    }

    fn learn(renderer: &Renderer, finish: FinishReason, answer: &Message) -> Result<Turn, String> {
        let prompt = Prompt {
            parent: Some(TurnIndex(0)),
            fork: None,
            suffix: [7, 8].into(),
            options: Some(Arc::new(Options::new(None, Map::new()))),
            chat: Some(Arc::new(ChatMessages {
                messages: bytes::Bytes::from_static(br#"[{"role": "user", "content": "Hi"}]"#),
                tools: None,
                template_kwargs: Map::new(),
            })),
            ..testing::prompt()
        };
        let mut turn = Turn {
            finish,
            ..turn(Some(0), &[], &[], 0)
        };
        write(renderer, &testing::request(), &prompt, answer, &mut turn)?;
        Ok(turn)
    }

    #[test]
    fn what_would_teach_something_else_is_refused() {
        let renderer = renderer(CHATML);
        let refused =
            |finish, answer: &Message| learn(&renderer, finish, answer).expect_err("is refused");
        let special = Message::assistant("Yo<|im_end|>\n<|im_start|>user\nMore");
        assert!(refused(FinishReason::Stop, &special).contains("a special token"));
        let call = ToolCall {
            id: Some("c".into()),
            kind: None,
            function: FunctionCall {
                name: "f".into(),
                arguments: serde_json::json!({}),
            },
            extra: Map::new(),
        };
        let calls = Message {
            tool_calls: Some(vec![call]),
            ..Message::assistant("Yo")
        };
        assert!(refused(FinishReason::Stop, &calls).contains("a tool call"));
        let silent = Message::assistant(" \n");
        assert!(refused(FinishReason::Stop, &silent).contains("neither content"));
        let thinking = Message {
            reasoning_content: Some("Hm".into()),
            ..Message::assistant("")
        };
        assert!(refused(FinishReason::Length, &thinking).contains("within its reasoning"));
    }

    fn text(renderer: &Renderer, ids: &[u32]) -> String {
        renderer.tokenizer().decode(ids, false).expect("decodes")
    }

    #[test]
    fn the_answer_goes_behind_the_policys_own_prompt() {
        let renderer = renderer(CHATML);
        let turn = taught(&renderer, FinishReason::Stop);
        assert_eq!(&*turn.prompt_suffix, [7, 8]);
        assert_eq!((turn.parent, turn.fork), (Some(TurnIndex(0)), None));
        assert_eq!(text(&renderer, &turn.sampled), "Yo<|im_end|>");
        for finish in [FinishReason::Length, FinishReason::StopSequence] {
            let cut = taught(&renderer, finish);
            assert_eq!(text(&renderer, &cut.sampled), "Yo");
        }
    }

    #[test]
    fn a_template_that_writes_it_otherwise_makes_a_fork() {
        let opens = CHATML.replace(
            "assistant\\n' }}{% endif",
            "assistant\\n<think>\\n' }}{% endif",
        );
        let renderer = renderer(&opens);
        let turn = taught(&renderer, FinishReason::Stop);
        assert_eq!(turn.parent, None);
        assert_eq!(turn.fork, Some(ForkReason::TemplateNotExtendable));
        let prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(text(&renderer, &turn.prompt_suffix), prompt);
        assert_eq!(text(&renderer, &turn.sampled), "Yo<|im_end|>");
    }
}
