//! Recognises answers that the client sent back with more text appended.
//!
//! A stop sequence or `max_tokens` ends an answer without a stop token, and some agents append text: the closing tag
//! that was their stop sequence, and then what they did with the answer. The model's turn was not closed, so the
//! recorded ids, the agent's text and the end of the turn are what the template writes for the whole message. The
//! agent's text is context: only sampled tokens are trained.

use super::request::{Incoming, Options};
use super::rollouts::Rollout;
use primerl_core::conversation::{MessageKey, Plan, Planned, Stuck};
use primerl_core::{Turn, TurnIndex};
use primerl_render::{
    AnswerContext, Content, Message, Parsed, Renderer, SegmentKind, reasoning_words,
};
use primerl_service::http::ApiError;
use std::sync::Arc;

/// Number of answers to one context that are compared with a message; agents sample few.
const MOST_CANDIDATES: usize = 8;

/// Follows all messages. An answer that came back with more text appended is recognised once, and from then on found by
/// its key.
pub(super) fn plan(
    renderer: &Renderer,
    rollout: &Rollout,
    session: &Arc<str>,
    messages: &[Incoming],
    options: &Options,
    keys: &[MessageKey],
) -> Result<Planned, ApiError> {
    let start = options.start_digest;
    let mut planned = {
        let state = &mut rollout.state.lock();
        state.session(session)?.conversation.plan(start, keys)
    };
    while let (Plan::Fork { .. }, Some(stuck)) = (planned.plan, planned.walk.stuck()) {
        let message = &messages[stuck.message];
        let found = find(renderer, rollout, session, message, stuck, options)?;
        let Some(turn) = found else {
            break;
        };
        let state = &mut rollout.state.lock();
        let conversation = &mut state.session(session)?.conversation;
        let exact = keys[stuck.message].exact;
        conversation.continue_answer(stuck.context, exact, turn);
        planned = conversation.plan(start, keys);
        // The search has passed this message; anything else would repeat for ever.
        if planned.walk.stuck() == Some(stuck) {
            break;
        }
    }
    Ok(planned)
}

/// The turn that the unmatched `message` continues from within its text.
fn find(
    renderer: &Renderer,
    rollout: &Rollout,
    session: &Arc<str>,
    message: &Incoming,
    stuck: Stuck,
    options: &Options,
) -> Result<Option<TurnIndex>, ApiError> {
    let candidates: Vec<(TurnIndex, Turn)> = {
        let mut state = rollout.state.lock();
        let conversation = &state.session(session)?.conversation;
        let unfinished = conversation.unfinished(stuck.context);
        let latest: Vec<TurnIndex> = unfinished.take(MOST_CANDIDATES).collect();
        let turn = |index: TurnIndex| Some((index, state.turns.get(index.0 as usize)?.clone()));
        latest.into_iter().filter_map(turn).collect()
    };
    if candidates.is_empty() {
        return Ok(None);
    }
    let message = message.read(stuck.message)?;
    let continues = |turn: &Turn| appended(renderer, turn, options, &message).is_some();
    let found = candidates.iter().find(|(_, turn)| continues(turn));
    Ok(found.map(|(index, _)| *index))
}

/// The text that `message` has after everything that was sampled in `turn`, including the stop sequence. Leading white
/// space does not count, as in answers that are sent back unchanged.
pub(super) fn appended(
    renderer: &Renderer,
    turn: &Turn,
    options: &Options,
    message: &Message,
) -> Option<String> {
    if message.has_tool_calls() {
        return None;
    }
    let context = AnswerContext {
        tools: options.render.tools.as_deref(),
        starts_in_reasoning: renderer.starts_in_reasoning(&turn.prompt_suffix),
    };
    let parsed = renderer.parse_answer(&turn.sampled, &context).ok()?;
    let sampled = unclosed_text(&parsed)?;
    let reasoning = reasoning_words(message);
    if reasoning.is_some() && reasoning != reasoning_words(&parsed.message) {
        return None;
    }
    let said = message.content.joined().ok()?;
    let appended = said.trim_start().strip_prefix(sampled.trim_start())?;
    Some(appended.to_owned())
}

/// The text of an answer that ends within it: after reasoning, a call or a marker, the message's text is not what
/// follows the last token.
fn unclosed_text(parsed: &Parsed) -> Option<&str> {
    let ends_with_text = parsed.segments.last()?.kind == SegmentKind::Content;
    match &parsed.message.content {
        Content::Text(text)
            if ends_with_text
                && parsed.stop_token.is_none()
                && !parsed.message.has_tool_calls() =>
        {
            Some(text)
        }
        _ => None,
    }
}
