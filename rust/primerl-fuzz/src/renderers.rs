//! Tiny models, loaded once a process.

use primerl_render::Renderer;
use primerl_render::testing::{CHATML, TestModel};
use std::sync::{Arc, LazyLock};

/// Tools, reasoning, and what else templates of today ask of a message.
const AGENT: &str = include_str!("../templates/agent.jinja");

fn load(template: &str) -> Arc<Renderer> {
    let model = TestModel {
        added: &[
            ("<|im_end|>", true),
            ("<|endoftext|>", true),
            ("<|im_start|>", true),
            ("<think>", false),
            ("</think>", false),
            ("<tool_call>", false),
            ("</tool_call>", false),
        ],
        merges: &[("t", "h"), ("th", "e"), ("\n", "\n")],
        template,
        ..TestModel::default()
    };
    Arc::new(model.renderer())
}

pub static PLAIN_MODEL: LazyLock<Arc<Renderer>> = LazyLock::new(|| load(CHATML));
pub static AGENT_MODEL: LazyLock<Arc<Renderer>> = LazyLock::new(|| load(AGENT));
