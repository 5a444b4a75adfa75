//! Token ids as JSON. A prompt of 128,000 tokens is most of a request's cost, so its numbers are written by hand, and
//! the ids of recorded turns only once.

use super::body::RequestBody;
use bytes::Bytes;
use foldhash::HashMap;
use parking_lot::Mutex;
use primerl_core::conversation::History;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};

/// Largest size of the cached text, bytes over all conversations. The oldest is dropped first, and written again when
/// it is needed.
const KEPT_BYTES: usize = 32 << 20;
/// Most vocabularies have six digits; plus a comma.
const LONGEST: usize = 7;

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

    /// `before`, then `[id,id,...]`, then `after`.
    pub fn write_json(&self, written: &WrittenIds, before: &str, after: &[u8]) -> RequestBody {
        let mut body = RequestBody::default();
        let mut own = Vec::with_capacity(self.suffix.len() * LONGEST + after.len() + 1);
        body.push(Bytes::from([before.as_bytes(), b"["].concat()));
        let mut history = written.of(self.history);
        write_ids(self.suffix, &mut own);
        // Behind the last id there is no comma.
        if own.pop().is_none()
            && let Some(last) = history.last_mut()
        {
            last.truncate(last.len() - 1);
        }
        own.push(b']');
        own.extend_from_slice(after);
        for piece in history {
            body.push(piece);
        }
        body.push(own.into());
        body
    }
}

/// The text of recorded ids. A conversation's prompts repeat them in every turn.
#[derive(Debug, Default)]
pub struct WrittenIds(Mutex<Kept>);

/// Held for look-ups and inserts.
#[derive(Debug, Default)]
struct Kept {
    /// By the address of the conversation's first ids.
    texts: HashMap<usize, Entry>,
    /// In the order in which they came.
    order: VecDeque<usize>,
    /// Sum of the entries' sizes.
    bytes: usize,
}

#[derive(Debug, Default)]
struct Entry {
    /// Held while new ids are written to it.
    text: Arc<Mutex<Text>>,
    /// Size that was last reported.
    bytes: usize,
}

/// The ids of a conversation's last prompt. The next one begins with all or some of them.
#[derive(Debug, Default)]
struct Text {
    pieces: Vec<Piece>,
    /// Each is more than twice as long as the next: there are few of them, and merged ones were copied only a few
    /// times.
    chunks: Vec<Bytes>,
}

#[derive(Debug)]
struct Piece {
    /// Prevents other ids from getting the address of these while their text is kept.
    ids: Weak<[u32]>,
    /// Where their text ends.
    end: usize,
}

impl Kept {
    fn of(&mut self, address: usize) -> Arc<Mutex<Text>> {
        let entry = self.texts.entry(address).or_insert_with(|| {
            self.order.push_back(address);
            Entry::default()
        });
        Arc::clone(&entry.text)
    }

    fn resize(&mut self, address: usize, bytes: usize) {
        // The entry may be gone by now, with everything it had grown to.
        let Some(entry) = self.texts.get_mut(&address) else {
            return;
        };
        self.bytes = self.bytes - entry.bytes + bytes;
        entry.bytes = bytes;
        while self.bytes > KEPT_BYTES
            && let Some(oldest) = self.order.pop_front()
        {
            let gone = self.texts.remove(&oldest);
            self.bytes -= gone.map_or(0, |gone| gone.bytes);
        }
    }
}

impl Text {
    /// Extends the text to that of these ids, each with a comma; existing text stays. Returns whether anything changed.
    fn become_that_of(&mut self, chunks: &[Arc<[u32]>]) -> bool {
        let same = |(piece, ids): &(&Piece, &Arc<[u32]>)| {
            std::ptr::addr_eq(piece.ids.as_ptr(), Arc::as_ptr(ids))
        };
        let common = self.pieces.iter().zip(chunks).take_while(same).count();
        if common == self.pieces.len() && common == chunks.len() {
            return false;
        }
        let last = common.checked_sub(1);
        let end = last.map_or(0, |last| self.pieces[last].end);
        self.pieces.truncate(common);
        self.truncate(end);
        let new = &chunks[common..];
        let ids: usize = new.iter().map(|ids| ids.len()).sum();
        let mut text = Vec::with_capacity(ids * LONGEST);
        for ids in new {
            write_ids(ids, &mut text);
            self.pieces.push(Piece {
                ids: Arc::downgrade(ids),
                end: end + text.len(),
            });
        }
        self.push(text.into());
        true
    }

