//! What became of the times that a request was made: which of them a request that comes again is about.
//!
//! Requests are equal where their digests are. An agent may well ask the same twice and want two answers; a client that
//! lost an answer asks the same again and wants that one. Only the second says so, if its SDK does:
//!
//! | what comes | of the attempts at the same request before it |
//! |---|---|
//! | unmarked | one that was answered, and whose client left without the answer at most [`RETRIED_WITHIN`] ago, is given again; else a new one begins |
//! | marked as a retry, or with a key that came before | the latest whose answer was lost, or that failed (a new one begins in its place); else the latest that still runs or is on its way; else the latest that was delivered |
//!
//! A new attempt begins also where there is none. A marked one takes the place of one that failed; with an unmarked one,
//! those that failed are forgotten.

use primerl_core::TurnIndex;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// A client that lost an answer and does not say so asks again by then: SDKs wait for 8 s at most before they try again,
/// and for 60 s where they are told to. An equal request that comes later is a new conversation, not that retry.
pub(crate) const RETRIED_WITHIN: Duration = Duration::from_secs(60);

/// Equal requests that failed at a time and may each be made again; of more, the oldest are forgotten.
const MOST_FAILED: usize = 8;

/// How an attempt that runs is found.
pub(crate) trait Running: Clone {
    /// Nobody waits for it any more: it is being given up.
    fn is_abandoned(&self) -> bool;
}

/// The attempts of one rollout, by the digest of their requests.
#[derive(Debug)]
pub(crate) struct Attempts<R> {
    by_digest: HashMap<u128, SmallVec<[Attempt<R>; 1]>>,
    running: usize,
}

/// One time that a request was made.
#[derive(Debug)]
struct Attempt<R> {
    /// Unique within the rollout, ascending.
    number: u32,
    running: Option<R>,
    /// What was recorded of its answers: which of them, and its turn.
    turns: SmallVec<[(u32, TurnIndex); 1]>,
    /// Clients that its answer is on its way to.
    clients: u32,
    /// Somebody took the whole answer; after a restart, somebody may have.
    delivered: bool,
    /// When a client left last.
    left: Option<Instant>,
}

/// What a request that comes is about.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Claim<R> {
    New {
        /// An equal request was answered before: a restart must not take that answer for this one's.
        repeats: bool,
    },
    /// It is being answered.
    Join { number: u32, running: R },
    /// It was answered; the turns, in the order of the answers.
    Again {
        number: u32,
        turns: SmallVec<[TurnIndex; 1]>,
    },
}

/// How a new attempt fares among its equals, from best to worst claimed by a marked retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Delivered,
    UnderWay,
    /// Failed, or answered and lost: its client has nothing.
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

    /// An answer that reached nobody and is on its way to nobody.
    fn is_lost(&self) -> bool {
        !self.delivered && self.clients == 0 && self.running.is_none()
    }

    /// Lost, and lately: a client may come for it that does not say that it came before.
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
        // What is recorded already will be told, whoever waits.
        let is_awaited = |running: &&R| !running.is_abandoned() || !self.turns.is_empty();
        self.running.as_ref().filter(is_awaited)
    }

    /// Of answers before a restart by an older version it is not known which belong together: the last ones do.
    fn answers(&self, choices: u32) -> SmallVec<[TurnIndex; 1]> {
        let mut turns = self.turns.clone();
        turns.sort_unstable();
        let from = turns.len() - choices as usize;
        turns[from..].iter().map(|(_, turn)| *turn).collect()
    }
}

impl<R: Running> Attempts<R> {
    /// What a request is about; nothing changes. `is_marked`: it says that it came before.
    pub(crate) fn ask(
        &self,
        digest: u128,
        choices: u32,
        is_marked: bool,
        now: Instant,
    ) -> Claim<R> {
        let attempts = self.by_digest.get(&digest).map_or(&[][..], |all| all);
        let repeats = attempts.iter().any(|attempt| !attempt.turns.is_empty());
        let new = Claim::New { repeats };
        let again = |attempt: &Attempt<R>| Claim::Again {
            number: attempt.number,
            turns: attempt.answers(choices),
        };
        if !is_marked {
            let lost =
                |attempt: &&Attempt<R>| attempt.may_be_asked_for(now) && attempt.is_whole(choices);
            return attempts.iter().rev().find(lost).map_or(new, again);
        }
        let latest = attempts
            .iter()
            .max_by_key(|attempt| (attempt.rank(choices), attempt.number));
        match latest {
            Some(attempt) => match attempt.runs() {
                Some(running) => Claim::Join {
                    number: attempt.number,
                    running: running.clone(),
                },
                None if attempt.is_whole(choices) => again(attempt),
                None => new,
            },
            None => new,
        }
    }

    /// Attempts that run.
    pub(crate) fn running(&self) -> usize {
        self.running
    }

    /// A new attempt, with its first client; `is_marked` as in [`Attempts::ask`].
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

    /// An answer of it was recorded.
    pub(crate) fn recorded(&mut self, digest: u128, number: u32, choice: u32, turn: TurnIndex) {
        if let Some(attempt) = self.find(digest, number) {
            attempt.turns.push((choice, turn));
        }
    }

    /// It does not run any more.
    pub(crate) fn ended(&mut self, digest: u128, number: u32, choices: u32) {
        let Some(attempt) = self.find(digest, number) else {
            return;
        };
        let ran = attempt.running.take().is_some();
        if !attempt.is_whole(choices) {
            // A part of what was asked for is given to nobody.
            attempt.turns.clear();
        }
        self.running -= usize::from(ran);
        self.tidy(digest);
    }

    /// Another client gets its answer.
    pub(crate) fn joined(&mut self, digest: u128, number: u32) {
        if let Some(attempt) = self.find(digest, number) {
            attempt.clients += 1;
        }
    }

    /// A client took all of the answer, or left.
    pub(crate) fn left(&mut self, digest: u128, number: u32, took_all: bool, now: Instant) {
        if let Some(attempt) = self.find(digest, number) {
            attempt.left = Some(now);
            attempt.clients = attempt.clients.saturating_sub(1);
            attempt.delivered |= took_all;
        }
        self.tidy(digest);
    }

    /// An attempt of before a restart, or another answer of it.
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

    /// Forget what no request can be about any more.
    fn tidy(&mut self, digest: u128) {
        let Some(attempts) = self.by_digest.get_mut(&digest) else {
            return;
        };
        let latest = |kept: fn(&Attempt<R>) -> bool| {
            let numbers = attempts
                .iter()
                .filter(|attempt| kept(attempt))
                .map(|attempt| attempt.number);
            numbers.max()
        };
        let delivered = latest(|attempt| attempt.delivered && attempt.running.is_none());
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
