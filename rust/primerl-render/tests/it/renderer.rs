//! Loading, rendering and parsing with the tiny model.

use primerl_render::testing::{CHATML, IM_END, TestModel, tiny, write_tiny_model};
use primerl_render::{BackendChoice, LoadError, Message, RenderOptions, Renderer};

#[test]
fn renders_the_demo_prompt_to_its_golden_ids() {
    let renderer = tiny();
    let ids = renderer
        .render(
            &[Message::user("Reverse: qwxyz")],
            &RenderOptions::default(),
        )
        .expect("renders");
    assert_eq!(
        ids,
        [
            258, 260, 198, 49, 68, 85, 68, 81, 82, 68, 25, 220, 80, 86, 87, 88, 89, 256, 198, 258,
            261, 198
        ]
    );
}

#[test]
fn trusts_the_fast_tokenizer_and_reads_the_limits() {
    let renderer = tiny();
    assert_eq!(renderer.tokenizer().backend(), &BackendChoice::Fast);
    assert_eq!(renderer.stop_token_ids(), [IM_END]);
    assert_eq!(renderer.max_positions(), Some(2048));
}

#[test]
fn parses_an_answer_without_its_stop_token() {
    let renderer = tiny();
    let mut sampled = renderer
        .tokenizer()
        .encode("<r>zyx</r> né")
        .expect("encodes");
    assert_eq!(
        renderer.parse(&sampled).expect("parses"),
        Message::assistant("<r>zyx</r> né")
    );
    sampled.push(IM_END);
    assert_eq!(
        renderer.parse(&sampled).expect("parses"),
        Message::assistant("<r>zyx</r> né")
    );
}

#[test]
fn names_what_is_missing_in_a_model_folder() {
    let folder = tempfile::tempdir().expect("temporary folder");
    let message =
        |renderer: Result<Renderer, LoadError>| renderer.err().expect("cannot load").to_string();

    assert!(message(Renderer::load(&folder.path().join("nowhere"))).contains("does not exist"));
    assert!(message(Renderer::load(folder.path())).contains("has no tokenizer.json"));

    write_tiny_model(folder.path()).expect("model folder");
    std::fs::write(
        folder.path().join("tokenizer_config.json"),
        r#"{"eos_token": "<|im_end|>"}"#,
    )
    .expect("written");
    let text = message(Renderer::load(folder.path()));
    assert!(
        text.contains("has no chat template")
            && text.contains(&folder.path().display().to_string()),
        "{text}"
    );

    std::fs::write(folder.path().join("chat_template.jinja"), "{% if %}").expect("written");
    assert!(
        message(Renderer::load(folder.path())).contains("chat_template.jinja does not compile")
    );

    std::fs::write(folder.path().join("chat_template.jinja"), CHATML).expect("written");
    assert!(Renderer::load(folder.path()).is_ok());

    std::fs::write(
        folder.path().join("tokenizer_config.json"),
        r#"{"eos_token": "<|gone|>"}"#,
    )
    .expect("written");
    assert!(
        message(Renderer::load(folder.path()))
            .contains("\"<|gone|>\" is not in the tokenizer's vocabulary")
    );
}

#[test]
fn a_refusal_of_the_template_keeps_its_words() {
    let model = TestModel {
        template: "{{ raise_exception('roles must alternate') }}",
        ..TestModel::default()
    };
    let renderer = model.renderer();
    let error = renderer
        .render(&[Message::user("x")], &RenderOptions::default())
        .expect_err("refused");
    assert!(
        error.to_string().contains("roles must alternate"),
        "{error}"
    );
}

#[test]
fn learns_the_turn_end_that_the_configs_do_not_name() {
    let model = TestModel {
        eos: "<|endoftext|>",
        ..TestModel::default()
    };
    let renderer = model.renderer();
    assert_eq!(renderer.stop_token_ids(), [256, 257]);
}
