//! Which example comes next.
//!
//! Environments take turns by their ratio (smooth weighted round robin: over any stretch of n draws an environment of
//! share s gets n * s of them, give or take one). Within an environment the difficulty buffer decides ([`deck`],
//! `examples`): each complete group files its example as easy, normal or hard by its mean reward.
//!
//! With `online_difficulty_filtering` a draw chooses a pool with probability proportional to the number of its examples
//! times their weight (normal 1, easy `easy_fraction`, hard `hard_fraction`; 0 is never) and takes one of it; a group
//! whose advantages would all be 0 is not trained. When no example with weight is left, all are made normal again. Without
//! it, examples come in plain epochs: each once, in random order, then all again in another order; how hard they are
//! is only recorded.
//!
//! The order has a generator of its own, so that it depends on nothing but the seed and the rewards.

pub mod deck;
mod examples;
mod filing;
mod record;
pub mod report;
mod resting;
mod sparse;

pub use deck::{Deck, Pool};
pub use examples::Filing;
pub use report::{BufferReport, BufferStep, EnvironmentBuffer, ExampleHistory};
pub(crate) use resting::Rest;

use crate::config::{Config, Role};
use crate::ids::{EnvironmentId, ExampleIndex, Step};
use examples::Examples;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use report::EnvironmentStep;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;

/// The run's other random choices are stream 0 of the same seed.
const STREAM: u64 = 1;

/// Steps whose movement is remembered.
const STEPS: usize = 1000;

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Source {
    environment: EnvironmentId,
    ratio: f64,
    credit: f64,
    /// `None` until a worker has listed them.
    examples: Option<Examples>,
}

/// The order of training examples.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Curriculum {
    sources: Vec<Source>,
    rng: ChaCha8Rng,
    steps: VecDeque<BufferStep>,
}

/// What a group is begun with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draw {
    pub example: ExampleIndex,
    /// No example with weight was left, so all of the environment were made normal, so many times by now.
    pub returned: Option<u64>,
}

impl Curriculum {
    pub fn new(config: &Config) -> Self {
        let sources: Vec<Source> = config
            .environment_ids()
            .filter(|(_, environment)| environment.role == Role::Train)
            .map(|(id, environment)| Source {
                environment: id,
                ratio: environment.ratio,
                credit: 0.0,
                examples: None,
            })
            .collect();
        let mut rng = ChaCha8Rng::seed_from_u64(config.buffer.seed.unwrap_or(config.run.seed));
        rng.set_stream(STREAM);
        Curriculum {
            sources,
            rng,
            steps: VecDeque::new(),
        }
    }

    /// Sets the number of examples (at least 1) of a training environment; others are ignored.
    pub fn set_examples(&mut self, environment: EnvironmentId, examples: u32) {
        assert!(
            examples > 0,
            "an environment without examples is never ready"
        );
        for source in self
            .sources
            .iter_mut()
            .filter(|source| source.environment == environment)
        {
            source.examples = Some(Examples::new(examples));
        }
    }

    /// A training environment whose examples are not known yet. Nothing is drawn while there is one, or its ratio
    /// would not hold at the start.
    pub fn missing(&self) -> Option<EnvironmentId> {
        self.sources
            .iter()
            .find(|source| source.examples.is_none())
            .map(|source| source.environment)
    }

    /// Whose turn it is among the environments that `may` have one and have an example left, or `None` while an environment
    /// is [`Curriculum::missing`] or none may. One that may not gives its turn up: it has nothing to catch up with later.
    pub fn turn(&mut self, may: impl Fn(EnvironmentId) -> bool) -> Option<EnvironmentId> {
        if self.missing().is_some() {
            return None;
        }
        let mut total = 0.0;
        let mut richest: Option<usize> = None;
        for index in 0..self.sources.len() {
            let source = &mut self.sources[index];
            let is_exhausted = source.examples.as_ref().is_some_and(Examples::is_exhausted);
            if is_exhausted || !may(source.environment) {
                continue;
            }
            source.credit += source.ratio;
            total += source.ratio;
            let credit = source.credit;
            if richest.is_none_or(|richest| credit > self.sources[richest].credit) {
                richest = Some(index);
            }
        }
        let source = &mut self.sources[richest?];
        source.credit -= total;
        Some(source.environment)
    }

    /// The environment's next example; `None` for one that does not train or has listed none.
    pub fn draw(&mut self, environment: EnvironmentId, config: &Config) -> Option<Draw> {
        let mut sources = self.sources.iter_mut();
        let source = sources.find(|source| source.environment == environment)?;
        let examples = source.examples.as_mut()?;
        let (example, returned) = examples.draw(&config.buffer, &mut self.rng)?;
        Some(Draw {
            example: ExampleIndex(example),
            returned,
        })
    }

