//! Renders messages to ids: completely, or only the ids to append to recorded ones.

use super::{Resolved, refuse};
use crate::continued;
use crate::request::{Incoming, Options};

use primerl_core::turn::{MessageRole, Observed};
use primerl_render::{Body, Extension, ExtensionContext, Message, Renderer};
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
    /// Texts of messages that are learnt.
    pub observed: Vec<Observed>,
    pub holds_control_tokens: bool,
}

impl Rendered {
    fn new(renderer: &Renderer, messages: &[Message], ids: Vec<u32>) -> Self {
        let holds = |message| renderer.holds_control_tokens(message);
        Self {
            ids,
            observed: Vec::new(),
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
/// What messages of the roles in `observes` say is located.
pub(super) fn extend(
    renderer: &Renderer,
    messages: &[Incoming],
    first: usize,
    resolved: &Resolved,
    observes: &[MessageRole],
) -> Result<Option<Rendered>, ApiError> {
    let messages = read_all(renderer, &messages[first..], first)?;
    let (answer, new) = (&messages[0], &messages[1..]);
    let appended = match &resolved.continued {
        None => None,
        Some(turn) => match continued::appended(renderer, turn, &resolved.options, answer) {
            Some(appended) => Some(appended),
            None => return Ok(None),
        },
    };
    let last = resolved.history.last();
    let context = ExtensionContext {
        answer,
        sampled: last.as_slice(),
        options: &resolved.options.render,
    };
    let wants = |message: &Message| observed_role(message, observes).is_some();
    match renderer.extend_located(&context, appended.as_deref(), new, &wants) {
        Ok(extension) => Ok(Some(Rendered {
            observed: observed(&extension, new, observes),
            ..Rendered::new(renderer, new, extension.ids)
        })),
        Err(reason) => {
            tracing::debug!(%reason, "fork: the template does not extend");
            Ok(None)
        }
    }
}

/// The message's role, if messages of that role are learnt.
fn observed_role(message: &Message, observes: &[MessageRole]) -> Option<MessageRole> {
    MessageRole::of(&message.role).filter(|role| observes.contains(role))
}

fn observed(
    extension: &Extension,
    messages: &[Message],
    observes: &[MessageRole],
) -> Vec<Observed> {
    let located = |body: &Body| {
        Some(Observed {
            role: observed_role(&messages[body.message], observes)?,
            begin: body.tokens.start as u32,
            end: body.tokens.end as u32,
        })
    };
    extension.bodies.iter().filter_map(located).collect()
}
