//! Attempts at each request, and which of them a repeated request refers to.
//!
//! Requests are equal if their digests are. An agent may ask the same twice and want two answers; a client that lost an
//! answer asks the same again and wants that answer. Only the second is marked as a retry, if its SDK marks retries:
//!
//! | the request is | it refers to this earlier attempt at the same request |
//! |---|---|
//! | unmarked | one that was answered, and whose client left without the answer at most [`RETRIED_WITHIN`] ago: the answer is sent again; otherwise a new attempt begins |
//! | marked as a retry, or with a known key | the latest whose answer was lost, or that failed (a new one replaces it); otherwise the latest that is running or being sent; otherwise the latest that was delivered |
//!
//! A new attempt also begins if there is no such attempt. A marked one replaces an attempt that failed; an unmarked one
//! discards all attempts that failed.

use primerl_core::TurnIndex;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A client that lost an answer and does not mark its retry asks again within this time: SDKs wait at most 8 s before
/// they retry, or 60 s if the server asks for it. An equal request that comes later is a new conversation, not that
/// retry.
pub(crate) const RETRIED_WITHIN: Duration = Duration::from_secs(60);

/// Number of equal requests that failed at the same time and may each be made again; beyond it, the oldest are dropped.
const MOST_FAILED: usize = 8;

/// How to find a running attempt.
pub(crate) trait Running: Clone {
    /// No client waits for it any more: it is being aborted.
    fn is_abandoned(&self) -> bool;
}

/// The attempts of one rollout, by the digest of their requests.
#[derive(Debug)]
pub(crate) struct Attempts<R> {
    by_digest: HashMap<u128, SmallVec<[Attempt<R>; 1]>>,
    running: usize,
}

/// One attempt at a request.
#[derive(Debug)]
struct Attempt<R> {
    /// Unique within the rollout, ascending.
    number: u32,
    running: Option<R>,
    /// Recorded answers: index of each, and its turn.
    turns: SmallVec<[(u32, TurnIndex); 1]>,
    /// Number of clients to which its answer is being sent.
    clients: u32,
    /// A client took the whole answer; after a restart, a client may have taken it.
    delivered: bool,
    /// When the last client left.
    left: Option<Instant>,
}

/// What an incoming request refers to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claim<R> {
    New {
        /// An equal request was answered before: a restart must not give that answer to this request.
        repeats: bool,
    },
    /// The request is being answered.
    Join { number: u32, running: R },
    /// The request was answered: the turns, in the order of the answers.
    Again {
        number: u32,
        turns: SmallVec<[TurnIndex; 1]>,
    },
}

/// Status of an attempt among equal ones, in the order in which a marked retry claims them, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Delivered,
    UnderWay,
    /// Failed, or answered and lost: its client has no answer.
    Lost,
}

impl<R> Default for Attempts<R> {
    fn default() -> Self {
        Attempts {
            by_digest: HashMap::new(),
            running: 0,
        }
    }
}

impl<R> Attempt<R> {
    fn is_whole(&self, choices: u32) -> bool {
        self.turns.len() >= choices as usize
    }

    fn has_failed(&self) -> bool {
        self.running.is_none() && self.turns.is_empty()
    }

    /// An answer that no client received and that is being sent to no client.
    fn is_lost(&self) -> bool {
        !self.delivered && self.clients == 0 && self.running.is_none()
    }

    /// Lost recently: its client may ask for it again without marking the request as a retry.
    fn may_be_asked_for(&self, now: Instant) -> bool {
        let is_recent = |left: Instant| now.saturating_duration_since(left) <= RETRIED_WITHIN;
        self.is_lost() && self.left.is_some_and(is_recent)
    }

    fn rank(&self, choices: u32) -> Rank
    where
        R: Running,
    {
        let comes_to_nothing = !self.is_whole(choices) && self.runs().is_none();
        match self {
            _ if comes_to_nothing || self.is_lost() => Rank::Lost,
            _ if self.delivered => Rank::Delivered,
            _ => Rank::UnderWay,
        }
    }

    fn runs(&self) -> Option<&R>
    where
        R: Running,
    {
        // A recorded answer is always sent, no matter which client waits.
        let is_awaited = |running: &&R| !running.is_abandoned() || !self.turns.is_empty();
        self.running.as_ref().filter(is_awaited)
    }

    fn again(&self, choices: u32) -> Claim<R> {
        Claim::Again {
            number: self.number,
            turns: self.answers(choices),
        }
    }

    /// Older versions did not record which answers before a restart belong together: the last ones do.
    fn answers(&self, choices: u32) -> SmallVec<[TurnIndex; 1]> {
        let mut turns = self.turns.clone();
        turns.sort_unstable();
        let from = turns.len() - choices as usize;
        turns[from..].iter().map(|(_, turn)| *turn).collect()
    }
}

/// What a request that is marked as a retry refers to, if it is one.
fn claim_marked<R: Running>(attempts: &[Attempt<R>], choices: u32) -> Option<Claim<R>> {
    let latest = attempts
        .iter()
        .max_by_key(|attempt| (attempt.rank(choices), attempt.number))?;
    match latest.runs() {
        Some(running) => Some(Claim::Join {
            number: latest.number,
            running: running.clone(),
        }),
        None => latest.is_whole(choices).then(|| latest.again(choices)),
    }
}

