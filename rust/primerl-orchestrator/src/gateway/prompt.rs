//! From a request to the ids the engine is given: recorded ids and the new messages' suffix, or everything rendered.

use super::request::{Incoming, IncomingOptions, Input, Options, TurnRequest, message_key};
use super::rollouts::{Rollout, RolloutState};
use crate::engines::Resident;
use crate::http::ApiError;
use primerl_core::TurnIndex;
use primerl_core::conversation::{MessageKey, Plan, digest_next, digest_start, message_hash};
use primerl_core::turn::ForkReason;
use primerl_render::{ExtensionContext, Message, RenderError, Renderer};
use std::sync::Arc;

/// The prompt of one request, and where it hangs in the conversation.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub session: Arc<str>,
    /// Digest of tools and template arguments.
    pub start_digest: u128,
    pub context_digest: u128,
    pub parent: Option<TurnIndex>,
    pub fork: Option<ForkReason>,
    /// The whole prompt; its last `suffix` ids are this turn's own.
    pub ids: Arc<[u32]>,
    pub suffix: usize,
    pub resident: Option<Resident>,
    /// Those of a request with messages.
    pub options: Option<Arc<Options>>,
}

/// Where a prompt begins, and what is appended to that.
struct Begun {
    parent: Option<TurnIndex>,
    fork: Option<ForkReason>,
    history: Vec<u32>,
}

impl Begun {
    fn anew(reason: ForkReason) -> Begun {
        Begun {
            parent: None,
            fork: Some(reason),
            history: Vec::new(),
        }
    }

    fn with(mut self, suffix: &[u32]) -> (Begun, usize) {
        self.history.extend_from_slice(suffix);
        (self, suffix.len())
    }
}

/// Computes only; no lock is held while it renders.
pub(super) fn prepare(
    renderer: &Renderer,
    rollout: &Rollout,
    session: &Arc<str>,
    request: &TurnRequest,
) -> Result<Prompt, ApiError> {
    match &request.input {
        Input::Messages { messages, options } => {
            of_messages(renderer, rollout, session, messages, options)
        }
        Input::Text(text) => {
            let ids = renderer.tokenizer().encode(text).map_err(refuse)?;
            Ok(of_ids(rollout, session, &ids))
        }
        Input::Ids(ids) => {
            within_vocabulary(renderer, ids)?;
            Ok(of_ids(rollout, session, ids))
        }
    }
}

/// An engine would fail at an id that its model has no row for.
fn within_vocabulary(renderer: &Renderer, ids: &[u32]) -> Result<(), ApiError> {
    let size = renderer.vocabulary_size().unwrap_or(u32::MAX);
    match ids.iter().position(|id| *id >= size) {
        None => Ok(()),
        Some(index) => {
            let message = format!(
                "prompt[{index}] is {}; the vocabulary ends at {}",
                ids[index],
                size.saturating_sub(1)
            );
            Err(ApiError::invalid(message).param("prompt"))
        }
    }
}

fn refuse(error: RenderError) -> ApiError {
    ApiError::invalid(error.to_string()).param("messages")
}

fn of_messages(
    renderer: &Renderer,
    rollout: &Rollout,
    session: &Arc<str>,
    messages: &[Incoming],
    options: &IncomingOptions,
) -> Result<Prompt, ApiError> {
    let options = resolve_options(rollout, session, options)?;
    let keys = resolve_keys(rollout, session, messages)?;
    let (planned, history, resident) = {
        let mut state = rollout.state.lock();
        let session = state.session(session);
        let planned = session.conversation.plan(options.start_digest, &keys);
        let history = match planned.plan {
            Plan::Extend { parent, .. } => session.conversation.history(parent),
            Plan::Fork { .. } => Default::default(),
        };
        (planned, history, session.resident)
    };
    let (begun, suffix) = match planned.plan {
        Plan::Fork { reason } => Begun::anew(reason).with(&render(renderer, messages, &options)?),
        Plan::Extend {
            parent,
            first_new_message,
        } => {
            let ids = history.to_vec();
            match extend(renderer, messages, first_new_message, &options, &ids)? {
                Some(suffix) => Begun {
                    parent: Some(parent),
                    fork: None,
                    history: ids,
                }
                .with(&suffix),
                None => Begun::anew(ForkReason::TemplateNotExtendable)
                    .with(&render(renderer, messages, &options)?),
            }
        }
    };
    Ok(Prompt {
        session: Arc::clone(session),
        start_digest: options.start_digest,
        context_digest: planned.context_digest,
        parent: begun.parent,
        fork: begun.fork,
        ids: begun.history.into(),
        suffix,
        resident,
        options: Some(options),
    })
}

fn resolve_options(
    rollout: &Rollout,
    session: &Arc<str>,
    incoming: &IncomingOptions,
) -> Result<Arc<Options>, ApiError> {
    let Some(digest) = incoming.raw_digest() else {
        return incoming.read();
    };
    if let Some((known, options)) = &rollout.state.lock().session(session).options
        && *known == digest
    {
        return Ok(Arc::clone(options));
    }
    let options = incoming.read()?;
    rollout.state.lock().session(session).options = Some((digest, Arc::clone(&options)));
    Ok(options)
}

