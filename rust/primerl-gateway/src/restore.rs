//! Restores what the gateway knew about a rollout before a restart: from its turns and notes in the journal.

use super::Gateway;
use super::dialect::{KeptResponse, ResponseStore, RestoringResponses};
use super::notes::Note;
use super::rollouts::Rollout;
use primerl_core::machine::OpenRollout;
use primerl_core::{Turn, TurnIndex};
use std::collections::HashMap;
use std::sync::Arc;

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
                unreadable(rollout, &error);
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
                let kept: KeptResponse = match serde_json::from_str(kept.get()) {
                    Ok(kept) => kept,
                    Err(error) => {
                        unreadable(rollout, &error);
                        continue;
                    }
                };
                // A request whose answer is not in the journal cannot be continued.
                let Some(turn) = turns.get(&kept.request()) else {
                    continue;
                };
                if let Err(error) = responses.take_up(gateway, rollout, *turn, kept) {
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
        let _ = rollout.dialect_state::<ResponseStore>().delete(&id);
    }
}

fn unreadable(rollout: &Rollout, error: &serde_json::Error) {
    tracing::warn!(rollout = %rollout.id, %error, "a note in the journal cannot be read");
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