/// What a request that is not marked refers to, if its client asks again.
fn claim_unmarked<R>(attempts: &[Attempt<R>], choices: u32, now: Instant) -> Option<Claim<R>> {
    let is_lost =
        |attempt: &&Attempt<R>| attempt.may_be_asked_for(now) && attempt.is_whole(choices);
    let lost = attempts.iter().rev().find(is_lost)?;
    Some(lost.again(choices))
}

impl<R: Running> Attempts<R> {
    /// What a request refers to, without any change. `is_marked`: the request is marked as a retry.
    pub(crate) fn ask(
        &self,
        digest: u128,
        choices: u32,
        is_marked: bool,
        now: Instant,
    ) -> Claim<R> {
        let attempts = self.by_digest.get(&digest).map_or(&[][..], |all| all);
        let earlier = match is_marked {
            true => claim_marked(attempts, choices),
            false => claim_unmarked(attempts, choices, now),
        };
        let repeats = attempts.iter().any(|attempt| !attempt.turns.is_empty());
        earlier.unwrap_or(Claim::New { repeats })
    }

    /// Attempts that are running.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// Begins a new attempt with its first client; `is_marked` as in [`Attempts::ask`].
    pub(crate) fn begin(&mut self, digest: u128, number: u32, running: R, is_marked: bool) {
        let attempts = self.by_digest.entry(digest).or_default();
        match attempts.iter().rposition(Attempt::has_failed) {
            Some(latest) if is_marked => drop(attempts.remove(latest)),
            _ => attempts.retain(|attempt| !attempt.has_failed()),
        }
        attempts.push(Attempt {
            number,
            running: Some(running),
            turns: SmallVec::new(),
            clients: 1,
            delivered: false,
            left: None,
        });
        self.running += 1;
    }

    /// Adds a recorded answer to the attempt.
    pub(crate) fn recorded(&mut self, digest: u128, number: u32, choice: u32, turn: TurnIndex) {
        if let Some(attempt) = self.find(digest, number) {
            attempt.turns.push((choice, turn));
        }
    }

    /// Marks the attempt as no longer running.
    pub(crate) fn ended(&mut self, digest: u128, number: u32, choices: u32) {
        let Some(attempt) = self.find(digest, number) else {
            return;
        };
        let ran = attempt.running.take().is_some();
        if !attempt.is_whole(choices) {
            // No client gets only some of the answers that it asked for.
            attempt.turns.clear();
        }
        self.running -= usize::from(ran);
        self.tidy(digest);
    }

    /// Adds another client that gets the attempt's answer.
    pub(crate) fn joined(&mut self, digest: u128, number: u32) {
        if let Some(attempt) = self.find(digest, number) {
            attempt.clients += 1;
        }
    }

    /// Removes a client, which took the whole answer or left.
    pub(crate) fn left(&mut self, digest: u128, number: u32, took_all: bool, now: Instant) {
        if let Some(attempt) = self.find(digest, number) {
            attempt.left = Some(now);
            attempt.clients = attempt.clients.saturating_sub(1);
            attempt.delivered |= took_all;
        }
        self.tidy(digest);
    }

    /// Adds an attempt from before a restart, or another of its answers.
    pub(crate) fn restore(&mut self, digest: u128, number: u32, answer: Option<(u32, TurnIndex)>) {
        let attempts = self.by_digest.entry(digest).or_default();
        let known = attempts.iter_mut().find(|attempt| attempt.number == number);
        match known {
            Some(attempt) => {
                attempt.delivered |= answer.is_some();
                attempt.turns.extend(answer);
            }
            None => attempts.push(Attempt {
                number,
                running: None,
                delivered: answer.is_some(),
                turns: answer.into_iter().collect(),
                clients: 0,
                left: None,
            }),
        }
        attempts.sort_by_key(|attempt| attempt.number);
    }

    fn find(&mut self, digest: u128, number: u32) -> Option<&mut Attempt<R>> {
        let attempts = self.by_digest.get_mut(&digest)?;
        attempts.iter_mut().find(|attempt| attempt.number == number)
    }

    /// Removes attempts to which no request can refer any more.
    fn tidy(&mut self, digest: u128) {
        let Some(attempts) = self.by_digest.get_mut(&digest) else {
            return;
        };
        let delivered = attempts
            .iter()
            .filter(|attempt| attempt.delivered && attempt.running.is_none())
            .map(|attempt| attempt.number)
            .max();
        let failed = attempts.iter().filter(|attempt| attempt.has_failed());
        let mut too_many = failed.count().saturating_sub(MOST_FAILED);
        attempts.retain(|attempt| {
            if attempt.has_failed() && too_many > 0 {
                too_many -= 1;
                return false;
            }
            !attempt.delivered || attempt.running.is_some() || Some(attempt.number) == delivered
        });
        if attempts
            .iter()
            .all(|attempt| attempt.has_failed() && attempt.clients == 0)
        {
            self.by_digest.remove(&digest);
        }
    }
}

#[cfg(test)]
mod tests;
