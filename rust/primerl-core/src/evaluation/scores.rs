//! What rewards by example say of the policy.
//!
//! `avg@n` is the mean reward of an example's n rollouts, averaged over examples. `pass@k` is the chance that one of k rollouts
//! passes, with a reward of at least the environment's `pass_threshold`: of n of which c pass, `1 - C(n - c, k) / C(n, k)`
//! without bias (Chen et al., arXiv:2107.03374), for k = 1, 2, 4, ... and n. Both are reported of every evaluation, whatever its
//! rewards: a curve has the same points at each version. A rollout that failed has reward 0, and does not pass.
//! How sure they are: [`super::interval`].

use super::interval::{ends, mean};
use crate::advantage::SMALLEST_DIFFERENCE;
use crate::effect::ExampleScores;
use crate::ids::ExampleIndex;
use std::collections::{BTreeMap, BTreeSet};

/// What ended of one example.
#[derive(Clone, Debug, Default)]
pub(super) struct Ended<'a> {
    /// 0 for those that failed.
    pub rewards: &'a [f64],
    pub failed: usize,
}

/// How an environment is scored.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rule {
    /// Rollouts of each example, where all of them end.
    pub rollouts: usize,
    pub pass_threshold: f64,
}

/// Means by name, with the ends of their intervals as `<name>/low` and `<name>/high`; and what they are means of.
pub(super) fn scores(
    examples: &BTreeMap<ExampleIndex, Ended<'_>>,
    rule: Rule,
) -> (BTreeMap<String, f64>, ExampleScores) {
    let mut found = BTreeMap::new();
    let mut by_example = ExampleScores {
        examples: examples.keys().copied().collect(),
        scores: BTreeMap::new(),
    };
    if examples.is_empty() {
        return (found, by_example);
    }
    let bounded = examples
        .values()
        .flat_map(|example| example.rewards)
        .all(|reward| (0.0..=1.0).contains(reward));
    let means: Vec<f64> = examples
        .values()
        .map(|example| mean(example.rewards))
        .collect();
    let name = format!("avg@{}", rule.rollouts);
    put(&mut found, &name, &means, bounded);
    let means = means.into_iter().map(Some).collect();
    by_example.scores.insert(name, means);
    for k in draws(rule.rollouts) {
        // An example whose rollouts have not all ended in time says nothing of more than it has.
        let pass = |example: &Ended<'_>| {
            let is_enough = example.rewards.len() >= k;
            is_enough.then(|| example.pass(k, rule.pass_threshold))
        };
        let passes: Vec<Option<f64>> = examples.values().map(pass).collect();
        let enough: Vec<f64> = passes.iter().copied().flatten().collect();
        if !enough.is_empty() {
            let name = format!("pass@{k}");
            put(&mut found, &name, &enough, true);
            by_example.scores.insert(name, passes);
        }
    }
    (found, by_example)
}

/// The powers of 2 up to `most`, and `most`.
fn draws(most: usize) -> BTreeSet<usize> {
    let powers = std::iter::successors(Some(1), |k| Some(2 * k)).take_while(|k| *k <= most);
    powers.chain([most]).collect()
}

fn put(found: &mut BTreeMap<String, f64>, name: &str, by_example: &[f64], bounded: bool) {
    found.insert(name.to_owned(), mean(by_example));
    if let Some((low, high)) = ends(by_example, bounded) {
        found.insert(format!("{name}/low"), low);
        found.insert(format!("{name}/high"), high);
    }
}

