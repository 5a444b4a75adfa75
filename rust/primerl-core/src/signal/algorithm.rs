//! Rewards to advantages.
//!
//! The unit is a trace, one seat of one rollout, with a reward of its own. A rollout with one seat is one trace; in the
//! papers it is the "output" or "response". An advantage holds for each sampled token of its trace, with the trainer's
//! loss `-advantage * ratio` summed over tokens and divided by the batch's number of trained tokens.
//!
//! Each function takes the rewards of one group (REINFORCE++: of the batch) and returns an advantage for each; RAE's
//! [`Baselines`] outlive the batch. Traces of
//! another seat are another task: what compares within the group compares traces of one seat.

use super::spread::{differ, mean, standard_deviation};
use super::{Baselines, TraceLength, penalise};
use crate::config::{Algorithm, AlgorithmKind, Config};
use crate::group::Group;
use crate::ids::{EnvironmentId, RolloutId};
use crate::rollout::TrainedTrace;
use rand::Rng;
use rand::seq::SliceRandom;
use std::collections::BTreeMap;

/// The traces of one group.
#[derive(Clone, Debug)]
pub struct ScoredGroup<'a> {
    pub algorithm: &'a Algorithm,
    pub environment: EnvironmentId,
    pub rewards: Vec<f64>,
    /// The seat of each reward's trace; empty: all are of one seat.
    pub seats: Vec<&'a str>,
    /// The rollout of each reward's trace; empty: each is a rollout of its own.
    pub rollouts: Vec<RolloutId>,
    /// What each reward's trace took; looked at where there is a length penalty.
    pub lengths: Vec<TraceLength>,
}

impl<'a> ScoredGroup<'a> {
    /// Of one seat, without lengths.
    pub fn plain(algorithm: &'a Algorithm, rewards: Vec<f64>) -> Self {
        ScoredGroup {
            algorithm,
            environment: EnvironmentId(0),
            rewards,
            seats: Vec::new(),
            rollouts: Vec::new(),
            lengths: Vec::new(),
        }
    }

    /// What a complete group has got.
    pub fn of(config: &'a Config, group: &'a Group) -> Self {
        let finished = group.finished();
        ScoredGroup {
            algorithm: &config.environment(group.environment).algorithm,
            environment: group.environment,
            rewards: group.traces().map(|trace| trace.reward).collect(),
            seats: group.traces().map(|trace| &*trace.seat).collect(),
            rollouts: finished
                .flat_map(|rollout| std::iter::repeat_n(rollout.id, rollout.traces.len()))
                .collect(),
            lengths: group.traces().map(TrainedTrace::length).collect(),
        }
    }

    /// Whether there is something to learn from this group, before it is known with which others it is trained: some
    /// advantage is not 0. Where only the batch or a custom function can tell: whether rewards of one seat differ.
    pub fn has_signal(&self, baselines: &Baselines) -> bool {
        match &self.algorithm.kind {
            AlgorithmKind::Rae { decay } => {
                let mut baselines = baselines.clone();
                (0..self.rewards.len()).any(|place| {
                    let (seat, reward) = (self.seat(place), self.rewards[place]);
                    let usual = baselines.get(self.environment, seat);
                    baselines.score(self.environment, seat, reward, *decay);
                    differ([usual, reward].into_iter())
                })
            }
            AlgorithmKind::HierarchicalGrpo { episode_agents } => {
                any(&self.hierarchical(episode_agents))
            }
            _ => any(&self.by_seat(|rewards| grpo(rewards, false))),
        }
    }

