//! An answer of several engines: one failed in the middle of its stream, and another continues after what it had
//! sampled.
//!
//! Each token keeps the log-probability that its own engine gave, and the version of the weights that sampled it. vLLM
//! names the versions only at the end of a stream. If a stream has no end, the versions are still known for the tokens
//! that came before an update of the engine was started: the engine had proved its version when it got the request, and
//! had not been asked to load another. Later tokens may be of either version. They are dropped, and if they were shown,
//! so is the request.

use super::generate::{Bounds, Choice, Generated, Progress, TokenLogprob, VersionSpan};
use super::ids::PromptIds;
use super::request::SampleRequest;
use super::state::Engine;
use primerl_core::PolicyVersion;
use primerl_core::turn::FinishReason;
use std::sync::atomic::Ordering;

/// The beginning of an answer: every token of it is accounted for.
#[derive(Debug, Default)]
pub(super) struct Begun {
    generated: Option<Generated>,
    /// What the next engine's prompt ends with.
    suffix: Vec<u32>,
}

impl Begun {
    pub(crate) fn tokens(&self) -> &[u32] {
        self.generated
            .as_ref()
            .map_or(&[], |begun| &begun.token_ids)
    }

    /// The request for the rest.
    pub(crate) fn rest<'a>(&'a mut self, request: &SampleRequest<'a>) -> SampleRequest<'a> {
        let mut rest = request.clone();
        if let Some(begun) = &self.generated {
            self.suffix.clear();
            self.suffix.extend_from_slice(request.prompt.suffix);
            self.suffix.extend_from_slice(&begun.token_ids);
            rest.prompt = PromptIds {
                suffix: &self.suffix,
                ..request.prompt
            };
            rest.max_tokens -= begun.token_ids.len() as u32;
            // The turn began when its first token was sampled.
            rest.first_of = None;
        }
        rest
    }

    /// Adds another part. Returns whether it completes the answer, although no engine said so.
    pub(crate) fn add(&mut self, part: Generated, max_tokens: u32, stop_token_ids: &[u32]) -> bool {
        self.generated = Some(self.with(part));
        let Some(begun) = &mut self.generated else {
            return false;
        };
        let ends = |id: &u32| stop_token_ids.contains(id);
        if begun.finish == FinishReason::StopSequence {
            return true;
        }
        begun.finish = match begun.token_ids.last().is_some_and(ends) {
            true => FinishReason::Stop,
            false => FinishReason::Length,
        };
        begun.finish == FinishReason::Stop || begun.token_ids.len() >= max_tokens as usize
    }

    /// The answer that ends with this part.
    pub(crate) fn with(&mut self, part: Generated) -> Generated {
        match self.generated.take() {
            None => part,
            Some(begun) => begun.followed_by(part),
        }
    }

    pub(crate) fn take(&mut self) -> Option<Generated> {
        self.generated.take()
    }
}

impl Generated {
    /// Joins both parts to one answer, which ends as the second does.
    fn followed_by(mut self, mut next: Generated) -> Generated {
        self.token_ids.append(&mut next.token_ids);
        self.logprobs.append(&mut next.logprobs);
        self.top.append(&mut next.top);
        for run in next.versions {
            match self.versions.last_mut() {
                Some(last) if last.version == run.version => last.n_tokens += run.n_tokens,
                _ => self.versions.push(run),
            }
        }
        self.finish = next.finish;
        // The second engine computed the first part too, as a part of its prompt, and reports it.
        self.experts = next.experts;
        self
    }
}

/// Follows one engine's part of an answer: notes which tokens are certain to come from the proved weights, and shows
/// none before the weights that may have sampled it have passed their probe.
pub(super) struct Follow<'a> {
    pub progress: &'a mut dyn Progress,
    engine: &'a Engine,
    weights: u64,
    /// Tokens of the earlier parts.
    before: usize,
    seen: usize,
    /// Tokens of this part that came before the weights may have changed, from weights that have passed their probe.
    certain: usize,
    /// A stop sequence ends this part after so many tokens.
    ended: Option<usize>,
    held: Held,
}

/// Tokens that are not shown yet.
#[derive(Default)]
struct Held {
    ids: Vec<u32>,
    logprobs: Vec<TokenLogprob>,
    /// [`Engine::weights`] when the last of them came.
    weights: u64,
}

