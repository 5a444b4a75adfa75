//! For engines that render messages. The ids that the engine reports are the prompt; the prompt extends a turn only if
//! it begins with that turn's ids.

use super::messages::chat_messages;
use crate::Service;
use crate::prompt::{Prompt, Resolved, within_vocabulary};
use crate::request::Incoming;
use crate::rollouts::Rollout;
use primerl_core::TurnIndex;
use primerl_core::conversation::{History, Plan};
use primerl_core::turn::ForkReason;
use primerl_engines::{ChatMessages, GenerateError, Resident};
use primerl_service::http::ApiError;
use std::sync::Arc;

pub(super) async fn prompt(
    service: &Arc<Service>,
    rollout: &Arc<Rollout>,
    session: &Arc<str>,
    messages: &[Incoming],
    resolved: Resolved,
) -> Result<Prompt, ApiError> {
    let chat = chat_messages(messages, &resolved.options)?;
    let ids = tokenize(service, rollout, &chat, resolved.resident).await?;
    within_vocabulary(&service.gateway.renderer, &ids)?;
    let prompt = resolved.prompt(session);
    let (parent, fork, history) = place(resolved.planned.plan, resolved.history, &ids);
    Ok(Prompt {
        parent,
        fork,
        suffix: ids[history.len()..].into(),
        history,
        chat: Some(Arc::new(chat)),
        ..prompt
    })
}

async fn tokenize(
    service: &Service,
    rollout: &Rollout,
    chat: &ChatMessages,
    resident: Option<Resident>,
) -> Result<Vec<u32>, ApiError> {
    tokio::select! {
        ids = service.engines.tokenize(chat, resident, rollout.deadline) => ids.map_err(refusal),
        () = rollout.over.cancelled() => Err(rollout.gone()),
    }
}

/// Where the prompt continues the conversation: `recorded` are the ids of the turn that precedes the new messages.
fn place(
    plan: Plan,
    recorded: History,
    ids: &[u32],
) -> (Option<TurnIndex>, Option<ForkReason>, History) {
    match plan {
        Plan::Extend { parent, .. } if recorded.len() < ids.len() && recorded.begins(ids) => {
            (Some(parent), None, recorded)
        }
        Plan::Extend { .. } => (None, Some(ForkReason::PrefixDiffers), History::default()),
        Plan::Fork { reason } => (None, Some(reason), History::default()),
    }
}

fn refusal(error: GenerateError) -> ApiError {
    let message = error.to_string();
    match error {
        GenerateError::Refused(_) => ApiError::invalid(message)
            .param("messages")
            .code("engine_refused"),
        _ => ApiError::unavailable("engine_unavailable", message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use primerl_core::conversation::Conversation;
    use primerl_core::testing::turn;

    #[test]
    fn a_turn_is_extended_only_by_its_own_ids() {
        let mut conversation = Conversation::default();
        conversation.record(TurnIndex(0), &turn(None, &[1, 2], &[3, 4], 0));
        let recorded = || conversation.history(TurnIndex(0));
        let extend = Plan::Extend {
            parent: TurnIndex(0),
            first_new_message: 2,
        };
        let (parent, fork, history) = place(extend, recorded(), &[1, 2, 3, 4, 5]);
        assert_eq!((parent, fork), (Some(TurnIndex(0)), None));
        assert_eq!(history.len(), 4);
        // The answer's thinking is missing, its text is encoded differently, or nothing follows it.
        for other in [&[1, 2, 4, 5][..], &[1, 2, 9, 4, 5], &[1, 2, 3, 4], &[1]] {
            let (parent, fork, history) = place(extend, recorded(), other);
            assert_eq!((parent, fork), (None, Some(ForkReason::PrefixDiffers)));
            assert!(history.is_empty());
        }
        let edited = Plan::Fork {
            reason: ForkReason::HistoryEdited,
        };
        let (parent, fork, _) = place(edited, recorded(), &[1, 2, 3, 4, 5]);
        assert_eq!((parent, fork), (None, Some(ForkReason::HistoryEdited)));
    }
}
