//! Answers of others as this model would have written them.

use primerl_render::testing::{CHATML, write_model};
use primerl_render::{Message, RenderOptions, Renderer};

const ADDED: [(&str, bool); 3] = [
    ("<|im_end|>", true),
    ("<|user|>", true),
    ("<|im_start|>", true),
];
const IM_END: &str = "<|im_end|>";

fn renderer(template: &str, merges: &[(&str, &str)]) -> Renderer {
    let folder = tempfile::tempdir().expect("temporary folder");
    write_model(folder.path(), &ADDED, merges, template, IM_END, IM_END).expect("model folder");
    Renderer::load(folder.path()).expect("loads")
}

fn history() -> Vec<Message> {
    vec![Message::text("system", "Be brief."), Message::user("Hi")]
}

fn reasoned(reasoning: &str, content: &str) -> Message {
    Message {
        reasoning_content: Some(reasoning.to_owned()),
        ..Message::assistant(content)
    }
}

/// Prompt and answer as the policy would be given and have sampled them.
fn written(renderer: &Renderer, answer: &Message, was_cut: bool) -> (String, String) {
    let options = RenderOptions {
        add_generation_prompt: true,
        ..RenderOptions::default()
    };
    let ids = renderer.answer_ids(answer, was_cut, &options);
    let (prompt, answer) = match ids.expect("renders") {
        Some(ids) => {
            let prompt = renderer.render(&history(), &options);
            (prompt.expect("renders"), ids)
        }
        None => {
            let both = renderer.prompt_and_answer(&history(), answer, was_cut, &options);
            both.expect("is written")
        }
    };
    let text = |ids: &[u32]| renderer.tokenizer().decode(ids, false).expect("decodes");
    (text(&prompt), text(&answer))
}

#[test]
fn an_answer_goes_behind_the_prompt_and_ends_as_the_turn_does() {
    let chatml = renderer(CHATML, &[]);
    let (prompt, answer) = written(&chatml, &Message::assistant("Hello é"), false);
    assert_eq!(
        prompt,
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    assert_eq!(answer, "Hello é<|im_end|>");
    let (_, cut) = written(&chatml, &Message::assistant("Hello é"), true);
    assert_eq!(cut, "Hello é");
}

#[test]
fn the_prompts_last_token_is_the_engines() {
    // A newline of the prompt and one of the answer would be one token of the whole.
    let merging = renderer(CHATML, &[("\n", "\n")]);
    let options = RenderOptions::default();
    let answer = Message::assistant("\nHello");
    let ids = merging.answer_ids(&answer, false, &options);
    let ids = ids.expect("renders").expect("goes on");
    let text = merging.tokenizer().decode(&ids, false).expect("decodes");
    assert_eq!(text, "\nHello<|im_end|>");
}

#[test]
fn a_turn_that_the_next_message_ends_is_ended_by_its_marker() {
    let glm = "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '<|im_start|>' }}{{ m.content }}{% endfor %}\
               {% if add_generation_prompt %}{{ '<|im_start|>' }}{% endif %}";
    let (_, answer) = written(&renderer(glm, &[]), &Message::assistant("Hello"), false);
    assert_eq!(answer, "Hello<|user|>");
}

#[test]
fn reasoning_is_learnt_where_the_template_writes_it() {
    let thinks = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}\
                  {{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n' }}{% endif %}{{ m.content }}\
                  <|im_end|>{{ '\\n' }}{% endfor %}\
                  {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}";
    let (prompt, answer) = written(&renderer(thinks, &[]), &reasoned("Hm", "Hello"), false);
    assert!(prompt.ends_with("assistant\n<think>\n"), "{prompt}");
    assert_eq!(answer, "Hm\n</think>\nHello<|im_end|>");
}

#[test]
fn a_template_that_opens_reasoning_and_leaves_it_out_is_taken_at_its_word() {
    let opens = CHATML.replace(
        "assistant\\n' }}{% endif",
        "assistant\\n<think>\\n' }}{% endif",
    );
    let (prompt, answer) = written(&renderer(&opens, &[]), &reasoned("Hm", "Hello"), false);
    assert!(prompt.ends_with("<|im_start|>assistant\n"), "{prompt}");
    assert_eq!(answer, "Hello<|im_end|>");
    let (_, cut) = written(&renderer(&opens, &[]), &reasoned("Hm", "Hello"), true);
    assert_eq!(cut, "Hello");
}

#[test]
fn a_template_that_leaves_answers_out_is_an_error() {
    let silent = "{% for m in messages %}{% if m.role != 'assistant' %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}\
                  {% if add_generation_prompt %}{{ 'A:' }}{% endif %}";
    let silent = renderer(silent, &[]);
    let options = RenderOptions::default();
    let answer = Message::assistant("Hello");
    let ids = silent.answer_ids(&answer, false, &options);
    assert_eq!(ids.expect("renders"), None);
    let refused = silent.prompt_and_answer(&history(), &answer, false, &options);
    assert!(refused.is_err(), "{refused:?}");
}
