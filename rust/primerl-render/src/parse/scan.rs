//! Where an object or a list ends in text that is still growing. Only brackets and strings are looked at.

/// Finds the closing bracket; it reads each byte once.
#[derive(Clone, Copy, Debug)]
pub(super) struct BracketScan {
    /// Bytes looked at so far.
    at: usize,
    depth: usize,
    quote: Option<u8>,
    is_escaped: bool,
    /// Python: parentheses, too, and strings in single quotes.
    is_python: bool,
}

impl BracketScan {
    /// Begins at `at`, the opening bracket.
    pub fn new(at: usize, is_python: bool) -> Self {
        Self {
            at,
            depth: 0,
            quote: None,
            is_escaped: false,
            is_python,
        }
    }

    /// The place after the closing bracket.
    pub fn end(&mut self, text: &str) -> Option<usize> {
        for &byte in &text.as_bytes()[self.at..] {
            self.at += 1;
            match (byte, self.quote) {
                _ if self.is_escaped => self.is_escaped = false,
                (b'\\', Some(_)) => self.is_escaped = true,
                (byte, Some(quote)) if byte == quote => self.quote = None,
                (_, Some(_)) => {}
                (b'"', None) => self.quote = Some(byte),
                (b'\'', None) if self.is_python => self.quote = Some(byte),
                (b'(', None) if self.is_python => self.depth += 1,
                (b'[' | b'{', None) => self.depth += 1,
                (b')', None) if !self.is_python => {}
                (b']' | b')' | b'}', None) => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(self.at);
                    }
                }
                _ => {}
            }
        }
        None
    }
}
