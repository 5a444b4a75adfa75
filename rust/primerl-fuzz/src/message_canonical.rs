//! One message: the bytes and words by which a conversation recognises it.

use primerl_render::{Message, answer_words, canonical, canonical_json, reasoning_words};
use serde_json::Value;

pub fn fuzz(data: &[u8]) {
    if let Ok(value) = serde_json::from_slice::<Value>(data) {
        let text = canonical_json(&value);
        let again: Value = serde_json::from_str(&text).expect("canonical JSON is JSON");
        assert_eq!(canonical_json(&again), text, "canonical JSON of itself");
    }
    let Ok(message) = serde_json::from_slice::<Message>(data) else {
        return;
    };
    let written = serde_json::to_vec(&message).expect("a message is JSON");
    let again: Message = serde_json::from_slice(&written).expect("what was written is read");
    assert_eq!(canonical(&again), canonical(&message));
    assert_eq!(answer_words(&again), answer_words(&message));
    assert_eq!(reasoning_words(&again), reasoning_words(&message));
}