impl<'a> Follow<'a> {
    pub(crate) fn new(
        progress: &'a mut dyn Progress,
        engine: &'a Engine,
        weights: u64,
        before: usize,
    ) -> Follow<'a> {
        Follow {
            progress,
            engine,
            weights,
            before,
            seen: 0,
            certain: 0,
            ended: None,
            held: Held::default(),
        }
    }

    /// [`Engine::weights`] that may have sampled the tokens that are held back.
    pub(crate) fn held_for(&self) -> u64 {
        self.held.weights
    }

    /// Shows the tokens that were held back. Returns the length at which a stop sequence ends this part.
    pub(crate) fn show(&mut self) -> Option<usize> {
        let Held { ids, logprobs, .. } = std::mem::take(&mut self.held);
        if self.ended.is_none() && !ids.is_empty() {
            let end = self.progress.tokens(&ids, &logprobs);
            self.ended = end.map(|end| end - self.before);
        }
        self.ended
    }

    /// The certain tokens of a part whose engine failed.
    pub(crate) fn part(
        &self,
        mut choice: Choice,
        version: PolicyVersion,
        bounds: &Bounds<'_>,
    ) -> Option<Generated> {
        let kept = self.certain.min(choice.token_ids.len());
        let content = &mut choice.logprobs.as_mut()?.content;
        content.truncate(kept);
        choice.token_ids.truncate(kept);
        choice.finish_reason = Some("length".into());
        choice.weight_versions = Some(vec![VersionSpan {
            version: version.to_string(),
            start: 0,
            end: kept,
        }]);
        let ended = self.ended.filter(|ended| *ended <= kept);
        // Checks that reject a whole answer also reject a part of it.
        choice.check(bounds, ended).ok()
    }
}

