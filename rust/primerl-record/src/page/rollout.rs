//! One rollout to read: its events, read from their places in the journal, and its tokens as text.

use super::advantages::{Sequence, of_rollout, of_turn};
use super::index::{Given, Index, Record};
use crate::inspect::seconds;
use crate::journal::{self, Entry, Place, ReadError};
use crate::spool::Spool;
use primerl_core::event::Outcome;
use primerl_core::{Event, RolloutId, Step, Turn};
use primerl_render::Renderer;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// Most tokens in one answer.
pub const MOST_TOKENS: usize = 4_096;
/// Characters of a prompt's text that are shown; the page is for people to read.
const PROMPT_CHARS: usize = 60_000;

/// What the journal holds of one rollout.
#[derive(Debug)]
pub struct Told {
    pub rollout: RolloutId,
    /// Number of places when it was read.
    pub events: usize,
    /// Turns before the kept ones.
    turns_gone: usize,
    turns: Vec<(f64, Turn)>,
    /// When an engine began its first turn, and at which version.
    sampling: Vec<(f64, u64)>,
    failures: Vec<String>,
    report: Option<(f64, Outcome)>,
    given: Given,
    sequences: Vec<Sequence>,
}

impl Told {
    /// # Errors
    /// A file of the journal is gone or damaged.
    pub fn read(
        output_dir: &Path,
        ranks: u32,
        record: &Record,
        places: &[Place],
    ) -> Result<Told, ReadError> {
        let folder = output_dir.join("journal");
        let mut told = Told::begin(record, places.len());
        for place in places {
            let entry = journal::read_at(&folder, *place)?;
            told.take_in(entry, record.worker);
        }
        if let (Given::PerToken, Some(step)) = (record.given, record.step) {
            let spool = Spool::new(output_dir, ranks);
            told.sequences = of_rollout(&spool, ranks, Step(u64::from(step)), record.rollout);
        }
        Ok(told)
    }

    fn begin(record: &Record, events: usize) -> Told {
        Told {
            rollout: record.rollout,
            events,
            turns_gone: record.turns_gone as usize,
            turns: Vec::new(),
            sampling: Vec::new(),
            failures: Vec::new(),
            report: None,
            given: record.given,
            sequences: Vec::new(),
        }
    }

    /// Takes one of its events; the rollout is at `worker`.
    fn take_in(&mut self, Entry(at, event): Entry, worker: u32) {
        match event {
            // Events after its report are not part of it.
            Event::TurnFinished { turn, .. } if self.report.is_none() => {
                self.turns.push((seconds(at), turn));
            }
            Event::SamplingStarted { version, .. } => self.sampling.push((seconds(at), version.0)),
            Event::TurnFailed { message, .. } => self.failures.push(message),
            Event::RolloutFinished {
                worker: of,
                outcome,
                ..
            } if of.0 as u32 == worker => {
                self.report.get_or_insert((seconds(at), outcome));
            }
            _ => {}
        }
    }

    /// Everything except the tokens.
    pub fn summary(&self, index: &Index, record: &Record) -> Value {
        let kept = self.turns.iter().enumerate();
        let turns: Vec<Value> = kept
            .map(|(at, (at_s, turn))| self.turn(self.turns_gone + at, *at_s, turn))
            .collect();
        let mut summary = line(index, record);
        let report = self.report.as_ref();
        let (reported_s, outcome) = report.map(|(at, outcome)| (at, outcome)).unzip();
        for (name, value) in [
            ("turn_list", json!(turns)),
            ("sampling", json!(self.sampling)),
            ("turn_failures", json!(self.failures)),
            ("reported_s", json!(reported_s)),
            ("reports", json!(outcome.map(|outcome| &outcome.traces))),
            (
                "error",
                json!(outcome.and_then(|outcome| outcome.error.as_ref())),
            ),
            ("earlier_turns_are_gone", json!(record.turns_gone > 0)),
        ] {
            summary[name] = value;
        }
        summary
    }

