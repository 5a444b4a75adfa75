//! The text of an answer while it is being sampled: stop sequences are found, and cut off.

use primerl_render::{Content, Message, RenderError, Renderer, StreamDecoder};

/// What sampled tokens add to an answer.
#[derive(Clone, Debug, PartialEq)]
pub enum Delta {
    Reasoning(String),
    Content(String),
    ToolCall {
        index: usize,
        id: String,
        name: String,
        /// JSON text.
        arguments: String,
    },
}

/// Looks for stop sequences in tokens as they come.
pub struct StopFinder<'a> {
    decoder: StreamDecoder<'a>,
    stop: &'a [String],
    /// The end of the text: what a sequence may begin in.
    tail: String,
    longest: usize,
    tokens: usize,
}

impl<'a> StopFinder<'a> {
    pub fn new(renderer: &'a Renderer, stop: &'a [String]) -> StopFinder<'a> {
        StopFinder {
            decoder: renderer.tokenizer().decode_stream(true),
            stop,
            tail: String::new(),
            longest: stop.iter().map(String::len).max().unwrap_or(0),
            tokens: 0,
        }
    }

    /// The number of tokens through the one that completes a sequence, once there is one.
    pub fn push(&mut self, ids: &[u32]) -> Result<Option<usize>, RenderError> {
        for &id in ids {
            self.tokens += 1;
            self.tail.push_str(&self.decoder.push(id)?);
            if first_stop(&self.tail, self.stop).is_some() {
                return Ok(Some(self.tokens));
            }
            let mut cut = self.tail.len().saturating_sub(self.longest);
            while !self.tail.is_char_boundary(cut) {
                cut -= 1;
            }
            self.tail.drain(..cut);
        }
        Ok(None)
    }
}

/// Where the first stop sequence begins, and which it is.
fn first_stop<'s>(text: &str, stop: &'s [String]) -> Option<(usize, &'s String)> {
    let found = |sequence: &'s String| text.find(sequence.as_str()).map(|at| (at, sequence));
    stop.iter().filter_map(found).min_by_key(|(at, _)| *at)
}

/// Cut a message off before its first stop sequence; the result is that sequence.
pub fn cut_message(message: &mut Message, stop: &[String]) -> Option<String> {
    let texts = [
        match &mut message.content {
            Content::Text(text) => Some(text),
            _ => None,
        },
        message.reasoning_content.as_mut(),
    ];
    texts.into_iter().flatten().find_map(|text| {
        let (at, sequence) = first_stop(text, stop)?;
        text.truncate(at);
        Some(sequence.clone())
    })
}

/// Cuts a text that comes in pieces off before its first stop sequence.
#[derive(Debug)]
pub struct StopCut {
    stop: Vec<String>,
    /// May be the beginning of a sequence.
    held: String,
    ended: bool,
}

impl StopCut {
    pub fn new(stop: &[String]) -> StopCut {
        StopCut {
            stop: stop.to_vec(),
            held: String::new(),
            ended: false,
        }
    }

    /// What may be shown now.
    pub fn push(&mut self, text: String) -> String {
        if self.stop.is_empty() {
            return text;
        }
        if self.ended {
            return String::new();
        }
        self.held.push_str(&text);
        if let Some((at, _)) = first_stop(&self.held, &self.stop) {
            self.ended = true;
            self.held.truncate(at);
            return std::mem::take(&mut self.held);
        }
        let begins_a_stop =
            |from: &usize| self.stop.iter().any(|s| s.starts_with(&self.held[*from..]));
        let from = self
            .held
            .char_indices()
            .map(|(at, _)| at)
            .find(begins_a_stop)
            .unwrap_or(self.held.len());
        let rest = self.held.split_off(from);
        std::mem::replace(&mut self.held, rest)
    }

    /// What was held back for nothing.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_beginning_of_a_stop_is_held_back() {
        let mut cut = StopCut::new(&["<end>".into(), "xx".into()]);
        assert_eq!(cut.push("a<e".into()), "a");
        assert_eq!(cut.push("q".into()), "<eq");
        assert_eq!(cut.push("x".into()), "");
        assert_eq!(cut.push("yé<en".into()), "xyé");
        assert_eq!(cut.push("d> more".into()), "");
        assert_eq!(cut.push("more".into()), "");
        assert_eq!(cut.finish(), "");
    }

    proptest! {
        /// However the text is split, what is shown is what lies before the first sequence.
        #[test]
        fn pieces_add_up(pieces in prop::collection::vec("[ab<é]{0,4}", 0..12), stop in prop::collection::vec("[ab<é]{1,3}", 0..3)) {
            let text = pieces.concat();
            let expected = first_stop(&text, &stop).map_or(text.as_str(), |(at, _)| &text[..at]);
            let mut cut = StopCut::new(&stop);
            let mut shown: String = pieces.into_iter().map(|piece| cut.push(piece)).collect();
            shown.push_str(&cut.finish());
            prop_assert_eq!(shown, expected);
        }
    }
}
