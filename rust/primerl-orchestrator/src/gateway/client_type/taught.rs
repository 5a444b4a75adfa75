//! A teacher's answer as the policy's model would have written it.

use crate::gateway::prompt::Prompt;
use primerl_core::Turn;
use primerl_core::turn::{FinishReason, ForkReason};
use primerl_render::{Message, RenderOptions, Renderer};
use std::sync::Arc;

/// Gives a turn of text its ids: those of the prompt, as the policy would be given it, and of the answer. Where the
/// template writes the conversation so far otherwise once it is answered, the turn is a fork with all of it.
///
/// # Errors
/// In words: the template cannot write the answer.
pub fn write(
    renderer: &Renderer,
    prompt: &Prompt,
    answer: &Message,
    turn: &mut Turn,
) -> Result<(), String> {
    let unnamed = RenderOptions::default();
    let options = prompt.options.as_ref();
    let options = options.map_or(&unnamed, |options| &options.render);
    // An answer that was cut has no end that could be learnt.
    let was_cut = turn.finish != FinishReason::Stop;
    let answer = renderer.with_renderable_content(answer.clone());
    let ids = renderer.answer_ids(&answer, was_cut, options);
    if let Some(ids) = ids.map_err(|error| error.to_string())? {
        turn.prompt_suffix = Arc::clone(&prompt.suffix);
        turn.sampled = ids.into();
        return Ok(());
    }
    let messages = messages(renderer, prompt)?;
    let both = renderer.prompt_and_answer(&messages, &answer, was_cut, options);
    let (before, ids) = both.map_err(|error| error.to_string())?;
    turn.parent = None;
    turn.fork.get_or_insert(ForkReason::TemplateNotExtendable);
    turn.prompt_suffix = before.into();
    turn.sampled = ids.into();
    Ok(())
}

/// Those that the teacher was sent.
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
    use crate::engines::ChatMessages;
    use crate::gateway::request::Options;
    use primerl_core::TurnIndex;
    use primerl_core::conversation::History;
    use primerl_core::testing::turn;
    use primerl_render::testing::{CHATML, write_model};
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

    /// A taught turn that extends another.
    fn taught(renderer: &Renderer, finish: FinishReason) -> Turn {
        let prompt = Prompt {
            session: "s".into(),
            start_digest: 1,
            context_digest: 2,
            parent: Some(TurnIndex(0)),
            fork: None,
            history: History::default(),
            suffix: [7, 8].into(),
            resident: None,
            options: Some(Arc::new(Options::new(None, Map::new()))),
            chat: Some(Arc::new(ChatMessages {
                messages: bytes::Bytes::from_static(br#"[{"role": "user", "content": "Hi"}]"#),
                tools: None,
                template_kwargs: Map::new(),
            })),
        };
        let mut turn = Turn {
            finish,
            ..turn(Some(0), &[], &[], 0)
        };
        write(renderer, &prompt, &Message::assistant("Yo"), &mut turn).expect("is written");
        turn
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
