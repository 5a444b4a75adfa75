//! Rewards to advantages: the algorithms, what is particular to each, and their formulas.
//!
//! The unit is a trace, one seat of one rollout, with a reward of its own. A rollout with one seat is one trace; in the
//! papers it is the "output" or "response". An advantage holds for each sampled token of its trace, with the trainer's
//! loss `-advantage * ratio` summed over tokens and divided by the batch's number of trained tokens.
//!
//! Each formula takes the rewards of one group (REINFORCE++: of the batch) and returns an advantage for each; RAE's
//! [`Baselines`] outlive the batch.

use super::spread::{differ, mean, standard_deviation};
use super::{AlgorithmProblem, Baselines, LengthNormalization, ScoredGroup};
use crate::time::Duration;
use rand::Rng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

/// The algorithms. A new one is a variant, its formula in `own_advantages`, and its name in the config class
/// `Algorithm`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AlgorithmKind {
    Grpo,
    DrGrpo,
    Rloo,
    /// The file of a run writes it in one word.
    #[serde(alias = "maxrl")]
    MaxRl,
    ReinforcePlusPlus,
    /// Each seat against what it usually gets.
    Rae {
        /// How much of its baseline a seat keeps at each reward, 0 to below 1.
        decay: f64,
    },
    /// GRPO in two levels: a problem is proposed within a rollout, and tried there.
    HierarchicalGrpo {
        /// Seats that are compared within their rollout; the others are compared within the group. At least one.
        episode_agents: Vec<String>,
    },
    /// A function of the user's, outside of the core: [`crate::Effect::ComputeAdvantages`].
    Custom {
        /// `module:function`, or the name of an installed one, for the process that calls it.
        path: String,
        /// A group whose advantages are not there so long after they were asked for is dropped.
        timeout: Duration,
    },
}

impl AlgorithmKind {
    /// Whether a rollout alone in its group may have an advantage that is known before its batch is.
    pub fn learns_alone(&self) -> bool {
        let hierarchical = matches!(self, AlgorithmKind::HierarchicalGrpo { .. });
        hierarchical || matches!(self, AlgorithmKind::Rae { .. })
    }

    /// Whether it looks at the name of a seat also where all traces are of one.
    pub(crate) fn knows_seats(&self) -> bool {
        matches!(
            self,
            AlgorithmKind::Rae { .. } | AlgorithmKind::HierarchicalGrpo { .. }
        )
    }

    /// Whether an advantage compares a rollout with the others of its group, and with nothing else.
    pub fn is_relative(&self) -> bool {
        match self {
            AlgorithmKind::Grpo
            | AlgorithmKind::DrGrpo
            | AlgorithmKind::Rloo
            | AlgorithmKind::MaxRl => true,
            AlgorithmKind::ReinforcePlusPlus
            | AlgorithmKind::Rae { .. }
            | AlgorithmKind::HierarchicalGrpo { .. }
            | AlgorithmKind::Custom { .. } => false,
        }
    }

    /// Whether each trace has one advantage, not each token its own.
    pub fn is_of_traces(&self) -> bool {
        !matches!(self, AlgorithmKind::Custom { .. })
    }

    /// The algorithm has no meaning for a reward below it.
    pub fn lowest_reward(&self) -> f64 {
        match self {
            AlgorithmKind::MaxRl => 0.0,
            _ => f64::NEG_INFINITY,
        }
    }

    /// What weighs the same in the loss where the config does not say it.
    pub fn usual_length_normalization(&self) -> LengthNormalization {
        match self {
            AlgorithmKind::DrGrpo => LengthNormalization::Constant,
            _ => LengthNormalization::Token,
        }
    }

