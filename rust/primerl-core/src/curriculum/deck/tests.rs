use super::*;
use proptest::prelude::*;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use std::collections::BTreeSet;

fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

fn draws(deck: &mut Deck, count: u32, rng: &mut ChaCha8Rng) -> Vec<u32> {
    (0..count)
        .map(|_| deck.draw(Pool::Normal, rng).expect("the pool has examples"))
        .collect()
}

#[test]
fn an_epoch_has_every_example_once() {
    let (mut deck, mut rng) = (Deck::new(97), rng(1));
    let orders: Vec<Vec<u32>> = (0..3).map(|_| draws(&mut deck, 97, &mut rng)).collect();
    for order in &orders {
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..97).collect::<Vec<_>>());
    }
    assert_ne!(orders[0], orders[1]);
    assert_ne!(orders[1], orders[2]);
    assert_eq!(deck.epochs(Pool::Normal), 2, "the third is not over yet");
}

#[test]
fn every_order_of_an_epoch_is_equally_likely() {
    let mut counts = std::collections::BTreeMap::<Vec<u32>, u32>::new();
    let mut rng = rng(1);
    let mut deck = Deck::new(3);
    for _ in 0..6000 {
        *counts.entry(draws(&mut deck, 3, &mut rng)).or_default() += 1;
    }
    assert_eq!(counts.len(), 6);
    // Five standard deviations.
    assert!(
        counts.values().all(|count| count.abs_diff(1000) < 145),
        "{counts:?}"
    );
}

#[test]
fn huge_environments_cost_nothing_to_draw_from() {
    let (mut deck, mut rng) = (Deck::new(u32::MAX), rng(1));
    for example in draws(&mut deck, 100, &mut rng) {
        deck.file(example, Pool::Hard);
    }
    assert_eq!(deck.len(Pool::Hard), 100);
    assert!(deck.order.stored() <= 100 * 8 * 128);
}

#[test]
fn returning_all_of_a_huge_environment_costs_nothing() {
    let (mut deck, mut rng) = (Deck::new(u32::MAX), rng(1));
    let drawn = draws(&mut deck, 10, &mut rng);
    drawn
        .iter()
        .for_each(|example| deck.file(*example, Pool::Easy));
    let stored = deck.order.stored();
    deck.return_all();
    assert_eq!(
        (deck.len(Pool::Normal), deck.drawn(Pool::Normal)),
        (u32::MAX, 0)
    );
    assert_eq!(deck.order.stored(), stored);
    deck.check().expect("the pools do not overlap");
}

/// What a deck must do, without any of its representation: a set of undrawn and one of drawn examples a pool.
#[derive(Default)]
struct Model {
    undrawn: [BTreeSet<u32>; 3],
    drawn: [BTreeSet<u32>; 3],
    epochs: [u64; 3],
}

impl Model {
    fn new(examples: u32) -> Self {
        let mut model = Model::default();
        model.undrawn[Pool::Normal as usize] = (0..examples).collect();
        model
    }

    fn pool_of(&self, example: u32) -> usize {
        (0..3)
            .find(|pool| {
                self.undrawn[*pool].contains(&example) || self.drawn[*pool].contains(&example)
            })
            .expect("every example is in a pool")
    }

    fn saw_draw(&mut self, pool: Pool, got: Option<u32>) {
        let pool = pool as usize;
        if self.undrawn[pool].is_empty() && !self.drawn[pool].is_empty() {
            self.undrawn[pool] = std::mem::take(&mut self.drawn[pool]);
            self.epochs[pool] += 1;
        }
        match got {
            None => assert!(self.undrawn[pool].is_empty(), "there was something to draw"),
            Some(example) => {
                assert!(
                    self.undrawn[pool].remove(&example),
                    "{example} is not of the pool, or was drawn in this epoch before"
                );
                self.drawn[pool].insert(example);
            }
        }
    }

    fn file(&mut self, example: u32, pool: Pool) {
        let from = self.pool_of(example);
        if from != pool as usize {
            self.undrawn[from].remove(&example);
            self.drawn[from].remove(&example);
            self.drawn[pool as usize].insert(example);
        }
    }

    fn return_all(&mut self, examples: u32) {
        let epochs = self.epochs;
        *self = Model::new(examples);
        self.epochs = epochs;
        self.epochs[Pool::Normal as usize] += 1;
    }

    fn check(&self, deck: &Deck, examples: u32) {
        deck.check().expect("the pools do not overlap");
        for pool in Pool::ALL {
            let index = pool as usize;
            let (undrawn, drawn) = (self.undrawn[index].len(), self.drawn[index].len());
            assert_eq!(deck.len(pool) as usize, undrawn + drawn);
            assert_eq!(deck.drawn(pool) as usize, drawn);
            assert_eq!(deck.epochs(pool), self.epochs[index]);
        }
        for example in 0..examples {
            assert!(deck.knows(example));
            assert_eq!(deck.pool_of(example) as usize, self.pool_of(example));
        }
        let positions: BTreeSet<u32> = (0..examples)
            .map(|example| deck.order.position_of(example))
            .collect();
        assert_eq!(positions, (0..examples).collect::<BTreeSet<_>>());
    }
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Draw(Pool),
    File(u32, Pool),
    ReturnAll,
}

