//! Decides whether a request is a new attempt or repeats an earlier one, and counts it, in one critical section.

use super::Gateway;
use super::answer::{Answer, Head, Reply, unix_time};
use super::attempts::Claim;
use super::body::Delivery;
use super::limits;
use super::live::{Following, Live};
use super::notes::Note;
use super::prompt::Prompt;
use super::request::TurnRequest;
use super::rollouts::{Rollout, RolloutState};
use super::text::Reading;
use super::turn::{self, Attempt, Task};
use crate::Service;
use primerl_core::TurnIndex;
use primerl_service::http::ApiError;
use smallvec::SmallVec;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;

/// A request that is ready to be answered.
pub(crate) enum Prepared {
    New {
        task: Box<Task>,
        following: Following,
        reply: Box<dyn Reply>,
        delivery: Delivery,
    },
    /// The same request is being answered.
    Running(Following, Box<dyn Reply>, Delivery),
    /// The same request was answered.
    Recorded {
        answer: Arc<Answer>,
        reply: Box<dyn Reply>,
        reading: Arc<Reading>,
        delivery: Delivery,
    },
}

/// What a request refers to.
pub(crate) enum Found {
    New {
        /// [`Claim::New`]
        repeats: bool,
    },
    Known(Known),
}

/// An earlier attempt whose answer this client gets. Must not be dropped while the rollout's state is locked.
pub(crate) struct Known {
    delivery: Delivery,
    number: u32,
    what: Earlier,
}

enum Earlier {
    Running(Following),
    Recorded(SmallVec<[TurnIndex; 1]>),
}

pub(crate) fn find(
    rollout: &Arc<Rollout>,
    state: &mut RolloutState,
    request: &TurnRequest,
    is_marked: bool,
) -> Found {
    let digest = request.digest;
    let (number, what) =
        match state
            .attempts
            .ask(digest, request.choices, is_marked, Instant::now())
        {
            Claim::New { repeats } => return Found::New { repeats },
            Claim::Join { number, running } => (number, Earlier::Running(Following::new(&running))),
            Claim::Again { number, turns } => (number, Earlier::Recorded(turns)),
        };
    state.attempts.joined(digest, number);
    Found::Known(Known {
        delivery: Delivery::of(rollout, digest, number),
        number,
        what,
    })
}

impl Known {
    pub(crate) fn prepared(
        self,
        gateway: &Gateway,
        rollout: &Rollout,
        request: &TurnRequest,
        reply: Box<dyn Reply>,
    ) -> Result<Prepared, ApiError> {
        let turns = match self.what {
            Earlier::Running(following) => {
                return Ok(Prepared::Running(following, reply, self.delivery));
            }
            Earlier::Recorded(turns) => turns,
        };
        let (choices, reading) = turn::recorded(gateway, rollout, request, &turns)?;
        let id = turn::answer_id(rollout, request.digest, self.number);
        let head = head_again(gateway, rollout, id, &turns, reply.as_ref());
        Ok(Prepared::Recorded {
            answer: Arc::new(Answer { head, choices }),
            reply,
            reading,
            delivery: self.delivery,
        })
    }
}

/// A new attempt.
pub(crate) struct Begun {
    pub attempt: Attempt,
    pub following: Following,
    pub delivery: Delivery,
    /// Whether nothing of the rollout was sampled before.
    pub is_first: bool,
    /// Events that must be in the journal before sampling begins.
    pub note: Option<Arc<str>>,
}

pub(crate) fn begin(
    service: &Service,
    rollout: &Arc<Rollout>,
    request: &TurnRequest,
    prompt: &Prompt,
    reading: Reading,
    reply: &dyn Reply,
    is_marked: bool,
) -> Result<Result<Begun, Known>, ApiError> {
    let shown = reply.shows_prompt();
    let shown = shown.then(|| prompt.history.prompt_with(&prompt.suffix).into());
    let (digest, choices) = (request.digest, request.choices);
    let mut state = rollout.state.lock();
    let repeats = match find(rollout, &mut state, request, is_marked) {
        Found::New { repeats } => repeats,
        Found::Known(known) => {
            drop(state);
            return Ok(Err(known));
        }
    };
    limits::check(&state.held())?;
    rollout.check_time()?;
    rollout.allowance.take(choices)?;
    state.requests += 1;
    let number = state.requests;
    let head = Head {
        id: turn::answer_id(rollout, digest, number),
        created: unix_time(),
        model: rollout.model(&service.gateway).into(),
        prompt_tokens: prompt.ids().len(),
        choices,
        prompt: shown,
    };
    let live = Live::new(head, Arc::new(reading));
    state
        .attempts
        .begin(digest, number, Arc::clone(&live), is_marked);
    let is_first = state.turns.is_empty();
    drop(state);
    rollout.asks();
    Ok(Ok(Begun {
        attempt: Attempt {
            rollout: Arc::clone(rollout),
            digest,
            number,
            choices,
            recorded: AtomicU32::new(0),
        },
        following: Following::new(&live),
        delivery: Delivery::of(rollout, digest, number),
        is_first,
        note: repeats.then(|| Note::repeat(digest, number).text()),
    }))
}

fn head_again(
    gateway: &Gateway,
    rollout: &Rollout,
    id: Arc<str>,
    turns: &[TurnIndex],
    reply: &dyn Reply,
) -> Head {
    let state = rollout.state.lock();
    let turn = turns.first().copied().unwrap_or(TurnIndex(0));
    let session = state.turns.get(turn.0 as usize).map(|turn| &turn.session);
    let prompt = session
        .and_then(|session| state.sessions.get(session))
        .map(|session| session.conversation.prompt_of(turn))
        .unwrap_or_default();
    let text = state.turns.get(turn.0 as usize);
    let text = text.and_then(|turn| turn.text.as_deref());
    Head {
        id,
        created: unix_time(),
        model: rollout.model(gateway).into(),
        prompt_tokens: text.map_or(prompt.len(), |text| text.prompt_tokens as usize),
        choices: turns.len() as u32,
        prompt: reply.shows_prompt().then(|| prompt.into()),
    }
}
