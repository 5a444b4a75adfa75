//! A permutation that is the identity until it is changed, and stores only what was.

use serde::{Deserialize, Serialize, Serializer};
use std::collections::{BTreeMap, HashMap};

/// Entries are stored by pages: neighbours share a look-up, and a list that was changed everywhere costs what an
/// array does (a flat map costs four times that).
const PAGE: u32 = 32;

type Page = Box<[u32; PAGE as usize]>;

/// A list of which entry i is i until another value is set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Sparse {
    /// Only looked up, never walked, so its order decides nothing.
    #[serde(serialize_with = "by_key")]
    pages: HashMap<u32, Page>,
}

impl Sparse {
    fn get(&self, index: u32) -> u32 {
        match self.pages.get(&(index / PAGE)) {
            Some(page) => page[(index % PAGE) as usize],
            None => index,
        }
    }

    fn set(&mut self, index: u32, value: u32) {
        let first = index - index % PAGE;
        let identity = || Box::new(std::array::from_fn(|offset| first + offset as u32));
        let page = self.pages.entry(index / PAGE).or_insert_with(identity);
        page[(index % PAGE) as usize] = value;
    }
}

/// Writes a map in the order of its keys, so that equal states have equal bytes.
pub(super) fn by_key<S: Serializer, T: Serialize>(
    map: &HashMap<u32, T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    map.iter().collect::<BTreeMap<_, _>>().serialize(serializer)
}

/// Examples in an order that swaps change, with the way back from an example to its position.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Permutation {
    examples: Sparse,
    positions: Sparse,
}

impl Permutation {
    pub fn example_at(&self, position: u32) -> u32 {
        self.examples.get(position)
    }

    pub fn position_of(&self, example: u32) -> u32 {
        self.positions.get(example)
    }

    pub fn swap(&mut self, one: u32, other: u32) {
        if one == other {
            return;
        }
        let (was_at_one, was_at_other) = (self.example_at(one), self.example_at(other));
        self.examples.set(one, was_at_other);
        self.examples.set(other, was_at_one);
        self.positions.set(was_at_other, one);
        self.positions.set(was_at_one, other);
    }

    #[cfg(test)]
    pub fn stored(&self) -> usize {
        (self.examples.pages.len() + self.positions.pages.len()) * PAGE as usize
    }
}
