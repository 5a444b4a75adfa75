//! Calls as one list after a marker, or as the whole answer: JSON (`[{"name": .., "arguments": {..}}]`) or Python
//! (`[f(a=1), g()]`).

use super::CallProblem;
use super::arguments::Arguments;
use super::cut::Cut;
use super::json::Keys;
use super::markers::{Starts, skip_blank, starts};
use super::protocol::{Begins, Call, CallGrammar, Step};
use super::python_literal::Reader;
use super::scan::BracketScan;
use std::ops::Range;

pub(super) struct ListSyntax {
    /// Markers around the list. The second may be missing in an answer, and is empty where there is none.
    pub pairs: &'static [[&'static str; 2]],
    pub items: Items,
    /// An answer may begin with a list that no marker announces.
    pub stands_alone: bool,
}

/// What a call of the list is.
#[derive(Clone, Copy)]
pub(super) enum Items {
    /// An object with these keys. A model that calls one tool may forget the list.
    Json(Keys),
    Python,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    List {
        start: usize,
        scan: BracketScan,
    },
    /// After the list, where the closing marker may be.
    AfterList,
}

/// The state of one answer.
pub(super) struct List {
    syntax: &'static ListSyntax,
    place: Place,
    /// Which of the pairs announced the calls.
    pair: Option<usize>,
    searched: usize,
}

impl List {
    pub fn new(syntax: &'static ListSyntax) -> Self {
        Self {
            syntax,
            place: Place::Start,
            pair: None,
            searched: 0,
        }
    }

    fn start(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        let mut at = skip_blank(&cut.text, cut.position());
        let begins = |[open, _]: &[&str; 2]| cut.text[at..].starts_with(open);
        self.pair = self.syntax.pairs.iter().position(begins);
        if let Some(pair) = self.pair {
            let after_marker = at + self.syntax.pairs[pair][0].len();
            at = skip_blank(&cut.text, self.searched.max(after_marker));
            self.searched = at;
        }
        let is_python = matches!(self.syntax.items, Items::Python);
        let problem = match cut.text.as_bytes().get(at) {
            None if !is_end => return Step::Wait,
            Some(b'[') => return self.enter(at, is_python),
            Some(b'{') if !is_python => return self.enter(at, is_python),
            None => CallProblem::CutOff,
            Some(_) => CallProblem::Structure("no list follows the marker"),
        };
        cut.no_call(at, problem);
        self.leave(false)
    }

    fn enter(&mut self, start: usize, is_python: bool) -> Step {
        let scan = BracketScan::new(start, is_python);
        self.place = Place::List { start, scan };
        Step::Next
    }

    fn list(&mut self, cut: &mut Cut, start: usize, mut scan: BracketScan, is_end: bool) -> Step {
        let end = scan.end(&cut.text);
        if end.is_none() && !is_end {
            self.place = Place::List { start, scan };
            return Step::Wait;
        }
        let has_call = match (self.syntax.items, end) {
            (Items::Python, end) => self.python_list(cut, start, end),
            (Items::Json(_), None) => {
                cut.no_call(cut.text.len(), CallProblem::CutOff);
                false
            }
            (Items::Json(keys), Some(end)) if cut.text[start..].starts_with('[') => {
                cut.call_list(start..end, keys)
            }
            (Items::Json(keys), Some(end)) => {
                let read = keys.call(&cut.text[start..end]);
                cut.call_or_text(end, read)
            }
        };
        if !has_call {
            return self.leave(false);
        }
        self.searched = cut.position();
        self.place = Place::AfterList;
        Step::Next
    }

    /// Cuts the list that begins at `start`; without an `end` the answer ends within it. Whether it holds calls.
    fn python_list(&self, cut: &mut Cut, start: usize, end: Option<usize>) -> bool {
        let read = match end {
            Some(end) => read_list(&cut.text, start..end),
            None => Err(CallProblem::CutOff),
        };
        let end = end.unwrap_or(cut.text.len());
        match read {
            Ok(calls) => {
                for (range, call) in calls {
                    cut.hide(range.start);
                    cut.call(range.end, call);
                }
                cut.hide(end);
                true
            }
            // Without a marker it may be a list, or a link.
            Err(_) if self.pair.is_none() && !begins_with_call(&cut.text[start..end]) => {
                cut.content(end);
                false
            }
            Err(reason) => {
                cut.no_call(end, reason);
                false
            }
        }
    }

    fn after_list(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        let close = self.pair.map_or("", |pair| self.syntax.pairs[pair][1]);
        if close.is_empty() {
            return self.leave(true);
        }
        self.searched = skip_blank(&cut.text, self.searched);
        match starts(&cut.text[self.searched..], &[close], is_end) {
            Starts::With(_) => cut.hide(self.searched + close.len()),
            Starts::Maybe => return Step::Wait,
            Starts::No => {}
        }
        self.leave(true)
    }

    fn leave(&mut self, after_call: bool) -> Step {
        self.place = Place::Start;
        Step::Done { after_call }
    }
}

impl CallGrammar for List {
    fn begins_at_start(&self, text: &str, _is_end: bool) -> Begins {
        match text.strip_prefix('[') {
            Some(inner) if self.syntax.stands_alone => begins_with_name(inner),
            _ => Begins::No,
        }
    }

    fn step(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        match self.place {
            Place::Start => self.start(cut, is_end),
            Place::List { start, scan } => self.list(cut, start, scan, is_end),
            Place::AfterList => self.after_list(cut, is_end),
        }
    }
}

fn begins_with_name(text: &str) -> Begins {
    match text.trim_start().chars().next() {
        None => Begins::Unknown,
        Some(letter) if letter.is_alphabetic() || letter == '_' => Begins::Yes,
        Some(_) => Begins::No,
    }
}
fn begins_with_call(list: &str) -> bool {
    let mut reader = Reader::new(list);
    reader.take("[") && !reader.name().is_empty() && reader.rest().starts_with('(')
}

/// The calls of a list and their places in `text`.
fn read_list(text: &str, list: Range<usize>) -> Result<Vec<(Range<usize>, Call)>, CallProblem> {
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