    /// Passes over all training examples so far: groups that were begun, each with one example, by the number of examples
    /// of all environments together. Groups in flight count, and those that were dropped or filtered.
    pub fn epoch(&self) -> f64 {
        let known = || self.sources.iter().filter_map(|own| own.examples.as_ref());
        let drawn: u64 = known().map(|examples| examples.drawn).sum();
        let examples: u64 = known().map(|examples| u64::from(examples.count())).sum();
        drawn as f64 / examples.max(1) as f64
    }

    /// Files the example of a complete group. Returns whether the group is to be trained.
    pub fn file(
        &mut self,
        environment: EnvironmentId,
        example: ExampleIndex,
        filing: &Filing,
        config: &Config,
    ) -> bool {
        let examples = self
            .sources
            .iter_mut()
            .find(|source| source.environment == environment)
            .and_then(|source| source.examples.as_mut());
        examples.is_none_or(|examples| examples.file(example.0, filing, &config.buffer))
    }

    /// An example that cannot be used, whatever the policy: it is drawn no more. Returns how many of its environment rest
    /// by now, if it did not before.
    pub fn rest(
        &mut self,
        environment: EnvironmentId,
        example: ExampleIndex,
        config: &Config,
    ) -> Option<u32> {
        let mut sources = self.sources.iter_mut();
        let source = sources.find(|source| source.environment == environment)?;
        source.examples.as_mut()?.rest(example.0, &config.buffer)
    }

    /// Examples that rested may be drawn again.
    pub fn end_rests(&mut self, config: &Config) {
        let examples = self
            .sources
            .iter_mut()
            .filter_map(|source| source.examples.as_mut());
        examples.for_each(|examples| examples.end_rests(&config.buffer));
    }

    /// Whether every example of the environment rests.
    pub fn is_exhausted(&self, environment: EnvironmentId) -> bool {
        self.examples(environment)
            .is_some_and(Examples::is_exhausted)
    }

    /// Groups of the environment in a row, up to now, that were not trained because they had no signal.
    pub fn filtered_in_a_row(&self, environment: EnvironmentId) -> u64 {
        self.examples(environment)
            .map_or(0, |examples| examples.filtered_in_a_row)
    }

    /// Closes the span of a cut step, and says what moved in it.
    pub fn end_step(&mut self, step: Step) -> &BufferStep {
        let environments = self.sources.iter_mut().filter_map(|source| {
            let (pools, movement) = source.examples.as_mut()?.end_step();
            Some(EnvironmentStep {
                environment: source.environment,
                pools,
                movement,
            })
        });
        let environments = environments.collect();
        if self.steps.len() == STEPS {
            self.steps.pop_front();
        }
        self.steps.push_back(BufferStep { step, environments });
        &self.steps[self.steps.len() - 1]
    }

    /// The buffer of each training environment whose examples are known.
    pub fn environments(&self, config: &Config) -> Vec<EnvironmentBuffer> {
        let known = self.sources.iter().filter_map(|source| {
            let name = &config.environment(source.environment).name;
            let examples = source.examples.as_ref()?;
            Some(examples.report(source.environment, name, &config.buffer))
        });
        known.collect()
    }

    pub fn report(&self, config: &Config) -> BufferReport {
        BufferReport {
            online_difficulty_filtering: config.buffer.online_difficulty_filtering,
            environments: self.environments(config),
            steps: self.steps.iter().cloned().collect(),
        }
    }

    /// What became of one example; `None` if there is no such one.
    pub fn history(
        &self,
        environment: EnvironmentId,
        example: ExampleIndex,
        config: &Config,
    ) -> Option<ExampleHistory> {
        self.examples(environment)?
            .history(environment, example, &config.buffer)
    }

    /// # Errors
    /// The first environment whose pools do not hold each of its examples once, in words.
    pub fn check(&self, config: &Config) -> Result<(), String> {
        self.sources.iter().try_for_each(|source| {
            let Some(examples) = &source.examples else {
                return Ok(());
            };
            let named = |what| format!("buffer of environment {}: {what}", source.environment);
            examples.check(&config.buffer).map_err(named)
        })
    }

    fn examples(&self, environment: EnvironmentId) -> Option<&Examples> {
        self.sources
            .iter()
            .find(|source| source.environment == environment)?
            .examples
            .as_ref()
    }
}

#[cfg(test)]
mod tests;
