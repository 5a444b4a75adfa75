//! Sampled ids, two bytes each, decoded one by one and all at once.

use crate::renderers::PLAIN_MODEL;

pub fn fuzz(data: &[u8]) {
    let (skip_special, data) = match data.split_first() {
        Some((first, data)) => (first % 2 == 0, data),
        None => return,
    };
    let tokenizer = PLAIN_MODEL.tokenizer();
    // Some have no token: a model may have more rows than its tokenizer.
    let ids: Vec<u32> = data
        .chunks_exact(2)
        .map(|pair| u32::from(u16::from_le_bytes([pair[0], pair[1]])) % 300)
        .collect();
    let Ok(whole) = tokenizer.decode(&ids, skip_special) else {
        return;
    };
    let mut stream = tokenizer.decode_stream(skip_special);
    let mut text = String::new();
    for id in &ids {
        text += &stream
            .push(*id)
            .expect("what decodes whole decodes in pieces");
    }
    text += &stream.finish().expect("and at the end");
    assert_eq!(text, whole, "{ids:?}");
}