impl Ended<'_> {
    /// The chance that one of `k` of the rollouts, drawn without putting back, has passed.
    fn pass(&self, k: usize, threshold: f64) -> f64 {
        let all = self.rewards.len();
        // A sum that misses it by rounding alone reaches it: `0.7 + 0.2 + 0.1` is below 1.
        let reaches = |reward: f64| reward >= threshold - SMALLEST_DIFFERENCE;
        let reached = self.rewards.iter().filter(|reward| reaches(**reward));
        let failures = if reaches(0.0) { self.failed } else { 0 };
        let others = all - reached.count().saturating_sub(failures);
        let none = |drawn: usize| others.saturating_sub(drawn) as f64 / (all - drawn) as f64;
        1.0 - (0..k).map(none).product::<f64>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_threshold(
        rewards: &[&[f64]],
        rollouts: usize,
        pass_threshold: f64,
    ) -> BTreeMap<String, f64> {
        let numbered = rewards.iter().enumerate();
        let examples = numbered.map(|(index, rewards)| {
            let ended = Ended { rewards, failed: 0 };
            (ExampleIndex(index as u32), ended)
        });
        let rule = Rule {
            rollouts,
            pass_threshold,
        };
        scores(&examples.collect(), rule).0
    }

    fn of(rewards: &[&[f64]], rollouts: usize) -> BTreeMap<String, f64> {
        of_threshold(rewards, rollouts, 1.0)
    }

    fn close(found: f64, expected: f64) {
        assert!(
            (found - expected).abs() < 1e-12,
            "{found} is not {expected}"
        );
    }

    fn plain(found: &BTreeMap<String, f64>) -> Vec<&str> {
        let names = found.keys().map(String::as_str);
        names.filter(|name| !name.contains('/')).collect()
    }

    #[test]
    fn pass_at_k_is_the_share_of_all_draws_that_hold_a_pass() {
        let rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
        let ended = Ended {
            rewards: &rewards,
            failed: 2,
        };
        for k in 1..=rewards.len() {
            let draws = (0_u32..1 << rewards.len()).filter(|draw| draw.count_ones() as usize == k);
            let (mut all, mut passed) = (0.0, 0.0);
            for draw in draws {
                all += 1.0;
                let holds = |at: usize| draw >> at & 1 == 1 && rewards[at] == 1.0;
                passed += f64::from(u8::from((0..rewards.len()).any(holds)));
            }
            close(ended.pass(k, 1.0), passed / all);
        }
    }

    #[test]
    fn the_names_are_those_of_the_config_whatever_the_rewards_are() {
        let binary = of(&[&[1.0, 0.0, 0.0, 0.0], &[1.0, 1.0, 0.0, 0.0]], 4);
        assert_eq!(plain(&binary), ["avg@4", "pass@1", "pass@2", "pass@4"]);
        assert_eq!(binary.len(), 12, "each with the ends of its interval");
        close(binary["avg@4"], 0.375);
        close(binary["pass@1"], 0.375);
        close(binary["pass@2"], (0.5 + 5.0 / 6.0) / 2.0);
        close(binary["pass@4"], 1.0);
        let graded = of(&[&[0.5, 1.0, 0.2], &[0.0, 0.9, 0.1]], 3);
        assert_eq!(plain(&graded), ["avg@3", "pass@1", "pass@2", "pass@3"]);
        close(graded["avg@3"], 0.45);
        close(graded["pass@1"], 1.0 / 6.0);
        close(graded["pass@3"], 0.5);
        assert_eq!(plain(&of(&[&[1.0]], 1)), ["avg@1", "pass@1"]);
        assert_eq!(of(&[&[1.0]], 1).len(), 2, "one example has no interval");
    }

    #[test]
    fn the_scores_of_examples_are_what_the_means_are_of() {
        let rewards: [&[f64]; 3] = [&[1.0, 0.0], &[0.5], &[1.0, 1.0]];
        let examples = rewards.into_iter().zip([0, 4, 7]).map(|(rewards, index)| {
            let ended = Ended { rewards, failed: 0 };
            (ExampleIndex(index), ended)
        });
        let rule = Rule {
            rollouts: 2,
            pass_threshold: 1.0,
        };
        let (means, found) = scores(&examples.collect(), rule);
        assert_eq!(found.examples, [0, 4, 7].map(ExampleIndex));
        let expected = [
            ("avg@2", vec![Some(0.5), Some(0.5), Some(1.0)]),
            ("pass@1", vec![Some(0.5), Some(0.0), Some(1.0)]),
            ("pass@2", vec![Some(1.0), None, Some(1.0)]),
        ];
        assert_eq!(
            found.scores,
            expected
                .map(|(name, scores)| (name.to_owned(), scores))
                .into()
        );
        for (name, scores) in &found.scores {
            let there: Vec<f64> = scores.iter().copied().flatten().collect();
            close(means[name], mean(&there));
        }
    }

    #[test]
    fn a_rollout_passes_at_the_threshold_and_never_where_it_failed() {
        let rewards: &[&[f64]] = &[&[0.5, 0.4], &[0.7, 0.5]];
        close(of_threshold(rewards, 2, 0.5)["pass@1"], 0.75);
        close(of_threshold(rewards, 2, 0.6)["pass@1"], 0.25);
        close(of(&[&[0.7 + 0.2 + 0.1, 0.0]], 2)["pass@1"], 0.5);
        let penalised = Ended {
            rewards: &[0.0, -1.0, 0.0, 0.0],
            failed: 1,
        };
        close(penalised.pass(1, 0.0), 0.5);
        close(penalised.pass(1, 1.0), 0.0);
    }

    #[test]
    fn rewards_beyond_0_and_1_have_an_interval_beyond_them() {
        let found = of(&[&[0.0], &[3.0], &[2.5]], 1);
        assert!(found["avg@1/low"] < 0.0 && found["avg@1/high"] > 3.0);
        assert!(found["pass@1/low"] > 0.0 && found["pass@1/high"] <= 1.0);
        // Means from 0 to 1 are no bound.
        let found = of(&[&[-1.0, 2.0], &[-1.0, 1.5]], 2);
        assert!(found["avg@2/low"] < 0.0);
    }

    #[test]
    fn examples_that_did_not_end_in_time_count_with_what_they_have() {
        let found = of(&[&[1.0, 0.0], &[1.0]], 2);
        close(found["avg@2"], 0.75);
        close(found["pass@1"], 0.75);
        close(found["pass@2"], 1.0);
        assert!(!found.contains_key("pass@2/low"), "of one example");
        assert_eq!(plain(&of(&[&[1.0], &[0.0]], 2)), ["avg@2", "pass@1"]);
        assert!(of(&[], 2).is_empty());
    }
}
