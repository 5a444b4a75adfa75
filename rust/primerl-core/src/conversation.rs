//! Messages matched against what was recorded: does a request extend a turn, or does it start a new branch?
//!
//! Works on hashes, so it knows neither JSON nor templates. The gateway makes a [`MessageKey`] of each message and asks
//! [`Conversation::plan`]. A request's messages are folded into a chain
//!
//! ```text
//! start = digest_start(tools and template arguments)
//! d(0) = start,  d(i + 1) = digest_next(d(i), message i)
//! ```
//!
//! so that every prefix of a request has a digest of its own. A message counts by all it says ([`MessageKey::exact`]),
//! unless it is an answer of ours: an assistant message after a context that we answered is compared by meaning
//! ([`AnswerKey`]), for clients send answers back in their own words: without the reasoning, with other white space, with
//! tool arguments serialised again. Where it matches, the chain continues from the recorded answer. A request extends
//! the turn of the last answer it holds: only the messages after it are rendered. No search through the history: one
//! look-up a message.
//!
//! An answer that ended without a stop token may come back with more text behind it: an agent closes a block that a stop
//! sequence cut. Hashes cannot tell that one text begins with another, so the gateway looks at the texts where a walk is
//! stuck ([`Walk::stuck`]), and reports what it finds with [`Conversation::continue_answer`].
//!
//! ```
//! use primerl_core::conversation::{Conversation, MessageKey, Plan, digest_start, message_hash};
//! use primerl_core::turn::ForkReason;
//!
//! let conversation = Conversation::default();
//! let question = MessageKey::exact(message_hash(br#"{"role":"user","content":"2+2?"}"#));
//! let planned = conversation.plan(digest_start(b"[]"), &[question]);
//! assert_eq!(planned.plan, Plan::Fork { reason: ForkReason::FirstTurn });
//! // Once the turn was sampled, it is recorded with planned.context_digest and the key of the message we answered.
//! ```
//!
//! Several turns may have one parent (an agent that asks again, or continues from an earlier answer): the turns of a
//! conversation are a forest, of which [`crate::sample`] takes the branches.

mod history;
mod keys;

pub use history::History;
pub use keys::{MessageKey, digest_next, digest_start, message_hash};

use crate::ids::TurnIndex;
use crate::turn::{AnswerKey, FinishReason, ForkReason, Turn};
use foldhash::{HashMap, HashSet};
use keys::digest_answer;
use smallvec::SmallVec;
use std::sync::Arc;

/// What a conversation makes of a request.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub plan: Plan,
    /// Digest of all messages of the request.
    pub context_digest: u128,
    pub walk: Walk,
    /// For a request that extends a turn, whether its message has more text behind the recorded answer.
    pub continued: bool,
}

/// How a request's prompt is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// The prompt is [`Conversation::history`] of `parent` and the rendering of `messages[first_new_message..]`.
    Extend {
        parent: TurnIndex,
        first_new_message: usize,
    },
    /// The prompt is the rendering of all messages.
    Fork { reason: ForkReason },
}

#[derive(Clone, Debug)]
struct Recorded {
    parent: Option<TurnIndex>,
    prompt_suffix: Arc<[u32]>,
    sampled: Arc<[u32]>,
    finish: FinishReason,
    reasoning: Option<u128>,
    answer_digest: u128,
}

/// The recorded turns of one session of one rollout. Kept by the gateway under a short lock.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    turns: HashMap<TurnIndex, Recorded>,
    /// Turns by their context and [`AnswerKey::said`], in order.
    by_answer: HashMap<(u128, u128), SmallVec<[TurnIndex; 1]>>,
    /// Messages that begin with an answer of ours and have more text behind it, by their context and
    /// [`MessageKey::exact`]: the turn, and the digest through the message.
    continued: HashMap<(u128, u128), (TurnIndex, u128)>,
    /// Turns that ended without a stop token, by their context.
    unfinished: HashMap<u128, SmallVec<[TurnIndex; 1]>>,
    contexts: HashSet<u128>,
    /// What each turn answered, in the order in which they were recorded.
    answered_contexts: Vec<u128>,
    /// Every `start` a turn was recorded under, in order of first use; more than one only if tools changed.
    starts: Vec<u128>,
}