    fn seat(&self, place: usize) -> &'a str {
        self.seats.get(place).copied().unwrap_or_default()
    }

    /// The rewards of each seat by themselves, put together again.
    fn by_seat(&self, advantages: impl Fn(&[f64]) -> Vec<f32>) -> Vec<f32> {
        match self.seats.iter().all(|seat| *seat == self.seats[0]) {
            true => self.compare(&(0..self.rewards.len()).collect::<Vec<_>>(), &advantages),
            false => self.by_peers(|place| self.seat(place), advantages),
        }
    }

    /// The rewards of traces with one key by themselves, put together again.
    fn by_peers<K: Ord>(
        &self,
        key: impl Fn(usize) -> K,
        advantages: impl Fn(&[f64]) -> Vec<f32>,
    ) -> Vec<f32> {
        let mut peers: BTreeMap<K, Vec<usize>> = BTreeMap::new();
        for place in 0..self.rewards.len() {
            peers.entry(key(place)).or_default().push(place);
        }
        let mut found = vec![0.0; self.rewards.len()];
        for places in peers.values() {
            let own = self.compare(places, &advantages);
            for (place, advantage) in places.iter().zip(own) {
                found[*place] = advantage;
            }
        }
        found
    }

    /// Advantages of traces that are compared with each other. Where their rewards, less the length penalty, do not
    /// differ, all are 0, whatever the algorithm would make of their rounding.
    fn compare(&self, places: &[usize], advantages: &impl Fn(&[f64]) -> Vec<f32>) -> Vec<f32> {
        let mut rewards: Vec<f64> = places.iter().map(|place| self.rewards[*place]).collect();
        if let Some(penalty) = &self.algorithm.length_penalty {
            let length = |place: &usize| self.lengths.get(*place).copied().unwrap_or_default();
            let lengths: Vec<TraceLength> = places.iter().map(length).collect();
            rewards = penalise(penalty, &rewards, &lengths);
        }
        match differ(rewards.iter().copied()) {
            true => advantages(&rewards),
            false => vec![0.0; rewards.len()],
        }
    }

    /// GRPO of a proposer and its solvers: attempts at one proposed problem, which are seats of one rollout, are compared
    /// with each other, and proposals with the group's other proposals: `A = r - mean(r of the same seat)`, the mean over
    /// the rollout for seats in `episode_agents` and over the group for the others. As prime-rl's algorithm of this name;
    /// a baseline for each role and task is what self-play with a proposer uses (Zhao et al. 2025, Absolute Zero,
    /// arXiv:2505.03335, Task-Relative REINFORCE++).
    fn hierarchical(&self, episode_agents: &[String]) -> Vec<f32> {
        let rollout = |place: usize| match self.rollouts.get(place) {
            Some(rollout) => rollout.0,
            None => place as u64,
        };
        let key = |place: usize| {
            let seat = self.seat(place);
            let within = episode_agents.iter().any(|agent| agent == seat);
            (seat, within.then(|| rollout(place)))
        };
        self.by_peers(key, |rewards| grpo(rewards, false))
    }
}

/// Advantages of the traces of one batch, whose groups may use different algorithms: the result has the rewards' shape.
/// Groups of a custom algorithm get zeros here: their advantages come from outside. `baselines` move with the rewards of
/// the groups that have them, in the groups' order.
pub fn advantages(
    groups: &[ScoredGroup],
    baselines: &mut Baselines,
    rng: &mut impl Rng,
) -> Vec<Vec<f32>> {
    let uses = |group: &ScoredGroup| group.algorithm.kind == AlgorithmKind::ReinforcePlusPlus;
    let global: Vec<f64> = groups
        .iter()
        .filter(|group| uses(group))
        .flat_map(|group| group.rewards.iter().copied())
        .collect();
    let scale = Normalization::of(&global);
    let mut advantages: Vec<Vec<f32>> = groups
        .iter()
        .map(|group| {
            let rewards = &group.rewards;
            match &group.algorithm.kind {
                AlgorithmKind::Grpo | AlgorithmKind::DrGrpo => {
                    group.by_seat(|rewards| grpo(rewards, group.algorithm.normalize_std))
                }
                AlgorithmKind::Rloo => group.by_seat(rloo),
                AlgorithmKind::MaxRl => group.by_seat(max_rl),
                AlgorithmKind::ReinforcePlusPlus => scale.apply(rewards),
                AlgorithmKind::Rae { decay } => {
                    let scored = rewards.iter().enumerate().map(|(place, reward)| {
                        let seat = group.seat(place);
                        baselines.score(group.environment, seat, *reward, *decay) as f32
                    });
                    scored.collect()
                }
                AlgorithmKind::HierarchicalGrpo { episode_agents } => {
                    group.hierarchical(episode_agents)
                }
                AlgorithmKind::Custom { .. } => vec![0.0; rewards.len()],
            }
        })
        .collect();
    let shuffled = groups.iter().zip(&mut advantages);
    let shuffled = shuffled.filter(|(group, _)| group.algorithm.shuffle_advantages);
    shuffle(
        shuffled.flat_map(|(_, advantages)| advantages).collect(),
        rng,
    );
    advantages
}

/// GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2): `A = r - mean(r)`; with `normalize_std` also divided by the
/// group's population standard deviation (all equal: 0). The division by the response's length, which is part of the
/// paper's objective, is [`crate::config::LengthNormalization::Sequence`].
///
/// Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) is the same without the standard deviation, which weighs easy and hard
/// examples up, and with [`crate::config::LengthNormalization::Constant`], as dividing by each length favours long wrong
/// answers.
pub fn grpo(rewards: &[f64], normalize_std: bool) -> Vec<f32> {
    if normalize_std {
        return Normalization::of(rewards).apply(rewards);
    }
    let mean = mean(rewards.iter().copied());
    rewards
        .iter()
        .map(|reward| (reward - mean) as f32)
        .collect()
}

/// RLOO (Ahmadian et al. 2024, arXiv:2402.14740, section 3.1): `A_i = r_i - mean(r_j, j != i)`. Alone in its group: 0.
pub fn rloo(rewards: &[f64]) -> Vec<f32> {
    let others = rewards.len().saturating_sub(1);
    if others == 0 {
        return vec![0.0; rewards.len()];
    }
    let mean = mean(rewards.iter().copied());
    // r_i - (sum - r_i) / (n - 1) = (r_i - mean) n / (n - 1)
    let factor = rewards.len() as f64 / others as f64;
    rewards
        .iter()
        .map(|reward| ((reward - mean) * factor) as f32)
        .collect()
}

/// MaxRL (arXiv:2602.02710): `A = (r - mean(r)) / mean(r)`; 0 where the mean is 0 (nothing in the group succeeded).
/// Assumes rewards of at least 0; the paper's are 0 or 1, the mean then being the group's pass rate. (A negative reward
/// fails its rollout before it gets here.)
pub fn max_rl(rewards: &[f64]) -> Vec<f32> {
    let mean = mean(rewards.iter().copied());
    rewards
        .iter()
        .map(|reward| match mean > 0.0 {
            true => ((reward - mean) / mean) as f32,
            false => 0.0,
        })
        .collect()
}

/// REINFORCE++'s normalisation (Hu et al. 2025, arXiv:2501.03262): `A = (r - mean) / standard deviation`, both over all
/// traces of the batch that use the algorithm, each counted once whatever its length. All equal: 0. Not taken from
/// there: the KL penalty in the reward.
struct Normalization {
    mean: f64,
    standard_deviation: f64,
}

impl Normalization {
    fn of(rewards: &[f64]) -> Self {
        Normalization {
            mean: mean(rewards.iter().copied()),
            standard_deviation: standard_deviation(rewards),
        }
    }

    fn apply(&self, rewards: &[f64]) -> Vec<f32> {
        rewards
            .iter()
            .map(|reward| match self.standard_deviation > 0.0 {
                true => ((reward - self.mean) / self.standard_deviation) as f32,
                false => 0.0,
            })
            .collect()
    }
}

/// Without a difference that is more than rounding, they are exactly 0.
fn any(advantages: &[f32]) -> bool {
    advantages.iter().any(|advantage| *advantage != 0.0)
}

/// Permutes over all groups: the values stay, their ties to what was sampled are cut.
fn shuffle(slots: Vec<&mut f32>, rng: &mut impl Rng) {
    let mut values: Vec<f32> = slots.iter().map(|slot| **slot).collect();
    values.shuffle(rng);
    for (slot, value) in slots.into_iter().zip(values) {
        *slot = value;
    }
}

#[cfg(test)]
mod tests;
