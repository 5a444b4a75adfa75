//! Random numbers that belong to one rollout or group: 8 bytes of state, where a cipher's generator has hundreds.

use rand::RngCore;

/// SplitMix64 (Steele, Lea and Flood 2014), begun at a number mixed from seed, owner and purpose.
#[derive(Clone, Debug)]
pub struct Stream(u64);

impl Stream {
    /// Streams of different owners or purposes have nothing to do with each other.
    pub fn new(seed: u64, owner: u64, purpose: u64) -> Self {
        Stream(mix(mix(mix(seed) ^ owner) ^ purpose))
    }
}

const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(STEP);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

impl RngCore for Stream {
    fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    fn next_u64(&mut self) -> u64 {
        let number = mix(self.0);
        self.0 = self.0.wrapping_add(STEP);
        number
    }

    fn fill_bytes(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let number = self.next_u64().to_le_bytes();
            chunk.copy_from_slice(&number[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::Rng;

    #[test]
    fn streams_are_uniform_and_differ() {
        let mut mean = 0.0;
        for owner in 0..20_000 {
            mean += Stream::new(1, owner, 0).random::<f64>() / 20_000.0;
        }
        assert!((mean - 0.5).abs() < 0.01, "{mean}");
        let first = |seed, owner, purpose| Stream::new(seed, owner, purpose).next_u64();
        let all = [
            first(1, 2, 3),
            first(1, 3, 2),
            first(2, 1, 3),
            first(1, 2, 4),
        ];
        assert!(
            (1..4).all(|index| !all[..index].contains(&all[index])),
            "{all:?}"
        );
    }
}