    fn len(&self) -> usize {
        self.pieces.last().map_or(0, |last| last.end)
    }

    fn truncate(&mut self, len: usize) {
        let mut before = 0;
        self.chunks.retain_mut(|chunk| {
            chunk.truncate(len - before);
            before += chunk.len();
            !chunk.is_empty()
        });
    }

    fn push(&mut self, mut chunk: Bytes) {
        if chunk.is_empty() {
            return;
        }
        while let Some(last) = self.chunks.pop_if(|last| last.len() <= 2 * chunk.len()) {
            chunk = [last, chunk].concat().into();
        }
        self.chunks.push(chunk);
    }
}

impl WrittenIds {
    /// The text of each id and a comma.
    fn of(&self, history: &History) -> Vec<Bytes> {
        let Some(first) = history.chunks().first() else {
            return Vec::new();
        };
        let address = Arc::as_ptr(first).cast::<u32>() as usize;
        let entry = self.0.lock().of(address);
        let mut text = entry.lock();
        let changed = text.become_that_of(history.chunks());
        let (chunks, bytes) = (text.chunks.clone(), text.len());
        drop(text);
        if changed {
            self.0.lock().resize(address, bytes);
        }
        chunks
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
        // Leading zeros are bytes of 0x30 from the lowest on; the last digit stays.
        let zeros = ((eight ^ 0x3030_3030_3030_3030).trailing_zeros() / 8).min(7) as usize;
        let mut text = [b','; 9];
        text[..8].copy_from_slice(&(eight >> (8 * zeros)).to_le_bytes());
        text[8 - zeros] = b',';
        // The copy has a fixed length, so that it is two stores; the excess is removed afterwards.
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
        let body = PromptIds { history, suffix }.write_json(kept, "x", b"y");
        let pieces = body.pieces().count();
        assert!(pieces < 20, "{pieces} pieces of few turns");
        String::from_utf8(body.concatenated()).expect("is text")
    }

    fn plain(suffix: &[u32]) -> String {
        written(&WrittenIds::default(), &History::default(), suffix)
    }

    proptest! {
        #[test]
        fn they_are_what_json_writes(ids in prop::collection::vec(prop_oneof![0_u32..20, 0_u32..200_000, any::<u32>()], 0..40)) {
            prop_assert_eq!(plain(&ids), format!("x{}y", serde_json::json!(ids)));
        }
    }

    #[test]
    fn each_length_is_written() {
        let mut ids = vec![0, u32::MAX];
        ids.extend((0..10).flat_map(|power| {
            let ten = 10_u32.pow(power);
            [ten - 1, ten, ten + 1]
        }));
        assert_eq!(plain(&ids), format!("x{}y", serde_json::json!(ids)));
    }

    #[test]
    fn recorded_turns_are_written_once_and_what_is_gone_is_not_taken_for_them() {
        let kept = WrittenIds::default();
        for round in 0..50 {
            let mut conversation = Conversation::default();
            let mut all = vec![Vec::new()];
            for index in 0..20_u32 {
                // Memory that was freed and allocated again may hold ids of one round at the address of others.
                let prompt: Vec<u32> = (0..30).map(|id| id + round * 1000 + index).collect();
                let sampled: Vec<u32> = (0..20).map(|id| id + round * 77 + index).collect();
                // Every third turn, another branch.
                let parent = index.checked_sub(1 + 2 * u32::from(index % 3 == 2));
                let mut ids: Vec<u32> = all[parent.map_or(0, |parent| parent as usize + 1)].clone();
                ids.extend(prompt.iter().chain(&sampled));
                conversation.record(TurnIndex(index), &turn(parent, &prompt, &sampled, 0));
                let history = conversation.history(TurnIndex(index));
                all.push(ids.clone());
                ids.push(5);
                for _again in 0..2 {
                    assert_eq!(
                        written(&kept, &history, &[5]),
                        format!("x{}y", serde_json::json!(ids))
                    );
                }
            }
            assert!(kept.0.lock().bytes > 0);
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
        let bytes = |entry: &Entry| {
            entry
                .text
                .lock()
                .chunks
                .iter()
                .map(Bytes::len)
                .sum::<usize>()
        };
        assert_eq!(kept.bytes, kept.texts.values().map(bytes).sum::<usize>());
        assert!(!kept.texts.is_empty());
    }
}
