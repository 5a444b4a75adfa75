//! Makes the ids for the engine from a request: recorded ids plus the new messages' suffix, or a full render.

mod keys;
mod rendered;

use super::continued;
use super::limits::LARGEST_OPTIONS;
use super::request::{Incoming, IncomingOptions, Input, Options, Recurring};
use super::rollouts::{Rollout, RolloutState, Session};
use keys::resolve_keys;
use primerl_core::conversation::{History, Plan, Planned, digest_next, digest_start, message_hash};
use primerl_core::turn::{ForkReason, MessageRole, Observed};
use primerl_core::{Turn, TurnIndex};
use primerl_engines::{ChatMessages, PromptIds, Resident};
use primerl_render::{RenderError, Renderer};
use primerl_service::http::ApiError;
use rendered::{Rendered, extend, render};
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
    /// Before its ids and its place in the conversation are known. The digests are those of [`Prompt::start_digest`]
    /// and [`Prompt::context_digest`].
    fn unplaced(
        session: &Arc<str>,
        (start_digest, context_digest): (u128, u128),
        resident: Option<Resident>,
    ) -> Prompt {
        Prompt {
            session: Arc::clone(session),
            start_digest,
            context_digest,
            parent: None,
            fork: None,
            history: History::default(),
            suffix: Arc::default(),
            observed: Vec::new(),
            resident,
            options: None,
            chat: None,
            holds_control_tokens: false,
        }
    }

    fn with(self, rendered: Rendered) -> Prompt {
        Prompt {
            suffix: rendered.ids.into(),
            observed: rendered.observed,
            holds_control_tokens: rendered.holds_control_tokens,
            ..self
        }
    }

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
            let observes = &rollout.sampling.observes;
            of_messages(renderer, session, messages, resolved, observes)
        }
        Input::Text(text) => of_ids(rollout, session, &encode(renderer, text)?),
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
        Input::Text(text) => encode(renderer, text),
        Input::Ids(ids) => Ok(ids.clone()),
    }
}

fn encode(renderer: &Renderer, text: &str) -> Result<Vec<u32>, ApiError> {
    renderer.tokenizer().encode(text).map_err(refuse)
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

impl Resolved {
    /// The prompt of these messages, before its ids and its place in the conversation are known.
    pub(super) fn prompt(&self, session: &Arc<str>) -> Prompt {
        let digests = (self.options.start_digest, self.planned.context_digest);
        Prompt {
            options: Some(Arc::clone(&self.options)),
            ..Prompt::unplaced(session, digests, self.resident)
        }
    }
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
    let planned = match plan_new(rollout, session, messages, recurring, start)? {
        Some(planned) => planned,
        None => {
            let keys = resolve_keys(rollout, session, messages, 0)?;
            continued::plan(renderer, rollout, session, messages, &options, &keys)?
        }
    };
    locate(rollout, session, options, planned, recurring)
}

/// Looks up the turn that the messages continue, and remembers where they are for the session's next request.
fn locate(
    rollout: &Rollout,
    session: &Arc<str>,
    options: Arc<Options>,
    planned: Planned,
    recurring: Option<Recurring>,
) -> Result<Resolved, ApiError> {
    let parent = match planned.plan {
        Plan::Extend { parent, .. } => Some(parent),
        Plan::Fork { .. } => None,
    };
    let mut state = rollout.state.lock();
    let continued = parent.filter(|_| planned.continued);
    let continued = continued.and_then(|parent| state.turns.get(parent.0 as usize).cloned());
    let state = state.session(session)?;
    state.walked = recurring.map(|recurring| (recurring.through, planned.walk));
    let history = parent.map(|parent| state.conversation.history(parent));
    Ok(Resolved {
        options,
        planned,
        history: history.unwrap_or_default(),
        continued,
        resident: state.resident,
    })
}

/// The place of messages of which all but the new ones were those of the session's last request, which alone are read.
/// `None` if they were not, or if the new ones do not follow.
fn plan_new(
    rollout: &Rollout,
    session: &Arc<str>,
    messages: &[Incoming],
    recurring: Option<Recurring>,
    start_digest: u128,
) -> Result<Option<Planned>, ApiError> {
    let known = |state: &Session| {
        let (through, walk) = state.walked?;
        let fits = recurring?.from == Some(through) && walk.start() == start_digest;
        fits.then_some(walk)
    };
    let walked = known(rollout.state.lock().session(session)?);
    let Some(walk) = walked else {
        return Ok(None);
    };
    let new = resolve_keys(rollout, session, messages, walk.messages())?;
    let state = &mut rollout.state.lock();
    Ok(state.session(session)?.conversation.go_on(&walk, &new))
}

fn of_messages(
    renderer: &Renderer,
    session: &Arc<str>,
    messages: &[Incoming],
    resolved: Resolved,
    observes: &[MessageRole],
) -> Result<Prompt, ApiError> {
    let options = &resolved.options;
    renderer.check_tools(&options.render).map_err(refuse)?;
    let prompt = resolved.prompt(session);
    let reason = match resolved.planned.plan {
        Plan::Fork { reason } => reason,
        Plan::Extend {
            parent,
            first_new_message: new,
        } => match extend(renderer, messages, new - 1, &resolved, observes)? {
            Some(rendered) => {
                return Ok(Prompt {
                    parent: Some(parent),
                    history: resolved.history,
                    ..prompt.with(rendered)
                });
            }
            None => ForkReason::TemplateNotExtendable,
        },
    };
    let rendered = render(renderer, messages, options)?;
    Ok(Prompt {
        fork: Some(reason),
        ..prompt.with(rendered)
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
    let context_digest = digest_next(start_digest, message_hash(&bytes));
    let digests = (start_digest, context_digest);
    Ok(Prompt {
        parent,
        fork,
        suffix: ids[history.len()..].into(),
        history,
        ..Prompt::unplaced(session, digests, session_state.resident)
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
