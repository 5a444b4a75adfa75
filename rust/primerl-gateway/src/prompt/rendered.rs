//! Renders messages to ids: completely, or only the ids to append to recorded ones.

use super::refuse;
use crate::continued;
use crate::request::{Incoming, Options};
use primerl_core::Turn;
use primerl_core::conversation::History;
use primerl_render::{ExtensionContext, Message, Renderer};
use primerl_service::http::ApiError;

fn read_all(
    renderer: &Renderer,
    messages: &[Incoming],
    first: usize,
) -> Result<Vec<Message>, ApiError> {
    let read = |(index, message): (usize, &Incoming)| {
        let message = message.read(index)?.into_owned();
        renderer.renderable(message, index).map_err(refuse)
    };
    (first..).zip(messages).map(read).collect()
}

/// Rendered messages.
pub(super) struct Rendered {
    pub ids: Vec<u32>,
    pub holds_control_tokens: bool,
}

impl Rendered {
    fn new(renderer: &Renderer, messages: &[Message], ids: Vec<u32>) -> Self {
        let holds = |message| renderer.holds_control_tokens(message);
        Self {
            ids,
            holds_control_tokens: messages.iter().any(holds),
        }
    }
}

pub(super) fn render(
    renderer: &Renderer,
    messages: &[Incoming],
    options: &Options,
) -> Result<Rendered, ApiError> {
    let messages = read_all(renderer, messages, 0)?;
    let ids = renderer
        .render(&messages, &options.render)
        .map_err(refuse)?;
    Ok(Rendered::new(renderer, &messages, ids))
}

/// The ids to append to the recorded ones; `None` if the template does not allow it. `messages` begin with the answer,
/// which is message number `first` of the request; `continued` is its turn, if it came back with more text appended.
pub(super) fn extend(
    renderer: &Renderer,
    messages: &[Incoming],
    first: usize,
    options: &Options,
    recorded: &History,
    continued: Option<&Turn>,
) -> Result<Option<Rendered>, ApiError> {
    let messages = read_all(renderer, messages, first)?;
    let last = recorded.last();
    let context = ExtensionContext {
        answer: &messages[0],
        sampled: last.as_slice(),
        options: &options.render,
    };
    let new = &messages[1..];
    let suffix = match continued {
        None => renderer.extend(&context, new),
        Some(turn) => match continued::appended(renderer, turn, options, &messages[0]) {
            Some(appended) => renderer.extend_unfinished(&context, &appended, new),
            None => return Ok(None),
        },
    };
    match suffix {
        Ok(ids) => Ok(Some(Rendered::new(renderer, new, ids))),
        Err(reason) => {
            tracing::debug!(%reason, "fork: the template does not extend");
            Ok(None)
        }
    }
}
