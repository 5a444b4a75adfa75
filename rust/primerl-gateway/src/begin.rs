//! Decides whether a request is a new attempt or repeats an earlier one, and counts it, in one critical section.

use super::Gateway;
use super::answer::{Answer, Head, Reply, unix_time};
use super::attempts::Claim;
use super::body::Delivery;
use super::limits;
use super::live::{Following, Live};
use super::notes::Note;
use super::prompt::Prompt;
use super::request::{Input, TurnRequest};
use super::rollouts::{Rollout, RolloutState};
use super::structure::Structure;
use super::text::Reading;
use super::turn::{self, Attempt, Notes, Task};
use crate::Service;
use primerl_core::TurnIndex;
use primerl_service::http::ApiError;
use smallvec::SmallVec;
use std::sync::Arc;

use std::time::Instant;

/// A request as its dialect has read it.
pub(crate) struct Exchange {
    pub request: TurnRequest,
    /// How its answer is written.
    pub reply: Box<dyn Reply>,
    /// The client marked it as a retry.
    pub is_marked: bool,
}

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

pub(crate) fn find(rollout: &Arc<Rollout>, state: &mut RolloutState, exchange: &Exchange) -> Found {
    let TurnRequest {
        digest, choices, ..
    } = exchange.request;
    let now = Instant::now();
    let claim = state.attempts.ask(digest, choices, exchange.is_marked, now);
    let (number, what) = match claim {
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
        exchange: Exchange,
    ) -> Result<Prepared, ApiError> {
        let Exchange { request, reply, .. } = exchange;
        let turns = match self.what {
            Earlier::Running(following) => {
                return Ok(Prepared::Running(following, reply, self.delivery));
            }
            Earlier::Recorded(turns) => turns,
        };
        let (choices, reading) = turn::recorded(gateway, rollout, &request, &turns)?;
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
    exchange: &Exchange,
    prompt: &Prompt,
    reading: Reading,
) -> Result<Result<Begun, Known>, ApiError> {
    let TurnRequest {
        digest, choices, ..
    } = exchange.request;
    let shown = exchange.reply.shows_prompt();
    let shown = shown.then(|| prompt.history.prompt_with(&prompt.suffix).into());
    let mut state = rollout.state.lock();
    let repeats = match find(rollout, &mut state, exchange) {
        Found::New { repeats } => repeats,
        Found::Known(known) => {
            drop(state);
            return Ok(Err(known));
        }
    };
    let number = admit(rollout, &mut state, choices)?;
    let head = Head {
        id: turn::answer_id(rollout, digest, number),
        created: unix_time(),
        model: rollout.model(&service.gateway).into(),
        prompt_tokens: prompt.ids().len(),
        choices,
        prompt: shown,
    };
    let live = Live::new(head, Arc::new(reading));
    let (attempts, running) = (&mut state.attempts, Arc::clone(&live));
    attempts.begin(digest, number, running, exchange.is_marked);
    let is_first = state.turns.is_empty();
    drop(state);
    rollout.asks();
    Ok(Ok(Begun {
        attempt: Attempt::new(rollout, digest, number, choices),
        following: Following::new(&live),
        delivery: Delivery::of(rollout, digest, number),
        is_first,
        note: repeats.then(|| Note::repeat(digest, number).text()),
    }))
}

/// Checks the rollout's limits; returns the number of the new request.
fn admit(rollout: &Rollout, state: &mut RolloutState, choices: u32) -> Result<u32, ApiError> {
    limits::check(&state.held())?;
    rollout.check_time()?;
    rollout.allowance.take(choices)?;
    state.requests += 1;
    Ok(state.requests)
}

impl Begun {
    /// `structure` is what the answer must follow, and `max_tokens` the tokens left for it.
    pub(crate) fn prepared(
        self,
        exchange: Exchange,
        prompt: Prompt,
        structure: Option<Structure>,
        max_tokens: u32,
    ) -> Prepared {
        let Exchange { request, reply, .. } = exchange;
        let live = Arc::clone(&self.following.live);
        let (rollout, number) = (self.attempt.rollout.id, self.attempt.number);
        let task = Task {
            request_id: format!("rollout-{rollout}-{number}"),
            first_of: self.is_first.then_some(rollout),
            notes: Notes {
                at_begin: self.note,
                with_turn: reply.note(&live.head, number),
            },
            attempt: self.attempt,
            // The history must not stay in memory as long as an engine takes.
            request: TurnRequest {
                input: Input::Ids(Vec::new()),
                ..request
            },
            prompt,
            structure,
            max_tokens,
            live,
            shown: reply.streams(),
        };
        Prepared::New {
            task: Box::new(task),
            following: self.following,
            reply,
            delivery: self.delivery,
        }
    }
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