/// A request's messages followed through the recorded turns. A request that begins with these messages need only be
/// followed from here on: [`Conversation::go_on`].
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    start: u128,
    /// Messages followed.
    messages: usize,
    /// The last turn whose answer is among the messages, and the number of messages through it.
    last: Option<(TurnIndex, usize)>,
    /// Whether the message of `last` has more text behind the recorded answer.
    continued: bool,
    /// Whether an assistant message that is not ours comes after it.
    foreign: bool,
    stuck: Option<Stuck>,
    digest: u128,
    /// Turns that were recorded then.
    turns: usize,
}

/// An assistant message that is not one of our answers, at a place where we gave one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stuck {
    /// Its place in the request.
    pub message: usize,
    /// Digest of what comes before it.
    pub context: u128,
}

impl Walk {
    /// The first message after the last answer of ours that is in the place of another answer without being one of ours.
    pub fn stuck(&self) -> Option<Stuck> {
        self.stuck
    }

    /// Messages that it has followed.
    pub fn messages(&self) -> usize {
        self.messages
    }

    /// Digest of tools and template arguments.
    pub fn start(&self) -> u128 {
        self.start
    }
}

impl Conversation {
    /// Decides how to make the prompt of a request with these messages, in O(messages).
    ///
    /// A new assistant message that we did not sample makes the request a fork: it may replace an answer of ours, and
    /// a template need not render a foreign answer as it renders one.
    pub fn plan(&self, start: u128, messages: &[MessageKey]) -> Planned {
        let walk = self.walk(start, messages);
        self.extends(walk).unwrap_or_else(|| {
            let reason = match walk.last {
                _ if self.turns.is_empty() => ForkReason::FirstTurn,
                _ if walk.stuck.is_some() => ForkReason::AnswerEdited,
                Some(_) => ForkReason::HistoryEdited,
                None => self.fork_reason(start, messages),
            };
            Planned {
                plan: Plan::Fork { reason },
                context_digest: walk.digest,
                walk,
                continued: false,
            }
        })
    }

    /// Turns that answered this context and ended without a stop token, the latest first.
    pub fn unfinished(&self, context: u128) -> impl Iterator<Item = TurnIndex> {
        let turns = self.unfinished.get(&context);
        turns.into_iter().flatten().rev().copied()
    }

    /// The message of this [`MessageKey::exact`] is, in this context, the answer of `turn` with more text behind it. Has no
    /// effect for a turn that was not recorded here.
    pub fn continue_answer(&mut self, context: u128, exact: u128, turn: TurnIndex) {
        if let Some(recorded) = self.turns.get(&turn) {
            let digest = digest_next(recorded.answer_digest, exact);
            self.continued.insert((context, exact), (turn, digest));
        }
    }

    /// As [`Conversation::plan`] of the messages of `walk` and then `new`, in O(new), where that follows from `walk` and
    /// the request extends a turn. `None`: the whole has to be looked at.
    pub fn go_on(&self, walk: &Walk, new: &[MessageKey]) -> Option<Planned> {
        // An answer to the messages of the walk comes after them; any other may have taken the place of one among them.
        let since = self.answered_contexts.get(walk.turns..)?;
        if since.iter().any(|context| *context != walk.digest) {
            return None;
        }
        self.extends(self.walk_on(*walk, new))
    }

    fn extends(&self, walk: Walk) -> Option<Planned> {
        let (parent, first_new_message) = walk.last.filter(|_| !walk.foreign)?;
        Some(Planned {
            plan: Plan::Extend {
                parent,
                first_new_message,
            },
            context_digest: walk.digest,
            walk,
            continued: walk.continued,
        })
    }

    /// Records a finished turn. `index` is the turn's number within the rollout: turns of all sessions of a rollout are
    /// numbered together, in the order of their [`crate::Event::TurnFinished`] events. Take the number and send the event
    /// under one lock.
    pub fn record(&mut self, index: TurnIndex, turn: &Turn) {
        if !self.starts.contains(&turn.start_digest) {
            self.starts.push(turn.start_digest);
        }
        let said = (turn.context_digest, turn.answer.said);
        self.by_answer.entry(said).or_default().push(index);
        if matches!(
            turn.finish,
            FinishReason::StopSequence | FinishReason::Length
        ) {
            let unfinished = self.unfinished.entry(turn.context_digest).or_default();
            unfinished.push(index);
        }
        self.contexts.insert(turn.context_digest);
        self.answered_contexts.push(turn.context_digest);
        self.turns.insert(
            index,
            Recorded {
                parent: turn.parent,
                prompt_suffix: Arc::clone(&turn.prompt_suffix),
                sampled: Arc::clone(&turn.sampled),
                finish: turn.finish,
                reasoning: turn.answer.reasoning,
                answer_digest: digest_answer(turn.context_digest, &turn.answer),
            },
        );
    }