fn pools() -> impl Strategy<Value = Pool> {
    prop::sample::select(Pool::ALL.to_vec())
}

fn actions() -> impl Strategy<Value = (u32, Vec<Action>)> {
    (1..100_u32).prop_flat_map(|examples| {
        let action = prop_oneof![
            10 => pools().prop_map(Action::Draw),
            10 => (0..examples, pools()).prop_map(|(example, pool)| Action::File(example, pool)),
            1 => Just(Action::ReturnAll),
        ];
        (Just(examples), prop::collection::vec(action, 0..300))
    })
}

fn act(deck: &mut Deck, action: Action, rng: &mut ChaCha8Rng) -> Option<u32> {
    match action {
        Action::Draw(pool) => deck.draw(pool, rng),
        Action::File(example, pool) => {
            deck.file(example, pool);
            None
        }
        Action::ReturnAll => {
            deck.return_all();
            None
        }
    }
}

proptest! {
    #[test]
    fn draws_and_moves_do_as_the_model_says((examples, actions) in actions(), seed: u64) {
        let (mut deck, mut model, mut rng) = (Deck::new(examples), Model::new(examples), rng(seed));
        for action in actions {
            let got = act(&mut deck, action, &mut rng);
            match action {
                Action::Draw(pool) => model.saw_draw(pool, got),
                Action::File(example, pool) => model.file(example, pool),
                Action::ReturnAll => model.return_all(examples),
            }
            model.check(&deck, examples);
        }
    }

    #[test]
    fn the_seed_decides_the_order((examples, actions) in actions(), seed: u64) {
        let run = |seed| {
            let (mut deck, mut rng) = (Deck::new(examples), rng(seed));
            let order: Vec<_> = actions.iter().map(|action| act(&mut deck, *action, &mut rng)).collect();
            (order, rmp_serde::to_vec(&deck).expect("a deck can be written"))
        };
        prop_assert_eq!(run(seed), run(seed));
    }

    #[test]
    fn a_deck_that_was_written_and_read_goes_on_as_before((examples, actions) in actions(), seed: u64) {
        let (mut deck, mut rng) = (Deck::new(examples), rng(seed));
        for action in &actions {
            act(&mut deck, *action, &mut rng);
        }
        let bytes = rmp_serde::to_vec(&(&deck, &rng)).expect("a deck can be written");
        let (mut read, mut read_rng): (Deck, ChaCha8Rng) =
            rmp_serde::from_slice(&bytes).expect("and read");
        prop_assert_eq!(rmp_serde::to_vec(&(&read, &read_rng)).expect("and written again"), bytes);
        for action in &actions {
            prop_assert_eq!(
                act(&mut deck, *action, &mut rng),
                act(&mut read, *action, &mut read_rng)
            );
        }
    }
}

#[test]
fn another_seed_is_another_order() {
    let order = |seed| draws(&mut Deck::new(1000), 1000, &mut rng(seed));
    assert_eq!(order(3), order(3));
    assert_ne!(order(3), order(4));
}

proptest! {
    /// An example that rests is in no pool and is never drawn, until it may be again.
    #[test]
    fn what_rests_is_never_drawn(
        examples in 1_u32..40,
        moves in prop::collection::vec((0_u32..40, 0_usize..4), 0..80),
        seed: u64,
    ) {
        let (mut deck, mut rng) = (Deck::new(examples), rng(seed));
        let mut resting = BTreeSet::new();
        for (example, what) in moves {
            let example = example % examples;
            match Pool::ALL.get(what) {
                Some(pool) if !deck.is_resting(example) => deck.file(example, *pool),
                Some(_) => {}
                None => prop_assert_eq!(deck.rest(example), resting.insert(example)),
            }
            deck.check().map_err(TestCaseError::fail)?;
            let sizes: u32 = Pool::ALL.iter().map(|pool| deck.len(*pool)).sum();
            prop_assert_eq!(sizes as usize + resting.len(), examples as usize);
            for pool in Pool::ALL {
                let drawn = deck.draw(pool, &mut rng);
                prop_assert!(drawn.is_none_or(|example| !resting.contains(&example)));
            }
            prop_assert!((0..examples).all(|one| deck.knows(one) && deck.is_resting(one) == resting.contains(&one)));
        }
        let ended: BTreeSet<u32> = deck.end_rests().into_iter().collect();
        prop_assert_eq!(&ended, &resting);
        prop_assert_eq!(deck.drawable(), examples);
        prop_assert!(ended.iter().all(|example| deck.pool_of(*example) == Pool::Normal));
    }
}
