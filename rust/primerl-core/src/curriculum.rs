//! Which example comes next.
//!
//! Environments take turns by their ratio (smooth weighted round robin: over any stretch of n draws an environment of
//! share s gets n * s of them, give or take one). Within an environment, examples come in seeded epochs: each once, in
//! random order, then all again in another order.

use crate::config::{Config, Role};
use crate::ids::{EnvironmentId, ExampleIndex};
use rand::Rng;
use std::collections::HashMap;

/// A random order of `0..len`, drawn one at a time: Fisher and Yates' shuffle that stores only displaced entries, so
/// neither a draw nor the start of an epoch costs O(len).
#[derive(Clone, Debug)]
struct Epochs {
    len: u32,
    position: u32,
    displaced: HashMap<u32, u32>,
}

impl Epochs {
    fn new(len: u32) -> Self {
        Epochs {
            len,
            position: 0,
            displaced: HashMap::new(),
        }
    }

    fn next(&mut self, rng: &mut impl Rng) -> u32 {
        let here = self.position;
        let there = rng.random_range(here..self.len);
        // `here` is never looked at again in this epoch, so the map is empty when the epoch ends.
        let from_here = self.displaced.remove(&here).unwrap_or(here);
        let drawn = match there == here {
            true => from_here,
            false => self.displaced.insert(there, from_here).unwrap_or(there),
        };
        self.position = (here + 1) % self.len;
        drawn
    }
}

#[derive(Clone, Debug)]
struct Source {
    environment: EnvironmentId,
    ratio: f64,
    credit: f64,
    /// `None` until a worker has listed the examples.
    epochs: Option<Epochs>,
}

/// The order of training examples.
#[derive(Clone, Debug)]
pub struct Curriculum {
    sources: Vec<Source>,
}

impl Curriculum {
    pub fn new(config: &Config) -> Self {
        let sources = config
            .environment_ids()
            .filter(|(_, environment)| environment.role == Role::Train)
            .map(|(id, environment)| Source {
                environment: id,
                ratio: environment.ratio,
                credit: 0.0,
                epochs: None,
            })
            .collect();
        Curriculum { sources }
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
            source.epochs = Some(Epochs::new(examples));
        }
    }

    /// A training environment whose examples are not known yet. Nothing is drawn while there is one, or its ratio
    /// would not hold at the start.
    pub fn missing(&self) -> Option<EnvironmentId> {
        self.sources
            .iter()
            .find(|source| source.epochs.is_none())
            .map(|source| source.environment)
    }

    /// Whose turn it is among the environments that `may` have one, or `None` while an environment is
    /// [`Curriculum::missing`] or none may. One that may not gives its turn up: it has nothing to catch up with later.
    pub fn turn(&mut self, may: impl Fn(EnvironmentId) -> bool) -> Option<EnvironmentId> {
        if self.missing().is_some() {
            return None;
        }
        let mut total = 0.0;
        let mut richest: Option<usize> = None;
        for index in 0..self.sources.len() {
            let source = &mut self.sources[index];
            if !may(source.environment) {
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
    pub fn draw(&mut self, environment: EnvironmentId, rng: &mut impl Rng) -> Option<ExampleIndex> {
        let mut sources = self.sources.iter_mut();
        let source = sources.find(|source| source.environment == environment)?;
        Some(ExampleIndex(source.epochs.as_mut()?.next(rng)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{config, environment};
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;

    #[test]
    fn an_epoch_has_every_example_once() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut epochs = Epochs::new(97);
        let mut orders = Vec::new();
        for _ in 0..3 {
            let order: Vec<u32> = (0..97).map(|_| epochs.next(&mut rng)).collect();
            let mut sorted = order.clone();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..97).collect::<Vec<_>>());
            assert!(epochs.displaced.is_empty());
            orders.push(order);
        }
        assert_ne!(orders[0], orders[1]);
        assert_ne!(orders[1], orders[2]);
    }

    #[test]
    fn huge_environments_cost_nothing_to_draw_from() {
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        let mut epochs = Epochs::new(u32::MAX);
        for _ in 0..100 {
            epochs.next(&mut rng);
        }
        assert!(epochs.displaced.len() <= 100);
    }

    #[test]
    fn environments_take_turns_by_ratio() {
        let mut config = config();
        config.environments = vec![environment("a"), environment("b"), environment("c")];
        for (environment, ratio) in config.environments.iter_mut().zip([5.0, 1.0, 2.0]) {
            environment.ratio = ratio;
        }
        let mut curriculum = Curriculum::new(&config);
        let mut rng = ChaCha8Rng::seed_from_u64(1);
        for index in 0..3 {
            assert_eq!(curriculum.missing(), Some(EnvironmentId(index)));
            assert_eq!(curriculum.turn(|_| true), None);
            curriculum.set_examples(EnvironmentId(index), 10);
        }
        for _ in 0..5 {
            let mut counts = [0; 3];
            for _ in 0..8 {
                let environment = curriculum.turn(|_| true).expect("all are ready");
                let example = curriculum.draw(environment, &mut rng).expect("it trains");
                assert!(example.0 < 10);
                counts[environment.0 as usize] += 1;
            }
            assert_eq!(counts, [5, 1, 2]);
        }
    }

    #[test]
    fn an_environment_that_gives_its_turns_up_has_nothing_to_catch_up_with() {
        let mut config = config();
        config.environments = vec![environment("a"), environment("b"), environment("c")];
        config.environments[2].ratio = 2.0;
        let mut curriculum = Curriculum::new(&config);
        (0..3).for_each(|index| curriculum.set_examples(EnvironmentId(index), 10));
        let mut counts = |turns, without: Option<u32>| {
            let mut counts = [0; 3];
            for _ in 0..turns {
                let environment = curriculum.turn(|environment| Some(environment.0) != without);
                counts[environment.expect("some may").0 as usize] += 1;
            }
            counts
        };
        assert_eq!(counts(30, Some(1)), [10, 0, 20]);
        assert_eq!(counts(40, None), [10, 10, 20]);
        assert_eq!(curriculum.turn(|_| false), None);
    }

    #[test]
    fn the_seed_decides_the_order() {
        let order = |seed| {
            let mut rng = ChaCha8Rng::seed_from_u64(seed);
            let mut epochs = Epochs::new(1000);
            (0..1000).map(|_| epochs.next(&mut rng)).collect::<Vec<_>>()
        };
        assert_eq!(order(3), order(3));
        assert_ne!(order(3), order(4));
    }
}
