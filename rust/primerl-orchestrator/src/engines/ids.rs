//! Token ids as JSON. A prompt of 128,000 tokens is most of what a request costs, so its numbers are written by hand.

use primerl_core::conversation::History;

/// The ids of a prompt, in pieces.
#[derive(Clone, Copy, Debug)]
pub struct PromptIds<'a> {
    pub history: &'a History,
    pub suffix: &'a [u32],
}

impl PromptIds<'_> {
    pub fn len(&self) -> usize {
        self.history.len() + self.suffix.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends `[id,id,...]`.
    pub fn write_json(&self, out: &mut Vec<u8>) {
        // Most vocabularies have six digits.
        out.reserve(self.len() * 7 + 16);
        out.push(b'[');
        for chunk in self.history.chunks() {
            write_ids(chunk, out);
        }
        write_ids(self.suffix, out);
        if out.last() == Some(&b',') {
            out.pop();
        }
        out.push(b']');
    }
}

/// The four digits of each number below 10,000, first digit in the lowest byte.
static DIGITS: [u32; 10_000] = digits();

const fn digits() -> [u32; 10_000] {
    let mut table = [0; 10_000];
    let mut number = 0;
    while number < 10_000 {
        let n = number as u32;
        table[number] = 0x3030_3030
            + (n / 1000)
            + ((n / 100 % 10) << 8)
            + ((n / 10 % 10) << 16)
            + ((n % 10) << 24);
        number += 1;
    }
    table
}

/// Each id, followed by a comma.
fn write_ids(ids: &[u32], out: &mut Vec<u8>) {
    for &id in ids {
        if id >= 100_000_000 {
            out.extend_from_slice(id.to_string().as_bytes());
            out.push(b',');
            continue;
        }
        let high = DIGITS[(id / 10_000) as usize];
        let low = DIGITS[(id % 10_000) as usize];
        let eight = u64::from(high) | u64::from(low) << 32;
        // Zeros in front are bytes of 0x30 from the lowest on; the last digit stays.
        let zeros = ((eight ^ 0x3030_3030_3030_3030).trailing_zeros() / 8).min(7) as usize;
        let mut text = [b','; 9];
        text[..8].copy_from_slice(&(eight >> (8 * zeros)).to_le_bytes());
        text[8 - zeros] = b',';
        // Of fixed length, so that it is two stores; what is too much is taken back.
        out.extend_from_slice(&text);
        out.truncate(out.len() - zeros);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn written(ids: &[u32]) -> String {
        let ids = PromptIds {
            history: &History::default(),
            suffix: ids,
        };
        let mut out = b"x".to_vec();
        ids.write_json(&mut out);
        String::from_utf8(out).expect("is text")
    }

    proptest! {
        #[test]
        fn they_are_what_json_writes(ids in prop::collection::vec(prop_oneof![0_u32..20, 0_u32..200_000, any::<u32>()], 0..40)) {
            prop_assert_eq!(written(&ids), format!("x{}", serde_json::json!(ids)));
        }
    }

    #[test]
    fn each_length_is_written() {
        let mut ids = vec![0, u32::MAX];
        ids.extend((0..10).flat_map(|power| {
            let ten = 10_u32.pow(power);
            [ten - 1, ten, ten + 1]
        }));
        assert_eq!(written(&ids), format!("x{}", serde_json::json!(ids)));
    }
}
