//! Maps by index, of which only what was touched takes room.

use serde::{Deserialize, Serialize, Serializer};
use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// Its order decides nothing: it is looked up, and walked only where any order gives the same. Its hash is a few times cheaper than the standard one,
/// which guards against keys that an enemy chooses; these are our own.
pub(super) type IndexMap<T> = HashMap<u32, T, BuildHasherDefault<IndexHasher>>;

/// Multiplication by 2^64 over the golden ratio, its well mixed upper half turned down to where maps take their bucket.
#[derive(Clone, Debug, Default)]
pub(super) struct IndexHasher(u64);

impl Hasher for IndexHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32((self.0 as u32) ^ u32::from(*byte));
        }
    }

    fn write_u32(&mut self, index: u32) {
        self.0 = u64::from(index)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }
}

/// Writes a map in the order of its keys, so that equal states have equal bytes.
pub(super) fn by_key<S: Serializer, T: Serialize>(
    map: &IndexMap<T>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    map.iter().collect::<BTreeMap<_, _>>().serialize(serializer)
}

/// Entries are stored by pages of this many: the map of pages stays small enough for the processor's cache, and a list
/// that was changed everywhere costs what an array does.
pub(super) const PAGE: u32 = 128;

/// A list of which entry i is i until another value is set.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Sparse {
    #[serde(serialize_with = "by_key")]
    pages: IndexMap<Box<[u32]>>,
}

impl Sparse {
    pub fn get(&self, index: u32) -> u32 {
        match self.pages.get(&(index / PAGE)) {
            Some(page) => page[(index % PAGE) as usize],
            None => index,
        }
    }

    pub fn set(&mut self, index: u32, value: u32) {
        let first = index - index % PAGE;
        let identity = || (0..PAGE).map(|offset| first + offset).collect();
        let page = self.pages.entry(index / PAGE).or_insert_with(identity);
        page[(index % PAGE) as usize] = value;
    }

    /// How many entries take room.
    #[cfg(test)]
    pub fn stored(&self) -> usize {
        self.pages.len() * PAGE as usize
    }
}

/// Examples in an order that can be changed, with the way back from an example to its position.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(from = "Written")]
pub(super) struct Permutation {
    examples: Sparse,
    /// The inverse of `examples`.
    #[serde(skip_serializing)]
    positions: Sparse,
}

#[derive(Deserialize)]
struct Written {
    examples: Sparse,
}

impl From<Written> for Permutation {
    fn from(Written { examples }: Written) -> Self {
        let mut positions = Sparse::default();
        for (page, entries) in &examples.pages {
            for (offset, example) in entries.iter().enumerate() {
                let position = page * PAGE + offset as u32;
                if *example != position {
                    positions.set(*example, position);
                }
            }
        }
        Permutation {
            examples,
            positions,
        }
    }
}

impl Permutation {
    pub fn example_at(&self, position: u32) -> u32 {
        self.examples.get(position)
    }

    pub fn position_of(&self, example: u32) -> u32 {
        self.positions.get(example)
    }

    /// What was there before has to be put elsewhere.
    pub fn put(&mut self, position: u32, example: u32) {
        self.examples.set(position, example);
        self.positions.set(example, position);
    }

    #[cfg(test)]
    pub fn stored(&self) -> usize {
        self.examples.stored() + self.positions.stored()
    }
}
