//! Notes about a rollout: what a restart needs that its turns in the journal do not hold.
//!
//! They are written to the journal ([`primerl_core::Event::Noted`]) in JSON, and only if there is something to note.

use super::rollout_limits::Limit;
use crate::RolloutLimits;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
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
    /// Later requests may refer to the response to this request; only its dialect reads what was kept of it.
    Response(Box<RawValue>),
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
