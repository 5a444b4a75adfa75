//! Looks up the keys of a request's messages, so that only new messages are read.

use crate::request::{Incoming, message_key};
use crate::rollouts::Rollout;
use primerl_core::conversation::MessageKey;
use primerl_service::http::ApiError;
use std::sync::Arc;

/// The key of each message from `first` on; reads only those that are new.
pub(super) fn resolve_keys(
    rollout: &Rollout,
    session: &Arc<str>,
    messages: &[Incoming],
    first: usize,
) -> Result<Vec<MessageKey>, ApiError> {
    let messages = messages.get(first..).unwrap_or_default();
    let digests: Vec<Option<u128>> = messages.iter().map(Incoming::raw_digest).collect();
    let known = known_keys(rollout, session, &digests)?;
    let mut new = Vec::new();
    let mut keys = Vec::with_capacity(messages.len());
    for (index, known) in known.into_iter().enumerate() {
        if let Some(key) = known.or_else(|| messages[index].key()) {
            keys.push(key);
            continue;
        }
        let message = messages[index].read(first + index)?;
        let key = message_key(&message);
        new.extend(digests[index].map(|digest| (digest, key)));
        keys.push(key);
    }
    if !new.is_empty() {
        rollout.state.lock().keep_keys(session, new);
    }
    Ok(keys)
}

/// The keys that the session caches.
fn known_keys(
    rollout: &Rollout,
    session: &Arc<str>,
    digests: &[Option<u128>],
) -> Result<Vec<Option<MessageKey>>, ApiError> {
    let mut state = rollout.state.lock();
    let keys = &state.session(session)?.keys;
    let look_up = |digest: &Option<u128>| keys.get(digest.as_ref()?).copied();
    Ok(digests.iter().map(look_up).collect())
}
