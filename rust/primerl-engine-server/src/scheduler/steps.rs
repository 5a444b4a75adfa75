//! An engine's steps: the batch that is planned, with its tokens, and what the backend made of it.

use super::{Part, Scheduler};
use crate::backend::{ScoredToken, StepOutput};
use crate::batch::{Batch, BatchSequence, arrange};
use crate::numbered::NumberMap;
use crate::request::{FinishReason, RequestKey};
use crate::sequence::{Completion, Sequence, Submission};

/// What a step brought.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The first token of a sequence was sampled.
    FirstToken {
        key: RequestKey,
    },
    /// A token of a sequence with `stream` that is not finished.
    Token {
        key: RequestKey,
        token: ScoredToken,
    },
    Finished(Completion),
}

impl Scheduler {
    pub fn submit(&mut self, submission: Submission) {
        let key = submission.key;
        self.push(key, |arrival| Sequence::new(submission, arrival));
    }

    /// Ends a sequence with what it has. `None` if it has ended already.
    pub fn abort(&mut self, key: RequestKey) -> Option<Completion> {
        let sequence = self.remove(key)?;
        Some(sequence.complete(FinishReason::Abort, None, &self.versions))
    }

    /// Ends all of them, in order of arrival.
    pub fn abort_all(&mut self) -> Vec<Completion> {
        let mut keys: Vec<(u64, RequestKey)> = self
            .sequences
            .values()
            .map(|s| (s.arrival, s.key))
            .collect();
        keys.sort_unstable();
        keys.into_iter()
            .filter_map(|(_, key)| self.abort(key))
            .collect()
    }

    /// [`Scheduler::plan_work`], with the tokens.
    pub fn plan(&mut self) -> Option<Batch> {
        let work = self.plan_work()?;
        let decoding = self.decoding.values().take(work.decoding);
        let decoding = decoding.map(|&(key, slot)| Part {
            key,
            slot,
            count: 1,
        });
        Some(self.build(decoding.chain(work.prefill)))
    }

    fn build(&self, parts: impl Iterator<Item = Part>) -> Batch {
        let mut counts = NumberMap::default();
        let mut sequences: Vec<BatchSequence> = Vec::new();
        let (mut token_ids, mut positions) = (Vec::new(), Vec::new());
        for Part { key, slot, count } in parts {
            let start = token_ids.len();
            sequences.push(self.sequences[&key].schedule(
                slot,
                count,
                &mut token_ids,
                &mut positions,
            ));
            counts.insert(key, start..start + count);
        }
        let segments = arrange(&mut sequences);
        // Arranging moved the sequences; their columns follow.
        let gather = |column: &[i32]| -> Vec<i32> {
            sequences
                .iter()
                .flat_map(|sequence| &column[counts[&sequence.key].clone()])
                .copied()
                .collect()
        };
        Batch {
            token_ids: gather(&token_ids),
            positions: gather(&positions),
            sequences,
            segments,
        }
    }

    /// Takes in what the backend made of `batch`. The lengths of `output` have been checked.
    pub fn apply(&mut self, batch: Batch, output: StepOutput) -> Vec<Event> {
        let epoch = self.versions.epoch();
        let mut events = Vec::new();
        let mut sampled = output.sampled.into_iter();
        let mut scores = output.prompt.into_iter();
        let experts = output.experts;
        let mut row = 0;
        for part in batch.sequences {
            let (first, count) = (row, part.query_len as usize);
            row += count;
            let end = self.computed(part.key, |sequence| {
                if let Some(experts) = &experts {
                    sequence.record_experts(experts, first, count);
                }
                sequence.computed += count;
                if let Some(targets) = part.prompt_targets {
                    sequence.record_prompt(scores.by_ref().take(targets.targets.len()));
                }
                let token = part.sample.and_then(|_| sampled.next())?;
                let end = sequence.record(token, epoch);
                let is_error = matches!(end, Some((FinishReason::Error, _)));
                if sequence.output_len() == 1 && !is_error {
                    events.push(Event::FirstToken { key: part.key });
                }
                if end.is_none() && sequence.stream {
                    events.extend(sequence.last_output().cloned().map(|token| Event::Token {
                        key: part.key,
                        token,
                    }));
                }
                end
            });
            if let Some(Some((finish, stop_token))) = end
                && let Some(sequence) = self.remove(part.key)
            {
                events.push(Event::Finished(sequence.complete(
                    finish,
                    stop_token,
                    &self.versions,
                )));
            }
        }
        events
    }
}
