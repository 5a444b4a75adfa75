//! The experts that an engine reports with an answer, in vLLM's format (`--enable-return-routed-experts`): the base64 of
//! a file of NumPy (`.npy`, version 1 to 3), `[rows, layers, chosen]` of `uint8` or `uint16`. Rows are those of the
//! tokens that the engine computed: the prompt's, from the request's `routed_experts_prompt_start` on, then the answer's
//! without its last.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use primerl_core::experts::{Experts, ExpertsShape};
use std::sync::Arc;

/// Most bytes that the experts of one token may take in an answer, as base64: 128 layers of 24 experts of two bytes.
pub(super) const BYTES_A_ROW: usize = 8 << 10;
const MAGIC: &[u8] = b"\x93NUMPY";

/// The rows that are wanted of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WantedExperts {
    /// 1: the first is of the token before the prompt's own part.
    pub before: u32,
    /// Tokens of the prompt's own part.
    pub prompt: usize,
}

impl WantedExperts {
    /// Most rows of an answer of so many tokens.
    fn most(&self, sampled: usize) -> usize {
        self.before as usize + self.prompt + sampled.saturating_sub(1)
    }

    /// The experts of an answer of which `sampled` tokens are kept; `None` where the engine reports none.
    pub(super) fn read(&self, text: &str, sampled: usize) -> Result<Option<Arc<Experts>>, String> {
        let file = STANDARD
            .decode(text)
            .map_err(|error| format!("routed_experts is not base64: {error}"))?;
        let (shape, rows, begin) = header(&file)?;
        let (size, found) = (shape.row(), file.len() - begin);
        if rows.checked_mul(size) != Some(found) {
            return Err(format!(
                "routed_experts has {found} bytes, and its header says {rows} tokens of {size} bytes"
            ));
        }
        let kept = rows.min(self.most(sampled)) * size;
        let mut ids = file;
        ids.truncate(begin + kept);
        ids.drain(..begin);
        Ok(Experts::new(self.before, shape, ids).map(Arc::new))
    }
}

/// Shape of a row, number of rows, and where the first begins.
fn header(file: &[u8]) -> Result<(ExpertsShape, usize, usize), String> {
    let (text, begin) = header_text(file).ok_or_else(broken)?;
    let bytes = match value(text, "descr").ok_or_else(broken)? {
        "'|u1'" => 1,
        "'<u2'" => 2,
        other => {
            return Err(format!(
                "routed_experts is of {other}, not of uint8 or uint16"
            ));
        }
    };
    if value(text, "fortran_order") != Some("False") {
        return Err("routed_experts is in Fortran's order".into());
    }
    let (rows, layers, chosen) = sizes(value(text, "shape").ok_or_else(broken)?)?;
    let shape = ExpertsShape {
        layers,
        chosen,
        bytes,
    };
    Ok((shape, rows, begin))
}

fn broken() -> String {
    "routed_experts is not a file of NumPy".to_owned()
}

/// The header, and where the data begins.
fn header_text(file: &[u8]) -> Option<(&str, usize)> {
    let rest = file.strip_prefix(MAGIC)?;
    let (begin, length) = match rest {
        [1, _, low, high, ..] => (4, usize::from(u16::from_le_bytes([*low, *high]))),
        [2 | 3, _, a, b, c, d, ..] => (6, u32::from_le_bytes([*a, *b, *c, *d]) as usize),
        _ => return None,
    };
    let text = rest.get(begin..)?.get(..length)?;
    let text = std::str::from_utf8(text).ok()?;
    Some((text, MAGIC.len() + begin + length))
}

/// Rows, layers and experts of a shape in Python's form.
fn sizes(shape: &str) -> Result<(usize, u16, u16), String> {
    let sizes = shape.trim_matches(|letter| "()".contains(letter));
    let parsed: Result<Vec<usize>, _> = sizes.split(',').map(|size| size.trim().parse()).collect();
    let parsed = parsed.ok().and_then(|sizes| sizes.try_into().ok());
    let [rows, layers, chosen]: [usize; 3] = parsed.ok_or_else(|| {
        format!("routed_experts has the shape ({sizes}), not tokens, layers, experts")
    })?;
    let small = |size: usize| u16::try_from(size).ok().filter(|size| *size > 0);
    let (layers, chosen) = small(layers)
        .zip(small(chosen))
        .ok_or_else(|| format!("routed_experts has the shape ({sizes}), which no model has"))?;
    Ok((rows, layers, chosen))
}

/// What a dictionary of Python has by this name: up to the comma that ends it, or the bracket.
fn value<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("'{name}':"))?;
    let rest = rest.trim_start();
    let end = match rest.starts_with('(') {
        true => rest.find(')')? + 1,
        false => rest.find([',', '}'])?,
    };
    rest.get(..end).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// As `numpy.save` writes it.
    fn npy(descr: &str, shape: &str, data: &[u8]) -> String {
        let mut text =
            format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}");
        while (10 + text.len() + 1) % 64 != 0 {
            text.push(' ');
        }
        text.push('\n');
        let mut file = [MAGIC, &[1, 0], &(text.len() as u16).to_le_bytes()].concat();
        file.extend_from_slice(text.as_bytes());
        file.extend_from_slice(data);
        STANDARD.encode(file)
    }

    const WANTED: WantedExperts = WantedExperts {
        before: 1,
        prompt: 2,
    };

    #[test]
    fn rows_are_those_of_the_kept_tokens() {
        let data: Vec<u8> = (0..16).collect();
        let text = npy("|u1", "(4, 2, 2)", &data);
        let read = |sampled| {
            WANTED
                .read(&text, sampled)
                .expect("reads")
                .expect("is known")
        };
        let experts = read(2);
        assert_eq!((experts.before, experts.rows()), (1, 4));
        assert_eq!(experts.first(4), data);
        // A stop sequence ended the answer a token earlier.
        assert_eq!(read(1).first(9), &data[..12]);
        // The engine stopped reporting earlier.
        assert_eq!(read(9).rows(), 4);
        let none = npy("<u2", "(0, 2, 2)", &[]);
        assert_eq!(WANTED.read(&none, 2), Ok(None));
        let wide = npy("<u2", "(1, 1, 2)", &[1, 2, 0, 1]);
        let wide = WANTED.read(&wide, 2).expect("reads").expect("is known");
        assert_eq!((wide.shape.bytes, wide.first(1)), (2, &[1, 2, 0, 1][..]));
    }

    #[test]
    fn anything_else_is_refused_in_one_sentence() {
        for (text, why) in [
            ("?".to_owned(), "not base64"),
            (STANDARD.encode("PK"), "not a file of NumPy"),
            (npy("<i4", "(1, 1, 1)", &[0; 4]), "'<i4'"),
            (npy("|u1", "(2, 2)", &[0; 4]), "not tokens, layers, experts"),
            (npy("|u1", "(1, 0, 2)", &[]), "which no model has"),
            (npy("|u1", "(1, 70000, 2)", &[]), "which no model has"),
            (npy("|u1", "(2, 1, 2)", &[0; 3]), "has 3 bytes"),
        ] {
            let refused = WANTED.read(&text, 2).expect_err(why);
            assert!(refused.contains(why), "{refused}");
        }
    }

    proptest! {
        #[test]
        fn no_bytes_are_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), begins in any::<bool>()) {
            let mut file = if begins { [MAGIC, &[1, 0]].concat() } else { Vec::new() };
            file.extend(bytes);
            let _ = WANTED.read(&STANDARD.encode(file), 3);
        }
    }
}
