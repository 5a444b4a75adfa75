//! Restores what the gateway knew about a rollout before a restart.
//!
//! The journal has the turns themselves. The rest that a restart needs is written there as notes
//! ([`primerl_core::Event::Noted`]) in JSON, and only if there is something to note.

use super::Gateway;
use super::dialect::{KeptResponse, RestoringResponses};
use super::rollout_limits::Limit;
use super::rollouts::Rollout;
use crate::RolloutLimits;
use primerl_core::machine::OpenRollout;
use primerl_core::{Turn, TurnIndex};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// One note about a rollout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Note {
    /// A request begins that is equal to one that was answered before. After a restart, its retry must not get the
    /// earlier answer.
    Repeat {
        /// In hexadecimal digits: JSON has no 128-bit numbers.
        digest: String,
        request: u32,
    },
    /// Later requests may refer to the response to this request.
    Response(Box<KeptResponse>),
    /// The response was deleted.
    ResponseDeleted { id: String },
    /// Limits of the rollout's example.
    Limits(RolloutLimits),
    /// Another request of a conversation was refused because of a limit.
    LimitMet { session: String, limit: Limit },
}

impl Note {
    pub(crate) fn repeat(digest: u128, request: u32) -> Note {
        let digest = format!("{digest:032x}");
        Note::Repeat { digest, request }
    }

    pub(crate) fn text(&self) -> Arc<str> {
        // Names are strings in all notes.
        serde_json::to_string(self).unwrap_or_default().into()
    }
}

/// Restores a rollout. The client may not have received any of the last answers: a marked retry gets them again.
pub(super) fn restore(gateway: &Gateway, rollout: &Arc<Rollout>, open: &OpenRollout<'_>) {
    restore_turns(rollout, open.turns);
    if open.notes.is_empty() {
        return;
    }
    let numbered = (0..).zip(open.turns);
    let turns: HashMap<u32, TurnIndex> = numbered
        .map(|(index, turn)| (turn.request, TurnIndex(index)))
        .collect();
    let mut responses = RestoringResponses::default();
    let mut deleted = Vec::new();
    for note in open.notes {
        let note = match serde_json::from_str(note) {
            Ok(note) => note,
            Err(error) => {
                tracing::warn!(rollout = %rollout.id, %error, "a note in the journal cannot be read");
                continue;
            }
        };
        match note {
            Note::Repeat { digest, request } => {
                if let Ok(digest) = u128::from_str_radix(&digest, 16) {
                    let mut state = rollout.state.lock();
                    state.requests = state.requests.max(request);
                    state.attempts.restore(digest, request, None);
                }
            }
            Note::Response(kept) => {
                // A request whose answer is not in the journal cannot be continued.
                let Some(turn) = turns.get(&kept.request()) else {
                    continue;
                };
                if let Err(error) = responses.take_up(gateway, rollout, *turn, *kept) {
                    tracing::warn!(rollout = %rollout.id, error = error.message, "a stored response cannot be restored");
                }
            }
            Note::ResponseDeleted { id } => deleted.push(id),
            Note::Limits(limits) => {
                rollout.tighten(limits);
            }
            Note::LimitMet { session, limit } => {
                rollout.allowance.met(&session.into(), limit);
            }
        }
    }
    for id in deleted {
        // The answer may never have been recorded.
        let _ = rollout.responses.delete(&id);
    }
}

fn restore_turns(rollout: &Rollout, turns: &[Turn]) {
    let mut state = rollout.state.lock();
    for turn in turns {
        let index = state.record(turn);
        rollout.budget.sampled(turn.answer_tokens());
        // Everything that was sampled had been within the limits.
        let _ = rollout.allowance.take(1);
        state.requests = state.requests.max(turn.request);
        let answer = Some((turn.choice, index));
        state
            .attempts
            .restore(turn.request_digest, turn.request, answer);
    }
    // Turns of an older version do not say how many requests they answer.
    state.requests = state.requests.max(turns.len() as u32);
}
