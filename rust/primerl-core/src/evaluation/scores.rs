//! What rewards by example say of the policy, and how sure that is.
//!
//! `avg@k` is the mean reward of k rollouts of an example, averaged over examples. `pass@k`, where every reward is 0 or 1, is
//! the chance that one of k rollouts passes: of n of which c do, `1 - C(n - c, k) / C(n, k)` without bias (Chen et al.,
//! arXiv:2107.03374), for k = 1, 2, 4, ... up to n.
//!
//! The interval is of 95 %, from the standard error of the mean over examples, whose rollouts are not independent of each
//! other (Miller, arXiv:2411.00640); of one example there is none. Where the examples' scores are all alike that error is 0,
//! which is no certainty: scores from 0 to 1 then have Wilson's interval (JASA 22:209, 1927) for a share of that many
//! examples. It is wide enough for any scores within these bounds: none vary more about their mean than 0 and 1 do.

use crate::ids::ExampleIndex;
use std::collections::BTreeMap;

const NORMAL_95: f64 = 1.959_963_984_540_054;

/// By name; the ends of intervals as `<name>/low` and `<name>/high`.
pub(super) fn scores(rewards: &BTreeMap<ExampleIndex, Vec<f64>>) -> BTreeMap<String, f64> {
    let mut found = BTreeMap::new();
    let Some(most) = rewards.values().map(Vec::len).max() else {
        return found;
    };
    let means = rewards.values().map(|rewards| mean(rewards));
    put(
        &mut found,
        &format!("avg@{most}"),
        &means.collect::<Vec<_>>(),
    );
    let all = || rewards.values().flatten();
    if all().all(|reward| *reward == 0.0 || *reward == 1.0) {
        for k in std::iter::successors(Some(1), |k| Some(2 * k)).take_while(|k| *k <= most) {
            // An example whose rollouts have not all ended in time says nothing of more than it has.
            let enough = rewards.values().filter(|rewards| rewards.len() >= k);
            let passes: Vec<f64> = enough.map(|rewards| pass(rewards, k)).collect();
            put(&mut found, &format!("pass@{k}"), &passes);
        }
    }
    found
}

fn put(found: &mut BTreeMap<String, f64>, name: &str, by_example: &[f64]) {
    let center = mean(by_example);
    found.insert(name.to_owned(), center);
    let count = by_example.len() as f64;
    if by_example.len() < 2 {
        return;
    }
    if let Some(score) = alike(by_example) {
        let (low, high) = wilson(score, count);
        found.insert(format!("{name}/low"), low);
        found.insert(format!("{name}/high"), high);
        return;
    }
    let squares = by_example.iter().map(|value| (value - center).powi(2));
    let error = (squares.sum::<f64>() / (count - 1.0) / count).sqrt();
    found.insert(format!("{name}/low"), center - NORMAL_95 * error);
    found.insert(format!("{name}/high"), center + NORMAL_95 * error);
}

/// The score that all examples have, where it is from 0 to 1.
fn alike(by_example: &[f64]) -> Option<f64> {
    let first = *by_example.first()?;
    let is_alike = by_example
        .iter()
        .all(|score| (score - first).abs() <= f64::EPSILON);
    (is_alike && (0.0..=1.0).contains(&first)).then_some(first)
}

/// The ends of the score interval of a share of `count`.
fn wilson(share: f64, count: f64) -> (f64, f64) {
    let spread = NORMAL_95 * NORMAL_95 / count;
    let center = (share + spread / 2.0) / (1.0 + spread);
    let half = (spread * (share * (1.0 - share) + spread / 4.0)).sqrt() / (1.0 + spread);
    // Rounding may reach beyond the bound that a share of 0 or 1 is.
    ((center - half).max(0.0), (center + half).min(1.0))
}

/// Of at least one.
fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

