//! Mistral: `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, and since 2025
//! `[TOOL_CALLS]name[CALL_ID]id[ARGS]{..}`, repeated for each call.

use super::cut::Cut;
use super::json::{self, JsonScan};
use super::markers::{Found, find, skip_blank};
use super::{Call, CallGrammar, CallProblem, Progress};

const OPENERS: [&str; 1] = ["[TOOL_CALLS]"];
const CALL_ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";
pub(super) const MARKERS: [&str; 3] = [OPENERS[0], CALL_ID, ARGUMENTS];

#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    /// Between the marker and the arguments.
    Header,
    /// In the list or the arguments that begin at `start`.
    Json {
        start: usize,
        scan: JsonScan,
    },
}

/// The state of one answer.
pub(super) struct Mistral {
    place: Place,
    searched: usize,
}

impl Mistral {
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
        match cut.text.as_bytes().get(at) {
            None if !is_end => return None,
            None => {
                cut.no_call(at, CallProblem::CutOff);
                return Some(self.leave(false));
            }
            Some(b'[') if !cut.text[at..].starts_with(ARGUMENTS) => self.enter_json(at),
            Some(_) => {
                self.searched = at;
                self.place = Place::Header;
            }
        }
        Some(Progress::More)
    }

    fn header(&mut self, cut: &mut Cut, is_end: bool) -> Option<Progress> {
        let problem = match find(&cut.text, self.searched, &["{", OPENERS[0]], is_end) {
            Found::At { at, which: 0 } => {
                self.enter_json(at);
                return Some(Progress::More);
            }
            Found::NotBefore(place) if !is_end => {
                self.searched = place;
                return None;
            }
            Found::At { at, .. } => (at, CallProblem::Structure("the call has no arguments")),
            Found::NotBefore(place) => (place, CallProblem::CutOff),
        };
        cut.no_call(problem.0, problem.1);
        Some(self.leave(false))
    }

    fn json(
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
            self.place = Place::Json { start, scan };
            return None;
        };
        let is_list = cut.text[start..].starts_with('[');
        let is_call = if is_list {
            cut.call_list(start..end, json::call)
        } else {
            let read = read(&cut.text[cut.position()..start], &cut.text[start..end]);
            cut.call_or_text(end, read)
        };
        Some(self.leave(is_call))
    }

    fn enter_json(&mut self, start: usize) {
        let scan = JsonScan::from(start);
        self.place = Place::Json { start, scan };
    }

    fn leave(&mut self, after_call: bool) -> Progress {
        self.place = Place::Start;
        Progress::Done { after_call }
    }
}

impl CallGrammar for Mistral {
    fn openers(&self) -> &'static [&'static str] {
        &OPENERS
    }

    fn advance(&mut self, cut: &mut Cut, is_end: bool) -> Progress {
        loop {
            let progress = match self.place {
                Place::Start => self.start(cut, is_end),
                Place::Header => self.header(cut, is_end),
                Place::Json { start, scan } => self.json(cut, start, scan, is_end),
            };
            match progress {
                None => return Progress::More,
                Some(Progress::More) => {}
                Some(done) => return done,
            }
        }
    }
}

/// `header` is `[TOOL_CALLS]name[CALL_ID]id[ARGS]`.
fn read(header: &str, arguments: &str) -> Result<Call, CallProblem> {
    let header = header.strip_prefix(OPENERS[0]).unwrap_or(header).trim();
    let header = header.strip_suffix(ARGUMENTS).unwrap_or(header);
    let (name, id) = match header.split_once(CALL_ID) {
        Some((name, id)) => (name, Some(id.trim())),
        None => (header, None),
    };
    let arguments = json::object(arguments, "value of the arguments")?;
    let mut call = Call::new(name.trim(), arguments.to_owned())?;
    call.id = id.filter(|id| !id.is_empty()).map(str::to_owned);
    Ok(call)
}
