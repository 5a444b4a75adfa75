//! What is wrong with a run, in words: the rules of docs/recipes/not-learning.md over its metrics by step.
//!
//! A rule looks at the last steps, so that a run that has recovered is not accused of its past, and says nothing while
//! there are too few of them. The first finding is the first to look at: it may explain those after it.

use super::curves::Curves;
use serde::Serialize;

/// Steps that rules about the present look at, and the fewest they need.
const RECENT: usize = 10;
const FEWEST: usize = 5;
/// A reward is called flat from so many steps on: many tasks are learnt in fewer, and noise hides the first gains.
const FLAT_FROM: usize = 40;
/// Standard errors between two stretches of a curve that differ.
const SIGNIFICANT: f64 = 3.0;
/// A reward this close to the best of all steps is as good as it gets.
const NEAR_BEST: f64 = 0.9;

/// Shares from which a rule speaks.
const ERRORS: f64 = 0.1;
const TRUNCATED: f64 = 0.3;
const STALE: f64 = 0.2;
const IDLE: f64 = 0.75;
/// Nats a token. Engine and trainer differ by 0.004 in bf16 without any staleness, by up to 0.03 with adapters.
const MISMATCH: f64 = 0.05;
/// Entropy in nats a token, and its share of what it was, below which a policy repeats itself.
const COLLAPSED: (f64, f64) = (0.05, 0.1);

/// One thing that is wrong.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Finding {
    pub rule: &'static str,
    /// What is seen, with its numbers.
    pub what: String,
    /// What it means, and what to do.
    pub advice: &'static str,
    /// The curve that shows it.
    pub curve: &'static str,
}

/// What is wrong, the first to look at first; empty for a run in which no rule finds anything, or one that has only begun.
pub fn findings(curves: &Curves) -> Vec<Finding> {
    let run = Run { curves };
    let rules = [
        errors, no_signal, truncation, mismatch, stale, entropy, flat, falling, idle,
    ];
    let mut found: Vec<Finding> = rules.iter().filter_map(|rule| rule(&run)).collect();
    // Without a signal nothing can move.
    if found.iter().any(|finding| finding.rule == "no_signal") {
        found.retain(|finding| !matches!(finding.rule, "reward_flat" | "entropy_collapse"));
    }
    found
}

struct Run<'a> {
    curves: &'a Curves,
}

impl Run<'_> {
    fn all(&self, name: &str) -> Vec<f64> {
        let values = self.curves.values(name).into_iter();
        values.map(f64::from).collect()
    }

    /// Mean of the last steps, and how many they are; None while there are too few.
    fn recent(&self, name: &str) -> Option<(f64, usize)> {
        let values = self.all(name);
        let last = &values[values.len().saturating_sub(RECENT)..];
        (last.len() >= FEWEST).then(|| (mean(last), last.len()))
    }

    fn reward(&self) -> Vec<f64> {
        self.all("reward/all/mean")
    }

    /// Whether the reward has risen since the start.
    fn has_risen(&self) -> bool {
        let reward = self.reward();
        ends(&reward).is_some_and(|(first, last)| differ(last, first))
    }
}

