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
    let turns = (0..).zip(open.turns);
    let mut restoring = Restoring {
        gateway,
        rollout,
        turns: turns
            .map(|(index, turn)| (turn.request, TurnIndex(index)))
            .collect(),
        responses: RestoringResponses::default(),
        deleted: Vec::new(),
    };
    for note in open.notes {
        if let Err(error) = restoring.take_in(note) {
            tracing::warn!(rollout = %rollout.id, %error, "a note in the journal cannot be read");
        }
    }
    for id in restoring.deleted {
        // The answer may never have been recorded.
        let _ = rollout.dialect_state::<ResponseStore>().delete(&id);
    }
}

/// A rollout while its notes are read.
struct Restoring<'a> {
    gateway: &'a Gateway,
    rollout: &'a Rollout,
    /// The last turn of each request, by the request's number.
    turns: HashMap<u32, TurnIndex>,
    responses: RestoringResponses,
    /// Ids of responses to delete once all are stored again.
    deleted: Vec<String>,
}

impl Restoring<'_> {
    fn take_in(&mut self, note: &str) -> Result<(), serde_json::Error> {
        match serde_json::from_str(note)? {
            Note::Repeat { digest, request } => {
                if let Ok(digest) = u128::from_str_radix(&digest, 16) {
                    let mut state = self.rollout.state.lock();
                    state.requests = state.requests.max(request);
                    state.attempts.restore(digest, request, None);
                }
            }
            Note::Response(kept) => self.store(serde_json::from_str(kept.get())?),
            Note::ResponseDeleted { id } => self.deleted.push(id),
            Note::Limits(limits) => {
                self.rollout.tighten(limits);
            }
            Note::LimitMet { session, limit } => {
                self.rollout.allowance.met(&session.into(), limit);
            }
        }
        Ok(())
    }

    fn store(&mut self, kept: KeptResponse) {
        // A request whose answer is not in the journal cannot be continued.
        let Some(turn) = self.turns.get(&kept.request()) else {
            return;
        };
        let rollout = self.rollout;
        let stored = self.responses.take_up(self.gateway, rollout, *turn, kept);
        if let Err(error) = stored {
            tracing::warn!(rollout = %rollout.id, error = error.message, "a stored response cannot be restored");
        }
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