    fn turn(&self, number: usize, at_s: f64, turn: &Turn) -> Value {
        let versions: Vec<(u64, u32)> = turn
            .versions
            .iter()
            .map(|run| (run.version.0, run.n_tokens))
            .collect();
        json!({
            "turn": number,
            "at_s": at_s,
            "session": turn.session,
            "parent": turn.parent.map(|parent| parent.0),
            "fork": turn.fork,
            "finish": turn.finish,
            "temperature": turn.temperature,
            "prompt_tokens": self.prompt_tokens(number, turn),
            "new_prompt_tokens": turn.prompt_suffix.len(),
            "sampled_tokens": turn.sampled.len(),
            "versions": versions,
            "model": turn.text.as_ref().map(|text| &text.model),
        })
    }

    /// A turn by its number in the rollout, as parents name it.
    fn kept(&self, number: usize) -> Option<&Turn> {
        let at = number.checked_sub(self.turns_gone)?;
        self.turns.get(at).map(|(_, turn)| turn)
    }

    /// Length of the whole prompt; `None` if it extends a turn that is not kept.
    fn prompt_tokens(&self, number: usize, turn: &Turn) -> Option<usize> {
        let (mut tokens, mut child) = (turn.prompt_suffix.len(), (number, turn));
        while let Some(parent) = child.1.parent {
            let parent = parent.0 as usize;
            // An engine's answer may name any parent: only earlier turns count, so the loop ends.
            let turn = self.kept(parent).filter(|_| parent < child.0)?;
            tokens += turn.prompt_suffix.len() + turn.sampled.len();
            child = (parent, turn);
        }
        Some(tokens)
    }

    /// The tokens of one turn, `limit` of them from `from` on; `None` if there is no such turn.
    pub fn tokens(
        &self,
        renderer: Option<&Renderer>,
        number: usize,
        from: usize,
        limit: usize,
    ) -> Option<Value> {
        let turn = self.kept(number)?;
        let end = from
            .saturating_add(limit.clamp(1, MOST_TOKENS))
            .min(turn.sampled.len());
        let shown = from.min(end)..end;
        let (advantages, are_gone) = self.advantages(number, turn, shown.clone());
        let versions = turn.versions.iter();
        let versions = versions
            .flat_map(|run| std::iter::repeat_n(run.version.0, run.n_tokens as usize))
            .skip(shown.start)
            .take(shown.len());
        let prompt = (from == 0).then(|| self.prompt(renderer, turn));
        Some(json!({
            "turn": number,
            "from": shown.start,
            "prompt": prompt,
            "ids": turn.sampled[shown.clone()],
            "pieces": pieces(renderer, &turn.sampled, shown.clone()),
            // A server that gives text returns no log-probabilities.
            "logprobs": turn.logprobs.get(shown.clone()).unwrap_or_default(),
            "versions": versions.collect::<Vec<u64>>(),
            // Empty if the turn was not trained, or the batch is gone.
            "advantages": advantages,
            "advantages_are_gone": are_gone,
            "answer": turn.text.as_ref().map(|text| &text.message),
            "next": (end < turn.sampled.len()).then_some(end),
        }))
    }

    /// The advantages of the shown tokens; and whether there were some that are gone with the batch, or with the turns
    /// that give the turn's place in it.
    fn advantages(
        &self,
        number: usize,
        turn: &Turn,
        shown: std::ops::Range<usize>,
    ) -> (Option<Vec<f32>>, bool) {
        if !self.is_trained(number) {
            return (None, false);
        }
        match self.given {
            Given::Nothing => (None, false),
            Given::Uniform(value) => (Some(vec![value; shown.len()]), false),
            Given::PerToken => {
                let before = self.prompt_tokens(number, turn);
                let Some(before) = before.filter(|_| !self.sequences.is_empty()) else {
                    return (None, true);
                };
                let found = of_turn(&self.sequences, before, &turn.sampled);
                // A turn that is in no sequence was omitted.
                (found.map(|of| of[shown].to_vec()), false)
            }
        }
    }

