//! Makes the ids for the engine from a request: recorded ids plus the new messages' suffix, or a full render.

mod rendered;

use super::continued;
use super::limits::LARGEST_OPTIONS;
use super::request::{Incoming, IncomingOptions, Input, Options, Recurring, message_key};
use super::rollouts::{Rollout, RolloutState, Session};
use primerl_core::conversation::{
    History, MessageKey, Plan, Planned, digest_next, digest_start, message_hash,
};
use primerl_core::turn::{ForkReason, MessageRole, Observed};
use primerl_core::{Turn, TurnIndex};
use primerl_engines::{ChatMessages, PromptIds, Resident};
use primerl_render::{RenderError, Renderer};
use primerl_service::http::ApiError;
use rendered::{extend, render};
use std::sync::Arc;

/// The prompt of one request, and where it continues the conversation.
#[derive(Clone, Debug)]
pub(crate) struct Prompt {
    pub session: Arc<str>,
    /// Digest of tools and template arguments.
    pub start_digest: u128,
    pub context_digest: u128,
    pub parent: Option<TurnIndex>,
    pub fork: Option<ForkReason>,
    /// Ids that were recorded before this turn.
    pub history: History,
    /// This turn's own ids, which follow the recorded ones.
    pub suffix: Arc<[u32]>,
    /// What of them the environment said, where that is learnt.
    pub observed: Vec<Observed>,
    pub resident: Option<Resident>,
    /// Keys of the messages, if the request has messages.
    pub options: Option<Arc<Options>>,
    /// The messages, if the engine or another server renders them.
    pub chat: Option<Arc<ChatMessages>>,
    /// Whether text of messages that were rendered for this prompt became control tokens of the model.
    pub holds_control_tokens: bool,
}

impl Prompt {
    /// The ids that the engine gets.
    pub(crate) fn ids(&self) -> PromptIds<'_> {
        PromptIds {
            history: &self.history,
            suffix: &self.suffix,
        }
    }
}

/// Only computes; no lock is held while it renders.
pub(super) fn prepare(
    renderer: &Renderer,
    rollout: &Rollout,
    session: &Arc<str>,
    input: &Input,
) -> Result<Prompt, ApiError> {
    match input {
        Input::Messages {
            messages,
            options,
            recurring,
        } => {
            let resolved = resolve(renderer, rollout, session, messages, options, *recurring)?;
            of_messages(
                renderer,
                session,
                messages,
                resolved,
                &rollout.sampling.observes,
            )
        }
        Input::Text(text) => {
            let ids = renderer.tokenizer().encode(text).map_err(refuse)?;
            of_ids(rollout, session, &ids)
        }
        Input::Ids(ids) => {
            within_vocabulary(renderer, ids)?;
            of_ids(rollout, session, ids)
        }
    }
}