    /// Prompt and answer of a turn. Empty for a turn that was not recorded here.
    pub fn history(&self, turn: TurnIndex) -> History {
        let mut history = self.prompt_history(turn);
        if let Some(recorded) = self.turns.get(&turn) {
            history.len += recorded.sampled.len();
            history.chunks.push(Arc::clone(&recorded.sampled));
            history.finish = Some(recorded.finish);
        }
        history
    }

    /// The ids the engine was given for a turn.
    pub fn prompt_of(&self, turn: TurnIndex) -> Vec<u32> {
        self.prompt_history(turn).to_vec()
    }

    pub fn len(&self) -> usize {
        self.turns.len()
    }

    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    fn prompt_history(&self, turn: TurnIndex) -> History {
        let mut chunks = Vec::new();
        let mut at = self.turns.get(&turn);
        while let Some(recorded) = at {
            chunks.push(Arc::clone(&recorded.prompt_suffix));
            at = recorded.parent.and_then(|parent| self.turns.get(&parent));
            if let Some(parent) = at {
                chunks.push(Arc::clone(&parent.sampled));
            }
        }
        chunks.reverse();
        let len = chunks.iter().map(|chunk| chunk.len()).sum();
        History {
            chunks,
            len,
            finish: None,
        }
    }

    fn walk(&self, start: u128, messages: &[MessageKey]) -> Walk {
        let begin = Walk {
            start,
            messages: 0,
            last: None,
            continued: false,
            foreign: false,
            stuck: None,
            digest: start,
            turns: 0,
        };
        self.walk_on(begin, messages)
    }

    fn walk_on(&self, mut walk: Walk, messages: &[MessageKey]) -> Walk {
        walk.turns = self.answered_contexts.len();
        for key in messages {
            walk.messages += 1;
            let ours = key
                .answer
                .and_then(|answer| self.answered(walk.digest, &answer));
            let continued = || {
                key.answer?;
                self.continued.get(&(walk.digest, key.exact)).copied()
            };
            let continued = if ours.is_none() { continued() } else { None };
            walk.digest = match ours.or(continued) {
                Some((turn, digest)) => {
                    walk.last = Some((turn, walk.messages));
                    walk.continued = continued.is_some();
                    walk.foreign = false;
                    walk.stuck = None;
                    digest
                }
                None => {
                    if key.answer.is_some() {
                        walk.foreign = true;
                        self.note_stuck(&mut walk);
                    }
                    digest_next(walk.digest, key.exact)
                }
            };
        }
        walk
    }

    fn note_stuck(&self, walk: &mut Walk) {
        if walk.stuck.is_none() && self.contexts.contains(&walk.digest) {
            walk.stuck = Some(Stuck {
                message: walk.messages - 1,
                context: walk.digest,
            });
        }
    }

    /// Our answer to this context that the client means, and the digest through it. Reasoning may be missing, but what
    /// is sent back must be what was thought. Of several, the latest: it is the one the agent saw last.
    fn answered(&self, context: u128, answer: &AnswerKey) -> Option<(TurnIndex, u128)> {
        let candidates = self.by_answer.get(&(context, answer.said))?;
        let recorded = |turn: &TurnIndex| Some((*turn, self.turns.get(turn)?));
        let mut latest_first = candidates.iter().rev().filter_map(recorded);
        let same = |(_, turn): &(TurnIndex, &Recorded)| turn.reasoning == answer.reasoning;
        let (turn, found) = match latest_first.clone().find(same) {
            Some(exact) => exact,
            None if answer.reasoning.is_none() => latest_first.next()?,
            None => return None,
        };
        Some((turn, found.answer_digest))
    }

    fn fork_reason(&self, start: u128, messages: &[MessageKey]) -> ForkReason {
        let matches_otherwise = |other: &u128| {
            let walk = self.walk(*other, messages);
            *other != start && (walk.last.is_some() || self.contexts.contains(&walk.digest))
        };
        if self.starts.iter().any(matches_otherwise) {
            ForkReason::ToolsChanged
        } else if messages.iter().any(|key| key.answer.is_some()) {
            ForkReason::HistoryEdited
        } else {
            ForkReason::NewConversation
        }
    }
}

#[cfg(test)]
mod tests;
