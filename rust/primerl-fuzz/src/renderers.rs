//! Tiny models, loaded once a process.

use primerl_render::Renderer;
use primerl_render::testing::{CHATML, write_model};
use std::sync::{Arc, LazyLock};

/// Tools, reasoning, and what else templates of today ask of a message.
const AGENT: &str = include_str!("../templates/agent.jinja");

fn load(template: &str) -> Arc<Renderer> {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let added = [
        ("<|im_end|>", true),
        ("<|endoftext|>", true),
        ("<|im_start|>", true),
        ("<think>", false),
        ("</think>", false),
        ("<tool_call>", false),
        ("</tool_call>", false),
    ];
    let merges = [("t", "h"), ("th", "e"), ("\n", "\n")];
    write_model(
        folder.path(),
        &added,
        &merges,
        template,
        "<|im_end|>",
        "<|endoftext|>",
    )
    .expect("a model's folder");
    Arc::new(Renderer::load(folder.path()).expect("the model loads"))
}

pub static PLAIN_MODEL: LazyLock<Arc<Renderer>> = LazyLock::new(|| load(CHATML));
pub static AGENT_MODEL: LazyLock<Arc<Renderer>> = LazyLock::new(|| load(AGENT));