    /// The parameter with which it cannot run, why, and what to do.
    pub fn problem(&self) -> Option<AlgorithmProblem> {
        match self {
            AlgorithmKind::HierarchicalGrpo { episode_agents } if episode_agents.is_empty() => {
                Some(AlgorithmProblem {
                    key: "episode_agents",
                    problem: "names no seat",
                    remedy: "name those that are compared within one rollout, or set type = \"grpo\"",
                })
            }
            AlgorithmKind::Custom { path, .. } if path.is_empty() => Some(AlgorithmProblem {
                key: "path",
                problem: "must be \"module:function\", or the name of an installed one, for type = \"custom\"",
                remedy: "give it, or set another type",
            }),
            _ => None,
        }
    }
}

impl ScoredGroup<'_> {
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
                any(&hierarchical_grpo(self, episode_agents))
            }
            _ => any(&self.by_seat(|rewards| grpo(rewards, false))),
        }
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
    let own = groups
        .iter()
        .map(|group| own_advantages(group, &scale, baselines));
    let mut advantages: Vec<Vec<f32>> = own.collect();
    let shuffled = groups.iter().zip(&mut advantages);
    let shuffled = shuffled.filter(|(group, _)| group.algorithm.shuffle_advantages);
    shuffle(
        shuffled.flat_map(|(_, advantages)| advantages).collect(),
        rng,
    );
    advantages
}

/// Those of one group, by its algorithm; `scale` is the batch's.
fn own_advantages(
    group: &ScoredGroup,
    scale: &Normalization,
    baselines: &mut Baselines,
) -> Vec<f32> {
    let rewards = &group.rewards;
    match &group.algorithm.kind {
        AlgorithmKind::Grpo | AlgorithmKind::DrGrpo => {
            group.by_seat(|rewards| grpo(rewards, group.algorithm.normalize_std))
        }
        AlgorithmKind::Rloo => group.by_seat(rloo),
        AlgorithmKind::MaxRl => group.by_seat(max_rl),
        AlgorithmKind::ReinforcePlusPlus => scale.apply(rewards),
        AlgorithmKind::Rae { decay } => rae(group, *decay, baselines),
        AlgorithmKind::HierarchicalGrpo { episode_agents } => {
            hierarchical_grpo(group, episode_agents)
        }
        AlgorithmKind::Custom { .. } => vec![0.0; rewards.len()],
    }
}

fn rae(group: &ScoredGroup, decay: f64, baselines: &mut Baselines) -> Vec<f32> {
    let rewards = group.rewards.iter().enumerate();
    let scored = rewards.map(|(place, reward)| {
        let seat = group.seat(place);
        baselines.score(group.environment, seat, *reward, decay) as f32
    });
    scored.collect()
}

/// GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2): `A = r - mean(r)`; with `normalize_std` also divided by the
/// group's population standard deviation (all equal: 0). The division by the response's length, which is part of the
/// paper's objective, is [`super::LengthNormalization::Sequence`].
///
/// Dr. GRPO (Liu et al. 2025, arXiv:2503.20783) is the same without the standard deviation, which weighs easy and hard
/// examples up, and with [`super::LengthNormalization::Constant`], as dividing by each length favours long wrong
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

/// GRPO of a proposer and its solvers: attempts at one proposed problem, which are seats of one rollout, are compared
/// with each other, and proposals with the group's other proposals: `A = r - mean(r of the same seat)`, the mean over
/// the rollout for seats in `episode_agents` and over the group for the others. As prime-rl's algorithm of this name;
/// a baseline for each role and task is what self-play with a proposer uses (Zhao et al. 2025, Absolute Zero,
/// arXiv:2505.03335, Task-Relative REINFORCE++).
fn hierarchical_grpo(group: &ScoredGroup<'_>, episode_agents: &[String]) -> Vec<f32> {
    let rollout = |place: usize| match group.rollouts.get(place) {
        Some(rollout) => rollout.0,
        None => place as u64,
    };
    let key = |place: usize| {
        let seat = group.seat(place);
        let within = episode_agents.iter().any(|agent| agent == seat);
        (seat, within.then(|| rollout(place)))
    };
    group.by_peers(key, |rewards| grpo(rewards, false))
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
