//! Llama 3.2 and 4, LFM 2: `[f(a=1), g()]` as the whole answer, or between markers.

use super::arguments::Arguments;
use super::cut::Cut;
use super::markers::{Starts, skip_blank, starts};
use super::python_literal::Reader;
use super::{Begins, Call, CallGrammar, CallProblem, Progress};
use std::ops::Range;

const PAIRS: [[&str; 2]; 2] = [
    ["<|python_start|>", "<|python_end|>"],
    ["<|tool_call_start|>", "<|tool_call_end|>"],
];
const OPENERS: [&str; 2] = [PAIRS[0][0], PAIRS[1][0]];
pub(super) const MARKERS: [&str; 4] = [PAIRS[0][0], PAIRS[0][1], PAIRS[1][0], PAIRS[1][1]];

#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    List {
        start: usize,
        scan: BracketScan,
    },
    /// After the calls, where the closing marker may be.
    AfterList,
}

/// The state of one answer.
pub(super) struct Pythonic {
    place: Place,
    /// Which of [`PAIRS`] announced the calls.
    pair: Option<usize>,
    searched: usize,
}

impl Pythonic {
    pub fn new() -> Self {
        Self {
            place: Place::Start,
            pair: None,
            searched: 0,
        }
    }

    // `None`: more text decides.
    fn start(&mut self, cut: &mut Cut, is_end: bool) -> Option<Progress> {
        let mut at = skip_blank(&cut.text, cut.position());
        self.pair = OPENERS
            .iter()
            .position(|open| cut.text[at..].starts_with(open));
        if let Some(pair) = self.pair {
            at = skip_blank(&cut.text, self.searched.max(at + OPENERS[pair].len()));
            self.searched = at;
        }
        match cut.text.as_bytes().get(at) {
            None if !is_end => None,
            Some(b'[') => {
                let scan = BracketScan::from(at);
                self.place = Place::List { start: at, scan };
                Some(Progress::More)
            }
            found => {
                let reason = match found {
                    None => CallProblem::CutOff,
                    Some(_) => CallProblem::Structure("no list follows the marker"),
                };
                cut.no_call(at, reason);
                Some(self.leave(false))
            }
        }
    }

    fn list(
        &mut self,
        cut: &mut Cut,
        start: usize,
        mut scan: BracketScan,
        is_end: bool,
    ) -> Option<Progress> {
        let (end, read) = match scan.end(&cut.text) {
            Some(end) => (end, read(&cut.text, start..end)),
            None if is_end => (cut.text.len(), Err(CallProblem::CutOff)),
            None => {
                self.place = Place::List { start, scan };
                return None;
            }
        };
        match read {
            Ok(calls) => {
                for (range, call) in calls {
                    cut.hide(range.start);
                    cut.call(range.end, call);
                }
                cut.hide(end);
                self.searched = end;
                self.place = Place::AfterList;
                Some(Progress::More)
            }
            Err(reason) => {
                // Without a marker it may be a list, or a link.
                let is_meant = self.pair.is_some() || begins_with_call(&cut.text[start..end]);
                match is_meant {
                    true => cut.no_call(end, reason),
                    false => cut.content(end),
                }
                Some(self.leave(false))
            }
        }
    }

    fn after_list(&mut self, cut: &mut Cut, is_end: bool) -> Option<Progress> {
        let Some(pair) = self.pair else {
            return Some(self.leave(true));
        };
        self.searched = skip_blank(&cut.text, self.searched);
        match starts(&cut.text[self.searched..], &[PAIRS[pair][1]], is_end) {
            Starts::With(_) => cut.hide(self.searched + PAIRS[pair][1].len()),
            Starts::Maybe => return None,
            Starts::No => {}
        }
        Some(self.leave(true))
    }

    fn leave(&mut self, after_call: bool) -> Progress {
        self.place = Place::Start;
        Progress::Done { after_call }
    }
}

