//! A request that is being answered: one task samples, and any number of clients follow it. When the last client has
//! left, the engines' requests are aborted.

use super::answer::{Answer, Head};
use super::attempts::Running;
use super::text::Reading;
use parking_lot::Mutex;
use primerl_service::http::ApiError;
use std::sync::Arc;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

pub(crate) type Outcome = Result<Arc<Answer>, ApiError>;

/// What an engine has sampled so far for one choice.
#[derive(Debug, Default)]
pub(crate) struct Partial {
    pub ids: Vec<u32>,
    pub logprobs: Vec<f32>,
    pub top: Vec<Vec<(u32, f32)>>,
}

#[derive(Debug)]
pub(crate) struct Live {
    pub head: Head,
    pub reading: Arc<Reading>,
    state: Mutex<LiveState>,
    /// Increased at each change of `state`.
    changed: watch::Sender<u64>,
    /// Cancelled when no client waits for the answer any more.
    abandoned: CancellationToken,
}

/// Locked for look-ups and appends, never across an await.
#[derive(Debug)]
pub(crate) struct LiveState {
    pub choices: Vec<Partial>,
    pub outcome: Option<Outcome>,
    clients: usize,
}

impl Running for Arc<Live> {
    fn is_abandoned(&self) -> bool {
        self.abandoned.is_cancelled()
    }
}

impl Live {
    pub(crate) fn new(head: Head, reading: Arc<Reading>) -> Arc<Live> {
        let choices = (0..head.choices).map(|_| Partial::default()).collect();
        Arc::new(Live {
            head,
            reading,
            state: Mutex::new(LiveState {
                choices,
                outcome: None,
                clients: 0,
            }),
            changed: watch::channel(0).0,
            abandoned: CancellationToken::new(),
        })
    }

    pub(crate) fn abandoned(&self) -> &CancellationToken {
        &self.abandoned
    }

    /// Reads the current state.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&LiveState) -> T) -> T {
        look(&self.state.lock())
    }

    pub(crate) fn change(&self, change: impl FnOnce(&mut LiveState)) {
        change(&mut self.state.lock());
        self.changed.send_modify(|count| *count += 1);
    }

    /// Ends the request. The first outcome wins.
    pub(crate) fn finish(&self, outcome: Outcome) {
        self.change(|state| {
            state.outcome.get_or_insert(outcome);
        });
    }
}

/// One client that follows a [`Live`].
#[derive(Debug)]
pub(crate) struct Following {
    pub live: Arc<Live>,
    changed: watch::Receiver<u64>,
}

impl Following {
    pub(crate) fn new(live: &Arc<Live>) -> Following {
        live.state.lock().clients += 1;
        Following {
            live: Arc::clone(live),
            changed: live.changed.subscribe(),
        }
    }

    /// Marks the current state as seen.
    pub(crate) fn seen(&mut self) {
        self.changed.mark_unchanged();
    }

    /// Resolves at a change since the last call of [`Following::seen`].
    pub(crate) async fn changed(&mut self) {
        // The sender is a field of `live`, which this value keeps alive.
        let _ = self.changed.changed().await;
    }

    pub(crate) async fn outcome(&mut self) -> Outcome {
        loop {
            self.seen();
            if let Some(outcome) = self.live.look(|state| state.outcome.clone()) {
                return outcome;
            }
            self.changed().await;
        }
    }
}

impl Drop for Following {
    fn drop(&mut self) {
        let mut state = self.live.state.lock();
        state.clients -= 1;
        if state.clients == 0 {
            self.live.abandoned.cancel();
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    pub(crate) fn live() -> Arc<Live> {
        let head = Head {
            id: "a".into(),
            created: 0,
            model: "m".into(),
            prompt_tokens: 1,
            choices: 1,
            prompt: None,
        };
        let reading = Reading {
            parse: crate::request::Parse::Text,
            options: None,
            starts_in_reasoning: false,
            stop: Vec::new(),
            request_digest: 0,
        };
        Live::new(head, Arc::new(reading))
    }
}

#[cfg(test)]
mod tests {
    use super::testing::live;
    use super::*;

    #[tokio::test]
    async fn it_is_abandoned_with_its_last_client() {
        let live = live();
        let (first, second) = (Following::new(&live), Following::new(&live));
        drop(first);
        assert!(!live.abandoned().is_cancelled());
        drop(second);
        assert!(live.abandoned().is_cancelled());
    }

    #[tokio::test]
    async fn all_clients_get_the_first_outcome() {
        let live = live();
        let mut early = Following::new(&live);
        let waiting = tokio::spawn(async move { early.outcome().await });
        live.finish(Err(ApiError::invalid("first")));
        live.finish(Err(ApiError::invalid("second")));
        for outcome in [
            waiting.await.expect("runs"),
            Following::new(&live).outcome().await,
        ] {
            assert_eq!(outcome.expect_err("an error").message, "first");
        }
    }
}
