//! Command R7B and Command A: `<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "name", "parameters": {..}}]
//! <|END_ACTION|>`.

use super::cut::Cut;
use super::json::{self, JsonScan};
use super::markers::{Starts, skip_blank, starts};
use super::{Call, CallGrammar, CallProblem, Progress};

pub(super) const MARKERS: [&str; 2] = ["<|START_ACTION|>", "<|END_ACTION|>"];
const OPENERS: [&str; 1] = [MARKERS[0]];

#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    List {
        start: usize,
        scan: JsonScan,
    },
    /// After the list, where the closing marker may be.
    AfterList,
}

/// The state of one answer.
pub(super) struct Cohere {
    place: Place,
    searched: usize,
}

impl Cohere {
    pub fn new() -> Self {
        Self {
            place: Place::Start,
            searched: 0,
        }
    }

    // `None`: more text decides.
    fn start(&mut self, cut: &mut Cut, is_end: bool) -> Option<Progress> {
        let after_marker = cut.position() + OPENERS[0].len();
        let at = skip_blank(&cut.text, self.searched.max(after_marker));
        self.searched = at;
        let problem = match cut.text.as_bytes().get(at) {
            None if !is_end => return None,
            // A model that calls one tool may forget the list.
            Some(b'[' | b'{') => {
                let scan = JsonScan::from(at);
                self.place = Place::List { start: at, scan };
                return Some(Progress::More);
            }
            None => CallProblem::CutOff,
            Some(_) => CallProblem::Structure("no list follows the marker"),
        };
        cut.no_call(at, problem);
        Some(self.leave(false))
    }

    fn list(
        &mut self,
        cut: &mut Cut,
        start: usize,
        mut scan: JsonScan,
        is_end: bool,
    ) -> Option<Progress> {
        let Some(end) = scan.end(&cut.text) else {
            if is_end {
                cut.no_call(cut.text.len(), CallProblem::CutOff);
                return Some(self.leave(false));
            }
            self.place = Place::List { start, scan };
            return None;
        };
        let has_call = match cut.text[start..].starts_with('[') {
            true => cut.call_list(start..end, read),
            false => {
                let read = read(&cut.text[start..end]);
                cut.call_or_text(end, read)
            }
        };
        if !has_call {
            return Some(self.leave(false));
        }
        self.searched = end;
        self.place = Place::AfterList;
        Some(Progress::More)
    }

    fn after_list(&mut self, cut: &mut Cut, is_end: bool) -> Option<Progress> {
        self.searched = skip_blank(&cut.text, self.searched);
        match starts(&cut.text[self.searched..], &[MARKERS[1]], is_end) {
            Starts::With(_) => cut.hide(self.searched + MARKERS[1].len()),
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

impl CallGrammar for Cohere {
    fn openers(&self) -> &'static [&'static str] {
        &OPENERS
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

// The number that the model gives a call is no id: templates number the calls of a conversation by their ids, and a model
// that began again at 0 would answer two calls with one id.
fn read(text: &str) -> Result<Call, CallProblem> {
    json::call_named(text, "\"tool_name\"")
}