impl CallGrammar for Pythonic {
    fn openers(&self) -> &'static [&'static str] {
        &OPENERS
    }

    fn begins_at_start(&self, text: &str, _is_end: bool) -> Begins {
        let Some(inner) = text.strip_prefix('[') else {
            return Begins::No;
        };
        match inner.trim_start().chars().next() {
            None => Begins::Unknown,
            Some(letter) if letter.is_alphabetic() || letter == '_' => Begins::Yes,
            Some(_) => Begins::No,
        }
    }

    fn advance(&mut self, cut: &mut Cut, is_end: bool) -> Progress {
        loop {
            let progress = match self.place {
                Place::Start => self.start(cut, is_end),
                Place::List { start, scan } => self.list(cut, start, scan, is_end),
                Place::AfterList => self.after_list(cut, is_end),
            };
            match progress {
                None => return Progress::More,
                Some(Progress::More) => {}
                Some(done) => return done,
            }
        }
    }
}

/// Finds the end of a Python list in text that is still growing.
#[derive(Clone, Copy, Debug)]
struct BracketScan {
    at: usize,
    depth: usize,
    quote: Option<u8>,
    is_escaped: bool,
}

impl BracketScan {
    fn from(at: usize) -> Self {
        Self {
            at,
            depth: 0,
            quote: None,
            is_escaped: false,
        }
    }

    fn end(&mut self, text: &str) -> Option<usize> {
        for &byte in &text.as_bytes()[self.at..] {
            self.at += 1;
            match (byte, self.quote) {
                _ if self.is_escaped => self.is_escaped = false,
                (b'\\', Some(_)) => self.is_escaped = true,
                (byte, Some(quote)) if byte == quote => self.quote = None,
                (_, Some(_)) => {}
                (b'"' | b'\'', None) => self.quote = Some(byte),
                (b'[' | b'(' | b'{', None) => self.depth += 1,
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

fn begins_with_call(list: &str) -> bool {
    let mut reader = Reader::new(list);
    reader.take("[") && !reader.name().is_empty() && reader.rest().starts_with('(')
}

/// The calls of a list and their places in `text`.
fn read(text: &str, list: Range<usize>) -> Result<Vec<(Range<usize>, Call)>, CallProblem> {
    let offset = list.start;
    let mut reader = Reader::new(&text[list]);
    let mut calls = Vec::new();
    reader.take("[");
    while !reader.take("]") {
        reader.blank();
        let start = reader.at;
        let call = read_call(&mut reader)?;
        calls.push((offset + start..offset + reader.at, call));
        reader.separator("]")?;
    }
    if calls.is_empty() {
        return Err(CallProblem::Structure("the list holds no call"));
    }
    Ok(calls)
}

fn read_call(reader: &mut Reader<'_>) -> Result<Call, CallProblem> {
    let name = reader.name();
    if name.is_empty() {
        return Err(CallProblem::NoName);
    }
    if !reader.take("(") {
        return Err(CallProblem::Structure("no parenthesis follows the name"));
    }
    Call::new(name, keywords(reader)?)
}

/// `a=1, b="c"` as the text of a JSON object.
pub(super) fn read_arguments(text: &str) -> Result<String, CallProblem> {
    let closed = format!("{text})");
    let mut reader = Reader::new(&closed);
    let arguments = keywords(&mut reader)?;
    match reader.rest().is_empty() {
        true => Ok(arguments),
        false => Err(CallProblem::Structure("text after the arguments")),
    }
}

fn keywords(reader: &mut Reader<'_>) -> Result<String, CallProblem> {
    let mut arguments = Arguments::default();
    while !reader.take(")") {
        let key = reader.name();
        if key.is_empty() || !reader.take("=") {
            return Err(CallProblem::Structure("an argument has no name"));
        }
        let mut value = String::new();
        reader.value(&mut value, 0)?;
        arguments.add_json(key, value);
        reader.separator(")")?;
    }
    Ok(arguments.into_json())
}