/// The key of each message; only those that never came before are read.
fn resolve_keys(
    rollout: &Rollout,
    session: &Arc<str>,
    messages: &[Incoming],
) -> Result<Vec<MessageKey>, ApiError> {
    let digests: Vec<Option<u128>> = messages.iter().map(Incoming::raw_digest).collect();
    let known: Vec<Option<MessageKey>> = {
        let mut state = rollout.state.lock();
        let keys = &state.session(session).keys;
        let look_up = |digest: &Option<u128>| keys.get(digest.as_ref()?).copied();
        digests.iter().map(look_up).collect()
    };
    let mut new = Vec::new();
    let mut keys = Vec::with_capacity(messages.len());
    for (index, known) in known.into_iter().enumerate() {
        keys.push(match known.or_else(|| messages[index].key()) {
            Some(key) => key,
            None => {
                let message = messages[index].read(index)?;
                let key = message_key(&message);
                new.extend(digests[index].map(|digest| (digest, key)));
                key
            }
        });
    }
    if !new.is_empty() {
        rollout.state.lock().session(session).keys.extend(new);
    }
    Ok(keys)
}

fn read_all(messages: &[Incoming], from: usize) -> Result<Vec<Message>, ApiError> {
    let read = |(index, message): (usize, &Incoming)| Ok(message.read(index)?.into_owned());
    messages.iter().enumerate().skip(from).map(read).collect()
}

fn render(
    renderer: &Renderer,
    messages: &[Incoming],
    options: &Options,
) -> Result<Vec<u32>, ApiError> {
    let messages = read_all(messages, 0)?;
    renderer.render(&messages, &options.render).map_err(refuse)
}

/// The ids to append to the recorded ones; `None` where the template does not allow it.
fn extend(
    renderer: &Renderer,
    messages: &[Incoming],
    first_new_message: usize,
    options: &Options,
    recorded: &[u32],
) -> Result<Option<Vec<u32>>, ApiError> {
    let messages = read_all(messages, first_new_message - 1)?;
    let context = ExtensionContext {
        answer: &messages[0],
        sampled: &recorded[recorded.len().saturating_sub(1)..],
        options: &options.render,
    };
    match renderer.extend(&context, &messages[1..]) {
        Ok(suffix) => Ok(Some(suffix)),
        Err(reason) => {
            tracing::debug!(%reason, "fork: the template does not extend");
            Ok(None)
        }
    }
}

/// A prompt that is given as it is extends the longest recorded turn whose ids it begins with.
fn of_ids(rollout: &Rollout, session: &Arc<str>, ids: &[u32]) -> Prompt {
    let start_digest = digest_start(b"ids");
    let mut state = rollout.state.lock();
    let (is_first, parent) = longest_begun(&mut state, session, start_digest, ids);
    let recorded = parent.map_or(0, |(_, length)| length);
    let fork = match (parent, is_first) {
        (Some(_), _) => None,
        (None, true) => Some(ForkReason::FirstTurn),
        (None, false) => Some(ForkReason::NewConversation),
    };
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    Prompt {
        session: Arc::clone(session),
        start_digest,
        context_digest: digest_next(start_digest, message_hash(&bytes)),
        parent: parent.map(|(turn, _)| turn),
        fork,
        ids: ids.into(),
        suffix: ids.len() - recorded,
        resident: state.session(session).resident,
        options: None,
    }
}

/// Whether the session has no turn yet; the turn and its length.
fn longest_begun(
    state: &mut RolloutState,
    session: &Arc<str>,
    start_digest: u128,
    ids: &[u32],
) -> (bool, Option<(TurnIndex, usize)>) {
    let turns = state.turns.iter().enumerate();
    let candidates: Vec<TurnIndex> = turns
        .filter(|(_, turn)| turn.session == *session && turn.start_digest == start_digest)
        .map(|(index, _)| TurnIndex(index as u32))
        .collect();
    let conversation = &state.session(session).conversation;
    let begun = candidates.into_iter().filter_map(|turn| {
        let history = conversation.history(turn);
        (history.len() < ids.len() && history.begins(ids)).then_some((turn, history.len()))
    });
    let longest = begun.max_by_key(|(_, length)| *length);
    (conversation.is_empty(), longest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_out_of_the_vocabulary_is_named() {
        let folder = tempfile::tempdir().expect("temporary folder");
        primerl_render::testing::write_tiny_model(folder.path()).expect("model folder");
        let renderer = Renderer::load(folder.path()).expect("loads");
        let size = renderer
            .vocabulary_size()
            .expect("is in the model's config");
        assert!(within_vocabulary(&renderer, &[0, size - 1]).is_ok());
        let error = within_vocabulary(&renderer, &[0, size, 1]).expect_err("is refused");
        assert!(error.message.contains("prompt[1]"), "{}", error.message);
        assert_eq!(error.param.as_deref(), Some("prompt"));
    }
}
