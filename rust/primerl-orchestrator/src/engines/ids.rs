//! Token ids as JSON. A prompt of 128,000 tokens is most of what a request costs, so its numbers are written by hand, and
//! those of recorded turns only once.

use parking_lot::Mutex;
use primerl_core::conversation::History;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Weak};

/// Text that is kept, bytes over all conversations. The oldest goes first, and is written anew when it is needed.
const KEPT_BYTES: usize = 32 << 20;
/// Shorter pieces are written faster than they are looked up.
const SHORTEST_KEPT: usize = 16;

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
    pub fn write_json(&self, written: &WrittenIds, out: &mut Vec<u8>) {
        // Most vocabularies have six digits.
        out.reserve(self.len() * 7 + 16);
        out.push(b'[');
        written.write(self.history, out);
        write_ids(self.suffix, out);
        if out.last() == Some(&b',') {
            out.pop();
        }
        out.push(b']');
    }
}

/// The text of recorded ids. A conversation's prompts repeat them at every turn.
#[derive(Debug, Default)]
pub struct WrittenIds(Mutex<Kept>);

/// Held for look-ups and inserts.
#[derive(Debug, Default)]
struct Kept {
    /// By the address of the ids.
    texts: HashMap<usize, Text>,
    /// In the order in which they came.
    order: VecDeque<usize>,
    bytes: usize,
}

#[derive(Debug)]
struct Text {
    /// Keeps others from coming to lie at the address of these ids, for as long as the text is kept.
    _of: Weak<[u32]>,
    text: Arc<[u8]>,
}

impl Kept {
    fn get(&self, ids: &Arc<[u32]>) -> Option<Arc<[u8]>> {
        let kept = self.texts.get(&address(ids))?;
        Some(Arc::clone(&kept.text))
    }

    fn insert(&mut self, ids: &Arc<[u32]>, text: Arc<[u8]>) {
        self.bytes += text.len();
        let _of = Arc::downgrade(ids);
        match self.texts.insert(address(ids), Text { _of, text }) {
            Some(before) => self.bytes -= before.text.len(),
            None => self.order.push_back(address(ids)),
        }
        while self.bytes > KEPT_BYTES
            && let Some(oldest) = self.order.pop_front()
        {
            let gone = self.texts.remove(&oldest);
            self.bytes -= gone.map_or(0, |gone| gone.text.len());
        }
    }
}

fn address(ids: &Arc<[u32]>) -> usize {
    Arc::as_ptr(ids).cast::<u32>() as usize
}

impl WrittenIds {
    /// Appends each id and a comma.
    fn write(&self, history: &History, out: &mut Vec<u8>) {
        let is_kept = |ids: &Arc<[u32]>| ids.len() >= SHORTEST_KEPT;
        let kept: Vec<Option<Arc<[u8]>>> = {
            let kept = self.0.lock();
            let chunks = history.chunks().iter();
            chunks
                .map(|ids| is_kept(ids).then(|| kept.get(ids)).flatten())
                .collect()
        };
        let mut new = Vec::new();
        for (ids, kept) in history.chunks().iter().zip(kept) {
            match kept {
                Some(text) => out.extend_from_slice(&text),
                None => {
                    let begin = out.len();
                    write_ids(ids, out);
                    if is_kept(ids) {
                        new.push((ids, Arc::from(&out[begin..])));
                    }
                }
            }
        }
        if !new.is_empty() {
            let mut kept = self.0.lock();
            new.into_iter()
                .for_each(|(ids, text)| kept.insert(ids, text));
        }
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
    use primerl_core::TurnIndex;
    use primerl_core::conversation::Conversation;
    use primerl_core::testing::turn;
    use proptest::prelude::*;

    fn written(kept: &WrittenIds, history: &History, suffix: &[u32]) -> String {
        let mut out = b"x".to_vec();
        PromptIds { history, suffix }.write_json(kept, &mut out);
        String::from_utf8(out).expect("is text")
    }

    fn plain(suffix: &[u32]) -> String {
        written(&WrittenIds::default(), &History::default(), suffix)
    }

    proptest! {
        #[test]
        fn they_are_what_json_writes(ids in prop::collection::vec(prop_oneof![0_u32..20, 0_u32..200_000, any::<u32>()], 0..40)) {
            prop_assert_eq!(plain(&ids), format!("x{}", serde_json::json!(ids)));
        }
    }

    #[test]
    fn each_length_is_written() {
        let mut ids = vec![0, u32::MAX];
        ids.extend((0..10).flat_map(|power| {
            let ten = 10_u32.pow(power);
            [ten - 1, ten, ten + 1]
        }));
        assert_eq!(plain(&ids), format!("x{}", serde_json::json!(ids)));
    }

    #[test]
    fn recorded_turns_are_written_once_and_what_is_gone_is_not_taken_for_them() {
        let kept = WrittenIds::default();
        for round in 0..50 {
            let mut conversation = Conversation::default();
            let (mut parent, mut all) = (None, Vec::new());
            for index in 0..20 {
                // Freed and allocated again, ids of one round may lie where others did before.
                let prompt: Vec<u32> = (0..30).map(|id| id + round * 1000 + index).collect();
                let sampled: Vec<u32> = (0..20).map(|id| id + round * 77 + index).collect();
                all.extend(prompt.iter().chain(&sampled));
                conversation.record(TurnIndex(index), &turn(parent, &prompt, &sampled, 0));
                parent = Some(index);
                let history = conversation.history(TurnIndex(index));
                let mut expected = all.clone();
                expected.push(5);
                assert_eq!(
                    written(&kept, &history, &[5]),
                    format!("x{}", serde_json::json!(expected))
                );
            }
            assert!(kept.0.lock().texts.len() >= 40);
        }
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let kept = WrittenIds::default();
        let mut alive = Vec::new();
        for number in 0..40_u32 {
            let mut conversation = Conversation::default();
            let ids = vec![100_000 + number; 200_000];
            conversation.record(TurnIndex(0), &turn(None, &ids, &[7], 0));
            let history = conversation.history(TurnIndex(0));
            written(&kept, &history, &[]);
            alive.push(conversation);
        }
        let kept = kept.0.lock();
        assert!(kept.bytes <= KEPT_BYTES);
        assert_eq!(kept.texts.len(), kept.order.len());
        assert!(!kept.texts.is_empty());
    }
}
