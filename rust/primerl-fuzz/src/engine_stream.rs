//! An engine's server-sent events, in pieces: the first bytes say where they are cut.

use primerl_engines::testing::{assemble, whole};

const CUTS: usize = 4;

pub fn fuzz(data: &[u8]) {
    // Engines also answer in one piece.
    let _ = whole(data);
    let (cuts, stream) = data.split_at(data.len().min(CUTS));
    let mut places: Vec<usize> = cuts
        .iter()
        .map(|cut| usize::from(*cut) * (stream.len() + 1) / 256)
        .collect();
    places.sort_unstable();
    let mut pieces = Vec::new();
    let mut begin = 0;
    for place in places {
        pieces.push(&stream[begin..place]);
        begin = place;
    }
    pieces.push(&stream[begin..]);
    let (uncut, cut) = (assemble(&[stream]), assemble(&pieces));
    // A stream that is wrong may be so only for those who look in between.
    if let (Ok(uncut), Ok(cut)) = (uncut, cut) {
        assert_eq!(uncut, cut, "the cuts change the answer");
    }
}
