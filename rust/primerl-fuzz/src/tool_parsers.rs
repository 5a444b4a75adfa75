//! A sampled text through the parser of one family: the first byte says which.

use primerl_render::testing::fuzz::ENTRIES;

pub fn fuzz(data: &[u8]) {
    if let Some((family, text)) = data.split_first() {
        let (_, parse) = ENTRIES[usize::from(*family) % ENTRIES.len()];
        parse(text);
    }
}