/// An engine would fail at an id for which its model has no row.
pub(super) fn within_vocabulary(renderer: &Renderer, ids: &[u32]) -> Result<(), ApiError> {
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

/// The ids of a request outside any conversation.
pub(super) fn whole(renderer: &Renderer, input: &Input) -> Result<Vec<u32>, ApiError> {
    match input {
        Input::Messages {
            messages, options, ..
        } => {
            let options = options.read()?;
            renderer.check_tools(&options.render).map_err(refuse)?;
            Ok(render(renderer, messages, &options)?.ids)
        }
        Input::Text(text) => renderer.tokenizer().encode(text).map_err(refuse),
        Input::Ids(ids) => Ok(ids.clone()),
    }
}

/// The error as the client's mistake, with the name of its field.
pub(super) fn refuse(error: RenderError) -> ApiError {
    let param = match &error {
        RenderError::RoleLeftOut { message, .. } => format!("messages[{message}].role"),
        RenderError::ToolsLeftOut => "tools".to_owned(),
        _ => "messages".to_owned(),
    };
    ApiError::invalid(error.to_string()).param(param)
}

/// The position of a request's messages among the recorded turns.
pub(super) struct Resolved {
    pub options: Arc<Options>,
    pub planned: Planned,
    /// Number of the turn that the request continues.
    pub history: History,
    /// That turn, if its answer came back with more text appended.
    pub continued: Option<Turn>,
    pub resident: Option<Resident>,
}

pub(super) fn resolve(
    renderer: &Renderer,
    rollout: &Rollout,
    session: &Arc<str>,
    messages: &[Incoming],
    options: &IncomingOptions,
    recurring: Option<Recurring>,
) -> Result<Resolved, ApiError> {
    let options = resolve_options(rollout, session, options)?;
    let start = options.start_digest;
    let known = |state: &Session| {
        let (through, walk) = state.walked?;
        let fits = recurring?.from == Some(through) && walk.start() == start;
        fits.then_some(walk)
    };
    let walked = known(rollout.state.lock().session(session)?);
    let went_on = match walked {
        None => None,
        Some(walk) => {
            let new = resolve_keys(rollout, session, messages, walk.messages())?;
            let state = &mut rollout.state.lock();
            state.session(session)?.conversation.go_on(&walk, &new)
        }
    };
    let keys = match went_on {
        Some(_) => Vec::new(),
        None => resolve_keys(rollout, session, messages, 0)?,
    };
    let planned = match went_on {
        Some(planned) => planned,
        None => continued::plan(renderer, rollout, session, messages, &options, &keys)?,
    };
    let mut state = rollout.state.lock();
    let continued = match planned.plan {
        Plan::Extend { parent, .. } if planned.continued => {
            state.turns.get(parent.0 as usize).cloned()
        }
        _ => None,
    };
    let state = state.session(session)?;
    state.walked = recurring.map(|recurring| (recurring.through, planned.walk));
    let history = match planned.plan {
        Plan::Extend { parent, .. } => state.conversation.history(parent),
        Plan::Fork { .. } => History::default(),
    };
    Ok(Resolved {
        options,
        planned,
        history,
        continued,
        resident: state.resident,
    })
}

fn of_messages(
    renderer: &Renderer,
    session: &Arc<str>,
    messages: &[Incoming],
    resolved: Resolved,
    observes: &[MessageRole],
) -> Result<Prompt, ApiError> {
    let Resolved {
        options,
        planned,
        history,
        continued,
        resident,
    } = resolved;
    renderer.check_tools(&options.render).map_err(refuse)?;
    let mut prompt = Prompt {
        session: Arc::clone(session),
        start_digest: options.start_digest,
        context_digest: planned.context_digest,
        parent: None,
        fork: None,
        history: History::default(),
        suffix: Arc::default(),
        resident,
        options: Some(Arc::clone(&options)),
        chat: None,
        observed: Vec::new(),
        holds_control_tokens: false,
    };
    let fork = match planned.plan {
        Plan::Fork { reason } => reason,
        Plan::Extend {
            parent,
            first_new_message,
        } => match extend(
            renderer,
            &messages[first_new_message - 1..],
            first_new_message - 1,
            &options,
            &history,
            continued.as_ref(),
            observes,
        )? {
            Some(rendered) => {
                prompt.parent = Some(parent);
                prompt.history = history;
                prompt.suffix = rendered.ids.into();
                prompt.observed = rendered.observed;
                prompt.holds_control_tokens = rendered.holds_control_tokens;
                return Ok(prompt);
            }
            None => ForkReason::TemplateNotExtendable,
        },
    };
    prompt.fork = Some(fork);
    let rendered = render(renderer, messages, &options)?;
    prompt.suffix = rendered.ids.into();
    prompt.holds_control_tokens = rendered.holds_control_tokens;
    Ok(prompt)
}

fn resolve_options(
    rollout: &Rollout,
    session: &Arc<str>,
    incoming: &IncomingOptions,
) -> Result<Arc<Options>, ApiError> {
    let Some(digest) = incoming.raw_digest() else {
        return incoming.read();
    };
    if let Some((known, options)) = &rollout.state.lock().session(session)?.options
        && *known == digest
    {
        return Ok(Arc::clone(options));
    }
    let options = incoming.read()?;
    if incoming.raw_len() <= LARGEST_OPTIONS {
        rollout.state.lock().session(session)?.options = Some((digest, Arc::clone(&options)));
    }
    Ok(options)
}

/// The key of each message from `first` on; reads only those that are new.
fn resolve_keys(
    rollout: &Rollout,
    session: &Arc<str>,
    messages: &[Incoming],
    first: usize,
) -> Result<Vec<MessageKey>, ApiError> {
    let messages = messages.get(first..).unwrap_or_default();
    let digests: Vec<Option<u128>> = messages.iter().map(Incoming::raw_digest).collect();
    let known: Vec<Option<MessageKey>> = {
        let mut state = rollout.state.lock();
        let keys = &state.session(session)?.keys;
        let look_up = |digest: &Option<u128>| keys.get(digest.as_ref()?).copied();
        digests.iter().map(look_up).collect()
    };
    let mut new = Vec::new();
    let mut keys = Vec::with_capacity(messages.len());
    for (index, known) in known.into_iter().enumerate() {
        keys.push(match known.or_else(|| messages[index].key()) {
            Some(key) => key,
            None => {
                let message = messages[index].read(first + index)?;
                let key = message_key(&message);
                new.extend(digests[index].map(|digest| (digest, key)));
                key
            }
        });
    }
    if !new.is_empty() {
        rollout.state.lock().keep_keys(session, new);
    }
    Ok(keys)
}

/// A prompt of ids extends the longest recorded turn with whose ids it begins.
fn of_ids(rollout: &Rollout, session: &Arc<str>, ids: &[u32]) -> Result<Prompt, ApiError> {
    let start_digest = digest_start(b"ids");
    let mut state = rollout.state.lock();
    let parent = longest_begun(&mut state, session, start_digest, ids)?;
    let session_state = state.session(session)?;
    let fork = match (&parent, session_state.conversation.is_empty()) {
        (Some(_), _) => None,
        (None, true) => Some(ForkReason::FirstTurn),
        (None, false) => Some(ForkReason::NewConversation),
    };
    let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
    let (parent, history) = parent.unzip();
    let history = history.unwrap_or_default();
    Ok(Prompt {
        session: Arc::clone(session),
        start_digest,
        context_digest: digest_next(start_digest, message_hash(&bytes)),
        parent,
        fork,
        suffix: ids[history.len()..].into(),
        history,
        resident: session_state.resident,
        options: None,
        chat: None,
        observed: Vec::new(),
        holds_control_tokens: false,
    })
}

/// The turn and its ids.
fn longest_begun(
    state: &mut RolloutState,
    session: &Arc<str>,
    start_digest: u128,
    ids: &[u32],
) -> Result<Option<(TurnIndex, History)>, ApiError> {
    let turns = state.turns.iter().enumerate();
    let candidates: Vec<TurnIndex> = turns
        .filter(|(_, turn)| turn.session == *session && turn.start_digest == start_digest)
        .map(|(index, _)| TurnIndex(index as u32))
        .collect();
    let conversation = &state.session(session)?.conversation;
    let begun = candidates.into_iter().filter_map(|turn| {
        let history = conversation.history(turn);
        (history.len() < ids.len() && history.begins(ids)).then_some((turn, history))
    });
    Ok(begun.max_by_key(|(_, history)| history.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_out_of_the_vocabulary_is_named() {
        let renderer = primerl_render::testing::tiny();
        let size = renderer
            .vocabulary_size()
            .expect("is in the model's config");
        assert!(within_vocabulary(&renderer, &[0, size - 1]).is_ok());
        let error = within_vocabulary(&renderer, &[0, size, 1]).expect_err("is refused");
        assert!(error.message.contains("prompt[1]"), "{}", error.message);
        assert_eq!(error.param.as_deref(), Some("prompt"));
    }
}