/// The first and the last quarter.
fn ends(values: &[f64]) -> Option<(&[f64], &[f64])> {
    let quarter = values.len() / 4;
    (quarter >= 2).then(|| (&values[..quarter], &values[values.len() - quarter..]))
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Squared standard error of the mean.
fn squared_error(values: &[f64]) -> f64 {
    let (middle, count) = (mean(values), values.len().max(2) as f64);
    let squares = values.iter().map(|value| (value - middle).powi(2));
    squares.sum::<f64>() / (count - 1.0) / count
}

/// Whether the mean of `high` is above that of `low`, beyond chance.
fn differ(high: &[f64], low: &[f64]) -> bool {
    let error = (squared_error(high) + squared_error(low)).sqrt();
    mean(high) - mean(low) > SIGNIFICANT * error.max(1e-9)
}

fn percent(share: f64) -> String {
    format!("{:.0} %", 100.0 * share)
}

fn errors(run: &Run) -> Option<Finding> {
    let (share, steps) = run.recent("errored_rollouts/all/mean")?;
    (share > ERRORS).then(|| Finding {
        rule: "environment_errors",
        what: format!("{} of the rollouts of the last {steps} steps failed", percent(share)),
        advice: "The environment, its tools or the engines raise errors: `primerl trace FOLDER --dropped` counts them by \
                 kind, and the env worker's log has the traceback.",
        curve: "errored_rollouts/all/mean",
    })
}

fn no_signal(run: &Run) -> Option<Finding> {
    let values = run.all("advantage/all/std");
    let last = &values[values.len().saturating_sub(RECENT)..];
    let none = last.len() >= FEWEST && last.iter().all(|value| value.abs() < 1e-4);
    // A run that has learnt its task to the end has none either.
    (none && !run.has_risen()).then(|| Finding {
        rule: "no_signal",
        what: format!("no group of the last {} steps had rollouts of different rewards", last.len()),
        advice: "Nothing can be learnt from equal rewards: easier or harder examples, more rollouts a group (`group_size`), \
                 a higher temperature, or a graded reward.",
        curve: "advantage/all/std",
    })
}

fn truncation(run: &Run) -> Option<Finding> {
    let (share, steps) = run.recent("is_truncated/all/mean")?;
    (share > TRUNCATED).then(|| Finding {
        rule: "truncation",
        what: format!("{} of the rollouts of the last {steps} steps were cut off", percent(share)),
        advice: "An answer that is cut off earns nothing although it might have been right: raise `sampling.max_tokens` or \
                 `seq_len`. A share that grows: a reward that pays for length may be why.",
        curve: "is_truncated/all/mean",
    })
}

fn mismatch(run: &Run) -> Option<Finding> {
    let (kl, steps) = run.recent("mismatch_kl/all/mean")?;
    (kl > MISMATCH).then(|| Finding {
        rule: "mismatch",
        what: format!("trainer and engine differ by {kl:.2} nats a token in the mean of the last {steps} steps"),
        advice: "The policy that samples is far from the one that is trained: lower the learning rate or \
                 `max_off_policy_steps`. In step 1, or at staleness 0, it is another dtype or another computation: \
                 `primerl verify` names the tokens.",
        curve: "mismatch_kl/all/mean",
    })
}

fn stale(run: &Run) -> Option<Finding> {
    let (lost, steps) = run.recent("rollouts/stale")?;
    let trained = run.curves.names("staleness/");
    let trained = trained.filter(|name| name["staleness/".len()..].parse::<u32>().is_ok());
    // A step in which there are no samples of a staleness has no value for it.
    let steps_all = run.all("rollouts/stale").len();
    let trained: f64 = trained
        .map(|name| run.curves.sum_of_last(name, steps_all.min(RECENT)))
        .sum();
    let share = lost * steps as f64 / (lost * steps as f64 + trained).max(1.0);
    (share > STALE).then(|| Finding {
        rule: "too_stale",
        what: format!("{} of what was sampled for the last {steps} steps was too old to be trained", percent(share)),
        advice: "Sampling runs too far ahead: lower `max_async_level` or `oversampling_factor`, or raise \
                 `max_off_policy_steps`.",
        curve: "rollouts/stale",
    })
}

fn entropy(run: &Run) -> Option<Finding> {
    let values = run.all("entropy/all/mean");
    let (last, steps) = run.recent("entropy/all/mean")?;
    let first = mean(values.get(..FEWEST)?);
    let collapsed = values.len() > RECENT && last < COLLAPSED.0 && last < COLLAPSED.1 * first;
    (collapsed && !run.has_risen()).then(|| Finding {
        rule: "entropy_collapse",
        what: format!("entropy fell from {first:.2} to {last:.3} nats a token (last {steps} steps) and the reward did not rise"),
        advice: "The policy repeats itself: a lower learning rate, `trainer.loss.entropy_weight`, or a higher \
                 `sampling.temperature`.",
        curve: "entropy/all/mean",
    })
}

fn flat(run: &Run) -> Option<Finding> {
    let reward = run.reward();
    if reward.len() < FLAT_FROM {
        return None;
    }
    let (first, last) = ends(&reward)?;
    let best = reward.iter().copied().fold(f64::MIN, f64::max);
    let is_best = mean(last) >= NEAR_BEST * best && best > 0.0;
    (!is_best && !differ(last, first) && !differ(first, last)).then(|| Finding {
        rule: "reward_flat",
        what: format!(
            "after {} steps the mean reward is {:.3}; it was {:.3} at the start",
            reward.len(),
            mean(last),
            mean(first)
        ),
        advice: "Read ten rollouts of a late step: can the reward be earned at all? Then docs/recipes/not-learning.md, from \
                 its beginning.",
        curve: "reward/all/mean",
    })
}

fn falling(run: &Run) -> Option<Finding> {
    let reward = run.reward();
    let quarter = reward.len() / 4;
    if quarter < FEWEST {
        return None;
    }
    let by_mean = |a: &&[f64], b: &&[f64]| mean(a).total_cmp(&mean(b));
    let best = reward.windows(quarter).max_by(by_mean)?;
    let last = &reward[reward.len() - quarter..];
    let lowest = reward.iter().copied().fold(f64::MAX, f64::min);
    let lost = (mean(best) - mean(last)) / (mean(best) - lowest).max(1e-9);
    (lost > 0.5 && differ(best, last)).then(|| Finding {
        rule: "reward_falls",
        what: format!("the mean reward was {:.3} at its best and is {:.3} now", mean(best), mean(last)),
        advice: "The learning rate may be too high: look at `optim/grad_norm` and `mismatch_kl/all/mean` where it turned, and \
                 go back to a checkpoint before that (`--ckpt.resume-step N`).",
        curve: "reward/all/mean",
    })
}

fn idle(run: &Run) -> Option<Finding> {
    let (waited, _) = run.recent("time/wait_for_batch")?;
    let (whole, steps) = run.recent("time/step")?;
    let share = waited / whole.max(1e-9);
    (share > IDLE).then(|| Finding {
        rule: "trainer_idle",
        what: format!("the trainer waited for batches {} of the time of the last {steps} steps", percent(share)),
        advice: "Sampling is the bottleneck: more engines or env workers, or a higher `max_async_level`; `primerl trace FOLDER \
                 --idle` says who waits for whom, `primerl simulate` what more of each would gain.",
        curve: "time/wait_for_batch",
    })
}

#[cfg(test)]
mod tests;
