//! Maps by a number of our own. The standard hash guards against keys that an enemy chooses, and costs several times
//! what the rest of a look-up does.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Its order is arbitrary, and always the same for the same numbers.
pub type NumberMap<K, V> = HashMap<K, V, BuildHasherDefault<NumberHasher>>;

/// Multiplication by 2^64 over the golden ratio, its well mixed upper half turned down to where maps take their bucket.
#[derive(Clone, Debug, Default)]
pub struct NumberHasher(u64);

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.write_u64(u64::from(number));
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }
}