/// The chance that one of `k` of the rollouts, drawn without putting back, has passed.
fn pass(rewards: &[f64], k: usize) -> f64 {
    let failed = rewards.iter().filter(|reward| **reward == 0.0).count();
    let none = |drawn: usize| failed.saturating_sub(drawn) as f64 / (rewards.len() - drawn) as f64;
    1.0 - (0..k).map(none).product::<f64>()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(rewards: &[&[f64]]) -> BTreeMap<String, f64> {
        let numbered = rewards.iter().enumerate();
        scores(
            &numbered
                .map(|(index, rewards)| (ExampleIndex(index as u32), rewards.to_vec()))
                .collect(),
        )
    }

    fn close(found: f64, expected: f64) {
        assert!(
            (found - expected).abs() < 1e-12,
            "{found} is not {expected}"
        );
    }

    #[test]
    fn pass_at_k_is_the_share_of_all_draws_that_hold_a_pass() {
        let rewards = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0];
        for k in 1..=rewards.len() {
            let draws = (0_u32..1 << rewards.len()).filter(|draw| draw.count_ones() as usize == k);
            let (mut all, mut passed) = (0.0, 0.0);
            for draw in draws {
                all += 1.0;
                let holds = |at: usize| draw >> at & 1 == 1 && rewards[at] == 1.0;
                passed += f64::from(u8::from((0..rewards.len()).any(holds)));
            }
            close(pass(&rewards, k), passed / all);
        }
    }

    #[test]
    fn rewards_of_zero_and_one_pass_others_are_averaged_only() {
        let binary = of(&[&[1.0, 0.0, 0.0, 0.0], &[1.0, 1.0, 0.0, 0.0]]);
        let names: Vec<&str> = binary.keys().map(String::as_str).collect();
        let plain = ["avg@4", "pass@1", "pass@2", "pass@4"];
        let expected: Vec<String> = plain
            .iter()
            .flat_map(|name| {
                [
                    name.to_string(),
                    format!("{name}/high"),
                    format!("{name}/low"),
                ]
            })
            .collect();
        assert_eq!(names, expected);
        close(binary["avg@4"], 0.375);
        close(binary["pass@1"], 0.375);
        close(binary["pass@2"], (0.5 + 5.0 / 6.0) / 2.0);
        close(binary["pass@4"], 1.0);
        let graded = of(&[&[0.5, 1.0], &[0.0, 1.0]]);
        assert_eq!(graded.len(), 3);
        close(graded["avg@2"], 0.625);
    }

    #[test]
    fn the_interval_is_of_the_examples() {
        // Means of 0.2, 0.4 and 0.6: a deviation of 0.2, an error of 0.2 / sqrt(3).
        let found = of(&[&[0.2, 0.2], &[0.3, 0.5], &[0.5, 0.7]]);
        let half = NORMAL_95 * 0.2 / 3.0_f64.sqrt();
        close(found["avg@2/low"], 0.4 - half);
        close(found["avg@2/high"], 0.4 + half);
        assert_eq!(of(&[&[0.2, 0.6]]).len(), 1, "one example has no interval");
    }

    #[test]
    fn scores_that_are_all_alike_have_an_interval_too() {
        // Of n alike, one end is the share itself, the other is z^2 / (n + z^2) away.
        let away = NORMAL_95.powi(2) / (10.0 + NORMAL_95.powi(2));
        let failed = of(&[&[0.0; 2][..]; 10]);
        close(failed["pass@1"], 0.0);
        close(failed["pass@1/low"], 0.0);
        close(failed["pass@1/high"], away);
        let passed = of(&[&[1.0; 2][..]; 10]);
        close(passed["avg@2/low"], 1.0 - away);
        close(passed["avg@2/high"], 1.0);
        // As R's `prop.test(50, 100, correct = FALSE)` has it.
        let halves = of(&[&[0.5][..]; 100]);
        assert!((halves["avg@1/low"] - 0.403_831_5).abs() < 1e-6);
        assert!((halves["avg@1/high"] - 0.596_168_5).abs() < 1e-6);
        // Of scores beyond 0 and 1 nothing is known but that they were alike.
        let beyond = of(&[&[3.0][..]; 4]);
        close(beyond["avg@1/low"], 3.0);
        close(beyond["avg@1/high"], 3.0);
    }

    #[test]
    fn examples_that_did_not_end_in_time_count_with_what_they_have() {
        let found = of(&[&[1.0, 0.0], &[1.0]]);
        close(found["avg@2"], 0.75);
        close(found["pass@1"], 0.75);
        close(found["pass@2"], 1.0);
        assert!(!found.contains_key("pass@2/low"), "of one example");
        assert!(of(&[]).is_empty());
    }
}
