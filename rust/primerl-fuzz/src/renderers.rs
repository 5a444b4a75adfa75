//! Tiny models, loaded once a process.

use primerl_render::testing::{CHATML, TestModel};
use primerl_render::{ControlTokenPolicy, LoadOptions, Renderer};
use std::sync::{Arc, LazyLock};

/// Tools, reasoning, and what else templates of today ask of a message.
const AGENT: &str = include_str!("../templates/agent.jinja");

fn load(template: &str, control_tokens: ControlTokenPolicy) -> Arc<Renderer> {
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
        options: LoadOptions {
            control_tokens,
            ..LoadOptions::default()
        },
        ..TestModel::default()
    };
    Arc::new(model.renderer())
}

pub static PLAIN_MODEL: LazyLock<Arc<Renderer>> =
    LazyLock::new(|| load(CHATML, ControlTokenPolicy::Keep));
pub static AGENT_MODEL: LazyLock<Arc<Renderer>> =
    LazyLock::new(|| load(AGENT, ControlTokenPolicy::Keep));
/// Control tokens in texts are text.
pub static NEUTRAL_MODELS: LazyLock<[Arc<Renderer>; 2]> = LazyLock::new(|| {
    [CHATML, AGENT].map(|template| load(template, ControlTokenPolicy::Neutralize))
});
