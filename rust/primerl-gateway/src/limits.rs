//! Limits on what one rollout may hold in the orchestrator's memory. No client at normal work reaches any of them; an
//! agent in a loop does.

use axum::http::StatusCode;
use primerl_service::http::ApiError;

/// Requests that are being answered at the same time.
const MOST_RUNNING: usize = 1024;
/// Requests that were started, whatever their result: some leave a note in the journal.
const MOST_REQUESTS: u32 = 1 << 20;
/// Turns of all sessions.
const MOST_TURNS: usize = 1 << 17;
/// Recorded tokens: each turn's own, plus the whole prompt of a turn that forks.
const MOST_TOKENS: usize = 1 << 26;
const MOST_SESSIONS: usize = 1024;
/// Messages whose keys are cached; a key that is not cached is computed again.
pub(crate) const MOST_KEYS: usize = 1 << 18;
/// Longer options are not cached; they are parsed for each request.
pub(crate) const LARGEST_OPTIONS: usize = 1 << 20;
/// Stored responses: their number, and the bytes of their new messages.
const MOST_RESPONSES: usize = 1 << 14;
const MOST_RESPONSE_BYTES: usize = 128 << 20;

/// What a rollout holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    /// Requests that are being answered.
    pub running: usize,
    /// Requests that were started.
    pub requests: u32,
    pub turns: usize,
    pub tokens: usize,
}

/// Whether another request may begin.
pub(crate) fn check(held: &Held) -> Result<(), ApiError> {
    if held.running >= MOST_RUNNING {
        let message = format!(
            "{MOST_RUNNING} requests of this rollout are being answered; wait for some of them before sending more"
        );
        return Err(ApiError {
            status: StatusCode::TOO_MANY_REQUESTS,
            kind: "rate_limit_error",
            ..ApiError::invalid(message).code("too_many_requests")
        });
    }
    if held.requests >= MOST_REQUESTS {
        return Err(full(format!("it has made {MOST_REQUESTS} requests")));
    }
    if held.turns >= MOST_TURNS {
        return Err(full(format!("it has {MOST_TURNS} turns")));
    }
    if held.tokens >= MOST_TOKENS {
        return Err(full(format!("its turns hold {} tokens", held.tokens)));
    }
    Ok(())
}

/// Whether another conversation may begin, if there are this many already.
pub(crate) fn check_sessions(sessions: usize) -> Result<(), ApiError> {
    match sessions < MOST_SESSIONS {
        true => Ok(()),
        false => Err(ApiError::invalid(format!(
            "this rollout has {MOST_SESSIONS} conversations; use the X-Session-ID of one of them again"
        ))
        .param("X-Session-ID")
        .code("rollout_limit_reached")),
    }
}

/// Whether another response may be stored, if there are this many with this many bytes already.
pub(crate) fn check_responses(responses: usize, bytes: usize) -> Result<(), ApiError> {
    if responses < MOST_RESPONSES && bytes < MOST_RESPONSE_BYTES {
        return Ok(());
    }
    let message = format!(
        "this rollout has stored {responses} responses ({bytes} bytes) and may store no more; send \"store\": false and \
         the conversation's items"
    );
    Err(ApiError::invalid(message)
        .param("store")
        .code("rollout_limit_reached"))
}

fn full(why: String) -> ApiError {
    ApiError::invalid(format!("this rollout may not continue: {why}")).code("rollout_limit_reached")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::live::testing::live;
    use crate::rollouts::RolloutState;
    use primerl_core::conversation::MessageKey;
    use primerl_core::testing::turn;

    #[test]
    fn requests_at_a_time_are_bounded_and_may_be_tried_again() {
        let mut state = RolloutState::default();
        for number in 0..MOST_RUNNING as u32 {
            check(&state.held()).expect("there is room");
            state
                .attempts
                .begin(u128::from(number), number, live(), false);
        }
        let error = check(&state.held()).expect_err("is full");
        assert_eq!(error.status, StatusCode::TOO_MANY_REQUESTS);
        state.attempts.ended(3, 3, 1);
        check(&state.held()).expect("one has ended");
    }

    #[test]
    fn conversations_and_recorded_tokens_are_bounded() {
        let mut state = RolloutState::default();
        for number in 0..MOST_SESSIONS {
            let name = number.to_string().as_str().into();
            state.session(&name).expect("there is room");
        }
        let error = state.session(&"one more".into()).expect_err("is refused");
        assert_eq!(error.code, Some("rollout_limit_reached"));
        state.session(&"7".into()).expect("is known");
        let prompt = vec![1; 1 << 20];
        let turn = turn(None, &prompt, &[2], 0);
        while state.tokens < MOST_TOKENS {
            check(&state.held()).expect("there is room");
            state.record(&turn);
        }
        let error = check(&state.held()).expect_err("is full");
        assert_eq!(error.code, Some("rollout_limit_reached"));
        let requests = RolloutState {
            requests: MOST_REQUESTS,
            ..RolloutState::default()
        };
        assert!(check(&requests.held()).is_err());
    }

    #[test]
    fn keys_of_messages_are_forgotten_before_they_are_too_many() {
        let mut state = RolloutState::default();
        let name = "".into();
        state.session(&name).expect("there is room");
        for batch in 0..5_u128 {
            let keys = (0..MOST_KEYS as u128 / 2).map(|n| {
                (
                    batch << 64 | n,
                    MessageKey {
                        exact: 0,
                        answer: None,
                    },
                )
            });
            state.keep_keys(&name, keys.collect());
            let kept: usize = state.sessions.values().map(|it| it.keys.len()).sum();
            assert!(kept <= MOST_KEYS && kept == state.keys, "{kept}");
        }
    }

    #[test]
    fn stored_responses_are_bounded_in_number_and_size() {
        check_responses(MOST_RESPONSES - 1, 0).expect("there is room");
        for (responses, bytes) in [(MOST_RESPONSES, 0), (1, MOST_RESPONSE_BYTES)] {
            let error = check_responses(responses, bytes).expect_err("is full");
            assert_eq!(error.param.as_deref(), Some("store"));
        }
    }
}
