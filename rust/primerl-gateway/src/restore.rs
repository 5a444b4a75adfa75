//! What the gateway knew of a rollout before a restart.
//!
//! Turns are in the journal as they are. What else a restart needs is noted there ([`primerl_core::Event::Noted`]), as
//! JSON, and only where there is something to note.

use super::Gateway;
use super::allowance::Limit;
use super::dialect::{KeptResponse, RestoringResponses};
use super::rollouts::Rollout;
use crate::RolloutLimits;
use primerl_core::machine::OpenRollout;
use primerl_core::{Turn, TurnIndex};
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::sync::Arc;

/// One line about a rollout.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Note {
    /// A request that is equal to one that was answered before begins. After a restart its retry must not get that
    /// answer.
    Repeat {
        /// In hexadecimal digits: JSON has no numbers of 128 bits.
        digest: String,
        request: u32,
    },
    /// The response of this request may be referred to.
    Response(Box<KeptResponse>),
    /// Not any more.
    ResponseDeleted { id: String },
    /// Of its example.
    Limits(RolloutLimits),
    /// A conversation was refused more.
    LimitMet { session: String, limit: Limit },
}

impl Note {
    pub(crate) fn repeat(digest: u128, request: u32) -> Note {
        let digest = format!("{digest:032x}");
        Note::Repeat { digest, request }
    }

    pub(crate) fn text(&self) -> Arc<str> {
        // Names are strings throughout.
        serde_json::to_string(self).unwrap_or_default().into()
    }
}

/// Take up a rollout as it was. Any of the last answers may never have arrived: a marked retry gets them again.
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
                // Of a request whose answer was not recorded any more there is nothing to go on from.
                let Some(turn) = turns.get(&kept.request()) else {
                    continue;
                };
                if let Err(error) = responses.take_up(gateway, rollout, *turn, *kept) {
                    tracing::warn!(rollout = %rollout.id, error = error.message, "a stored response is lost");
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
        // It may never have been recorded.
        let _ = rollout.responses.delete(&id);
    }
}

fn restore_turns(rollout: &Rollout, turns: &[Turn]) {
    let mut state = rollout.state.lock();
    for turn in turns {
        let index = state.record(turn);
        rollout.budget.sampled(turn.answer_tokens());
        // What was sampled was allowed.
        let _ = rollout.allowance.take(1);
        state.requests = state.requests.max(turn.request);
        let answer = Some((turn.choice, index));
        state
            .attempts
            .restore(turn.request_digest, turn.request, answer);
    }
    // Of an older version's turns it is not known how many requests they answer.
    state.requests = state.requests.max(turns.len() as u32);
}
