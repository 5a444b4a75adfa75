//! Messages, tools and template arguments of any kind, through fixed templates.

use crate::renderers::{AGENT_MODEL, NEUTRAL_MODELS, PLAIN_MODEL};
use primerl_render::{ExtensionContext, Message, RenderError, RenderOptions, Renderer};
use serde::Deserialize;
use serde_json::{Map, Value};

#[derive(Deserialize)]
struct Input {
    messages: Vec<Message>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    #[serde(default)]
    kwargs: Map<String, Value>,
}

pub fn fuzz(data: &[u8]) {
    let Ok(input) = serde_json::from_slice::<Input>(data) else {
        return;
    };
    let options = RenderOptions {
        tools: input.tools,
        add_generation_prompt: true,
        template_kwargs: input.kwargs,
        ..RenderOptions::default()
    };
    for renderer in [&*PLAIN_MODEL, &*AGENT_MODEL] {
        render(renderer, &input.messages, &options);
    }
    for renderer in &*NEUTRAL_MODELS {
        render(renderer, &input.messages, &options);
    }
}

fn render(renderer: &Renderer, messages: &[Message], options: &RenderOptions) {
    if let Ok(text) = renderer.render_text(messages, options) {
        match renderer.render(messages, options) {
            Ok(ids) => {
                let decoded = renderer.tokenizer().decode(&ids, false);
                assert_eq!(decoded.expect("tokens have a text"), text);
            }
            // The template looks at the text: an honest refusal.
            Err(RenderError::ControlTokens { .. }) => {}
            Err(error) => panic!("text has tokens: {error}"),
        }
    }
    let Some(answer) = messages.iter().position(Message::is_assistant) else {
        return;
    };
    for sampled in [&[][..], &renderer.stop_token_ids()[..1], &[0]] {
        let context = ExtensionContext {
            answer: &messages[answer],
            sampled,
            options,
        };
        // Whether it extends is the templates' tests' to say.
        let _ = renderer.extend(&context, &messages[answer + 1..]);
    }
}