    /// Whether the turn's session was reported as one to train.
    fn is_trained(&self, number: usize) -> bool {
        let sessions = self.turns.iter().map(|(_, turn)| &*turn.session);
        let at = number.checked_sub(self.turns_gone);
        let trace = self.report.as_ref().zip(at).and_then(|((_, report), at)| {
            let traces = report.trained_traces(sessions);
            traces.get(at).copied().flatten()
        });
        trace.is_some()
    }

    /// The turn's prompt after the part that it extends.
    fn prompt(&self, renderer: Option<&Renderer>, turn: &Turn) -> Value {
        let text = match renderer.map(|known| known.tokenizer().decode(&turn.prompt_suffix, false))
        {
            Some(Ok(text)) => text,
            _ => format!("token ids: {:?}", turn.prompt_suffix),
        };
        let shown: String = text.chars().take(PROMPT_CHARS).collect();
        json!({"tokens": turn.prompt_suffix.len(), "is_whole": shown.len() == text.len(), "text": shown})
    }
}

/// The text that each token adds. A character of several tokens comes with its last one; the rest at the end belongs to
/// a turn that was cut in the middle of a character.
fn pieces(
    renderer: Option<&Renderer>,
    sampled: &[u32],
    shown: std::ops::Range<usize>,
) -> Option<Vec<String>> {
    let tokenizer = renderer?.tokenizer();
    let mut stream = tokenizer.decode_stream(false);
    let mut pieces = Vec::with_capacity(shown.len());
    for (at, id) in sampled[..shown.end].iter().enumerate() {
        let piece = stream.push(*id).ok()?;
        if at >= shown.start {
            pieces.push(piece);
        }
    }
    if shown.end == sampled.len()
        && let (Ok(rest), Some(last)) = (stream.finish(), pieces.last_mut())
    {
        last.push_str(&rest);
    }
    Some(pieces)
}

/// One rollout in a list.
pub fn line(index: &Index, record: &Record) -> Value {
    let staleness = record.step.zip(record.versions).map(|(step, (oldest, _))| {
        // Step k trains version k - 1.
        i64::from(step) - 1 - i64::from(oldest)
    });
    let advantage = match record.given {
        Given::Uniform(value) => json!(value),
        Given::PerToken => json!("per token"),
        Given::Nothing => Value::Null,
    };
    json!({
        "rollout": record.rollout,
        "group": record.group,
        "slot": record.slot,
        "environment": index.environment(record.environment),
        "example": record.example,
        "evaluates": record.evaluates,
        "worker": record.worker,
        "fate": record.fate, // words: allow
        "reason": Some(index.reason(record)).filter(|reason| !reason.is_empty()),
        "step": record.step,
        "staleness": staleness,
        "turns": record.turns,
        "turns_gone": record.turns_gone,
        "sampled_tokens": record.sampled_tokens,
        "message": index.message(record),
        "reward": record.reward(),
        "advantage": advantage,
        "versions": record.versions,
        "leased_s": record.leased_s,
        "took_s": record.ended_s.map(|ended| f64::from(ended) - record.leased_s),
    })
}

/// The last rollouts that were read: a page asks for one turn after the other.
#[derive(Default)]
pub struct Shelf(Vec<Arc<Told>>);

impl Shelf {
    const MOST: usize = 8;

    pub fn find(&self, record: &Record, events: usize) -> Option<Arc<Told>> {
        let is_it = |told: &&Arc<Told>| {
            told.rollout == record.rollout && told.events == events && told.given == record.given
        };
        self.0.iter().find(is_it).cloned()
    }

    pub fn keep(&mut self, told: Arc<Told>) {
        self.0.retain(|known| known.rollout != told.rollout);
        self.0.truncate(Self::MOST - 1);
        self.0.insert(0, told);
    }
}

#[cfg(test)]
mod tests;
