//! Which of a few things comes next, where each is moved about far more often than it comes.

use primerl_core::Time;

/// The time of each thing and the number by which equal times are ordered, in a tree of minima: a change costs a
/// comparison a level, and no memory is moved.
#[derive(Clone, Debug)]
pub struct Soonest {
    /// Node 1 is the root, node i has the children 2i and 2i + 1, the leaves are the things in order.
    nodes: Vec<(Time, u64, usize)>,
    leaves: usize,
}

const NEVER: (Time, u64, usize) = (Time(u64::MAX), u64::MAX, usize::MAX);

impl Soonest {
    pub fn new(things: usize) -> Self {
        let leaves = things.next_power_of_two();
        Soonest {
            nodes: vec![NEVER; 2 * leaves],
            leaves,
        }
    }

    pub fn set(&mut self, thing: usize, at: Option<(Time, u64)>) {
        let mut node = self.leaves + thing;
        self.nodes[node] = at.map_or(NEVER, |(at, number)| (at, number, thing));
        while node > 1 {
            node /= 2;
            self.nodes[node] = self.nodes[2 * node].min(self.nodes[2 * node + 1]);
        }
    }

    pub fn at(&self, thing: usize) -> Option<Time> {
        let set = Some(self.nodes[self.leaves + thing]).filter(|node| *node != NEVER);
        set.map(|(at, _, _)| at)
    }

    /// Time, number and thing.
    pub fn first(&self) -> Option<(Time, u64, usize)> {
        Some(self.nodes[1]).filter(|node| *node != NEVER)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soonest_comes_first_and_equal_times_by_number() {
        let mut soonest = Soonest::new(5);
        assert_eq!(soonest.first(), None);
        soonest.set(4, Some((Time(7), 1)));
        soonest.set(0, Some((Time(9), 2)));
        soonest.set(2, Some((Time(7), 0)));
        assert_eq!(soonest.first(), Some((Time(7), 0, 2)));
        soonest.set(2, Some((Time(8), 3)));
        assert_eq!(soonest.first(), Some((Time(7), 1, 4)));
        soonest.set(4, None);
        assert_eq!(
            (soonest.first(), soonest.at(4)),
            (Some((Time(8), 3, 2)), None)
        );
        soonest.set(2, None);
        soonest.set(0, None);
        assert_eq!(soonest.first(), None);
        assert_eq!(Soonest::new(1).first(), None);
    }
}
