//! Finding markers in text that is still growing.

/// Where the next marker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// Marker `which` begins at `at`.
    At { at: usize, which: usize },
    /// No marker begins before this place; at it, one may begin with the text to come.
    NotBefore(usize),
}

/// The first marker at or after `from`. At the end of the answer no beginning of a marker counts.
pub(super) fn find(text: &str, from: usize, markers: &[&str], is_end: bool) -> Found {
    let bytes = text.as_bytes();
    let mut at = from;
    while at < bytes.len() {
        // All markers begin with one of a few ASCII bytes, which the common text has not.
        let begins = |byte: &u8| markers.iter().any(|marker| marker.as_bytes()[0] == *byte);
        let Some(offset) = bytes[at..].iter().position(begins) else {
            break;
        };
        at += offset;
        let rest = &bytes[at..];
        if let Some(which) = markers
            .iter()
            .position(|marker| rest.starts_with(marker.as_bytes()))
        {
            return Found::At { at, which };
        }
        if !is_end && markers.iter().any(|m| m.as_bytes().starts_with(rest)) {
            return Found::NotBefore(at);
        }
        at += 1;
    }
    Found::NotBefore(bytes.len())
}

/// Whether `text` begins with a marker, or may with more text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Starts {
    With(usize),
    Maybe,
    No,
}

/// Which of `markers` the text begins with.
pub(super) fn starts(text: &str, markers: &[&str], is_end: bool) -> Starts {
    if let Some(which) = markers.iter().position(|marker| text.starts_with(marker)) {
        Starts::With(which)
    } else if !is_end && markers.iter().any(|marker| marker.starts_with(text)) {
        Starts::Maybe
    } else {
        Starts::No
    }
}

/// The first place at or after `from` that is not white space.
pub(super) fn skip_blank(text: &str, from: usize) -> usize {
    let rest = &text[from..];
    from + rest.len() - rest.trim_start().len()
}