impl Progress for Follow<'_> {
    fn tokens(&mut self, ids: &[u32], logprobs: &[TokenLogprob]) -> Option<usize> {
        self.seen += ids.len();
        // They were sampled before they came, so before this look; a passed probe vouches for all tokens before it.
        let (weights, probed) = (&self.engine.weights, &self.engine.probed_weights);
        let [now, probed] = [weights, probed].map(|count| count.load(Ordering::SeqCst));
        if [now, probed] == [self.weights; 2] {
            self.certain = self.seen;
        }
        self.held.ids.extend(ids);
        self.held.logprobs.extend_from_slice(logprobs);
        self.held.weights = now;
        if now > probed {
            return None;
        }
        self.show()
    }

    fn go_on(&mut self, kept: &[u32]) -> bool {
        self.progress.go_on(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::EngineClient;
    use crate::generate::Logprobs;
    use primerl_core::{EngineId, VersionRun};
    use tokio::sync::mpsc;

    const BOUNDS: Bounds<'static> = Bounds {
        max_tokens: 9,
        top_logprobs: 0,
        vocabulary_size: Some(100),
        lowest_logprob: -104.0,
        stop_token_ids: &[],
        experts: None,
        experts_rows: 0,
    };

    /// Shows every token; ends the answer with token 9.
    #[derive(Default)]
    struct Shown(Vec<u32>);

    impl Progress for Shown {
        fn tokens(&mut self, ids: &[u32], _: &[TokenLogprob]) -> Option<usize> {
            self.0.extend(ids);
            let end = self.0.iter().position(|id| *id == 9);
            end.map(|at| at + 1)
        }

        fn go_on(&mut self, kept: &[u32]) -> bool {
            self.0.len() <= kept.len()
        }
    }

    fn logprob(id: u32) -> TokenLogprob {
        TokenLogprob {
            token_id: id,
            logprob: -(id as f32),
            top_logprobs: Default::default(),
        }
    }

    fn choice(ids: &[u32]) -> Choice {
        Choice {
            token_ids: ids.to_vec(),
            finish_reason: None,
            logprobs: Some(Logprobs {
                content: ids.iter().map(|id| logprob(*id)).collect(),
            }),
            weight_versions: None,
            grammar: None,
            routed_experts: None,
        }
    }

    fn engine() -> Engine {
        let client = EngineClient::new("http://127.0.0.1:1".into()).expect("is a URL");
        Engine::new(EngineId(0), None, client, mpsc::unbounded_channel().0)
    }

    #[test]
    fn what_weights_without_a_passed_probe_have_sampled_is_not_kept() {
        let (engine, mut shown) = (engine(), Shown::default());
        engine.weights_change();
        let mut follow = Follow::new(&mut shown, &engine, 1, 0);
        follow.tokens(&[1, 2], &[]);
        let part = |follow: &Follow| follow.part(choice(&[1, 2, 3]), PolicyVersion(4), &BOUNDS);
        assert!(part(&follow).is_none_or(|part| part.token_ids.is_empty()));
        assert!(!engine.vouches_for(follow.held_for()));
        engine.probe_passed();
        follow.tokens(&[3], &[]);
        assert_eq!(part(&follow).expect("is certain").token_ids, [1, 2, 3]);
        assert_eq!(shown.0, [1, 2, 3]);
    }

    #[test]
    fn what_was_held_back_is_shown_at_the_end_and_may_end_the_answer() {
        let (engine, mut shown) = (engine(), Shown::default());
        let mut follow = Follow::new(&mut shown, &engine, 0, 0);
        assert_eq!(follow.tokens(&[1], &[]), None);
        engine.weights_change();
        assert_eq!(follow.tokens(&[2, 9, 3], &[]), None, "it is held back");
        assert!(!engine.vouches_for(follow.held_for()));
        engine.probe_passed();
        assert!(engine.vouches_for(follow.held_for()));
        assert_eq!(follow.show(), Some(3));
        assert_eq!(shown.0, [1, 2, 9, 3]);
    }

    #[test]
    fn only_what_came_before_the_weights_may_have_changed_is_kept() {
        let (engine, mut shown) = (engine(), Shown::default());
        let mut follow = Follow::new(&mut shown, &engine, 0, 0);
        follow.tokens(&[1, 2], &[]);
        engine.weights_change();
        follow.tokens(&[3], &[]);
        let part = follow.part(choice(&[1, 2, 3]), PolicyVersion(4), &BOUNDS);
        let part = part.expect("two are certain");
        assert_eq!(
            (&part.token_ids[..], &part.logprobs[..]),
            (&[1, 2][..], &[-1.0, -2.0][..])
        );
        let run = part.versions[0];
        assert_eq!((run.version, run.n_tokens), (PolicyVersion(4), 2));
        assert!(follow.go_on(&part.token_ids), "the third was held back");
        // A position that was taken after the change is certain once it is known to be right.
        engine.probe_passed();
        let mut follow = Follow::new(&mut shown, &engine, 1, 3);
        follow.tokens(&[4], &[]);
        let part = follow.part(choice(&[4]), PolicyVersion(5), &BOUNDS);
        assert_eq!(part.expect("is certain").token_ids, [4]);
    }

    #[test]
    fn a_part_is_checked_like_a_whole_answer() {
        let (engine, mut shown) = (engine(), Shown::default());
        let mut follow = Follow::new(&mut shown, &engine, 0, 0);
        follow.tokens(&[1, 100], &[]);
        let part = |choice| follow.part(choice, PolicyVersion(0), &BOUNDS);
        assert!(part(choice(&[1, 100])).is_none(), "no token of the model");
        let mut above = choice(&[1, 2]);
        above.logprobs.as_mut().expect("is there").content[0].logprob = 0.5;
        assert!(part(above).is_none(), "no log-probability");
        assert!(part(choice(&[])).is_none(), "nothing came");
    }

    #[test]
    fn a_part_that_ends_with_a_stop_sequence_is_the_answer() {
        let (engine, mut shown) = (engine(), Shown(vec![1, 2]));
        let mut follow = Follow::new(&mut shown, &engine, 0, 2);
        assert_eq!(follow.tokens(&[3, 9, 4], &[]), Some(2), "of this part");
        let part = follow.part(choice(&[3, 9, 4]), PolicyVersion(0), &BOUNDS);
        let part = part.expect("is certain");
        assert_eq!(part.token_ids, [3, 9]);
        assert_eq!(part.finish, FinishReason::StopSequence);
    }

    fn part(ids: &[u32], version: u64) -> Generated {
        let run = VersionRun {
            version: PolicyVersion(version),
            n_tokens: ids.len() as u32,
        };
        Generated {
            token_ids: ids.to_vec(),
            logprobs: ids.iter().map(|id| -(*id as f32)).collect(),
            versions: [run].into_iter().collect(),
            finish: FinishReason::Length,
            top: Vec::new(),
            grammar: None,
            experts: None,
        }
    }

    #[test]
    fn parts_add_up_and_runs_of_one_version_are_one() {
        let mut begun = Begun::default();
        assert!(!begun.add(part(&[1, 2], 3), 9, &[7]));
        assert!(!begun.add(part(&[3], 3), 9, &[7]));
        assert_eq!(begun.tokens(), [1, 2, 3]);
        let whole = begun.with(part(&[4, 5], 2));
        assert_eq!(whole.token_ids, [1, 2, 3, 4, 5]);
        assert_eq!(whole.logprobs, [-1.0, -2.0, -3.0, -4.0, -5.0]);
        let runs: Vec<_> = whole
            .versions
            .iter()
            .map(|run| (run.version.0, run.n_tokens))
            .collect();
        assert_eq!(runs, [(3, 3), (2, 2)]);
    }

    #[test]
    fn an_answer_is_whole_once_it_ends_itself() {
        let whole = |ids: &[u32], finish| {
            let mut begun = Begun::default();
            let mut part = part(ids, 0);
            part.finish = finish;
            let whole = begun.add(part, 4, &[7]);
            (whole, begun.take().expect("is there").finish)
        };
        let length = FinishReason::Length;
        assert_eq!(whole(&[1, 2], length), (false, length));
        assert_eq!(whole(&[1, 2, 3, 4], length), (true, length));
        // The last event, which says that it ended, never came.
        assert_eq!(whole(&[1, 7], length), (true, FinishReason::Stop));
        let stop = FinishReason::StopSequence;
        assert_eq!(whole(&[1], stop), (true, stop));
    }
}
