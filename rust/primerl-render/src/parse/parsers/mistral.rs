//! Mistral: `[TOOL_CALLS][{"name": .., "arguments": {..}}]`, and since 2025
//! `[TOOL_CALLS]name[CALL_ID]id[ARGS]{..}`, repeated for each call.

use crate::parse::CallProblem;
use crate::parse::cut::Cut;
use crate::parse::demand::{Form, Part};
use crate::parse::json::{Keys, named_call};
use crate::parse::markers::{Found, find, skip_blank};
use crate::parse::protocol::{Call, CallGrammar, Step, Syntax, ToolParser};
use crate::parse::scan::BracketScan;

const OPENER: &str = "[TOOL_CALLS]";
const CALL_ID: &str = "[CALL_ID]";
const ARGUMENTS: &str = "[ARGS]";

pub(super) static PARSER: ToolParser = ToolParser {
    name: "mistral",
    templates: &[&[OPENER]],
    rank: 6,
    model_types: &["mistral", "mistral3", "mixtral"],
    openers: &[OPENER],
    syntax: Syntax::Own(|_| Box::new(Mistral::new())),
    special: &[CALL_ID, ARGUMENTS],
    forms: &[
        Form {
            sign: CALL_ID,
            call: &[
                Part::Text(OPENER),
                Part::Name,
                Part::Either(&[&[Part::Text(CALL_ID), Part::Id], &[]]),
                Part::Text(ARGUMENTS),
                Part::Arguments,
            ],
            ..Form::BARE
        },
        Form {
            sign: ARGUMENTS,
            call: &[
                Part::Text(OPENER),
                Part::Name,
                Part::Text(ARGUMENTS),
                Part::Arguments,
            ],
            ..Form::BARE
        },
        Form {
            open: &[Part::Text(OPENER), Part::Maybe(" "), Part::Text("[")],
            call: &[
                Part::Text("{\"name\": "),
                Part::QuotedName,
                Part::Text(", \"arguments\": "),
                Part::Arguments,
                Part::Either(&[
                    &[Part::Text(", \"id\": \""), Part::Id, Part::Text("\"")],
                    &[],
                ]),
                Part::Text("}"),
            ],
            between: Some(&[Part::Text(", ")]),
            close: &[Part::Text("]")],
            ..Form::BARE
        },
    ],
    reasoning: "mistral",
    ..ToolParser::NONE
};

#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    /// Between the marker and the arguments.
    Header,
    /// In the list or the arguments that begin at `start`.
    Json {
        start: usize,
        scan: BracketScan,
    },
}

/// The state of one answer.
struct Mistral {
    place: Place,
    searched: usize,
}

impl Mistral {
    fn new() -> Self {
        Self {
            place: Place::Start,
            searched: 0,
        }
    }

    fn start(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        let after_marker = cut.position() + OPENER.len();
        let at = skip_blank(&cut.text, self.searched.max(after_marker));
        self.searched = at;
        match cut.text.as_bytes().get(at) {
            None if !is_end => return Step::Wait,
            None => {
                cut.no_call(at, CallProblem::CutOff);
                return self.leave(false);
            }
            Some(b'[') if !cut.text[at..].starts_with(ARGUMENTS) => self.enter_json(at),
            Some(_) => {
                self.searched = at;
                self.place = Place::Header;
            }
        }
        Step::Next
    }

    fn header(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        let problem = match find(&cut.text, self.searched, &["{", OPENER], is_end) {
            Found::At { at, which: 0 } => {
                self.enter_json(at);
                return Step::Next;
            }
            Found::NotBefore(place) if !is_end => {
                self.searched = place;
                return Step::Wait;
            }
            Found::At { at, .. } => (at, CallProblem::Structure("the call has no arguments")),
            Found::NotBefore(place) => (place, CallProblem::CutOff),
        };
        cut.no_call(problem.0, problem.1);
        self.leave(false)
    }

    fn json(&mut self, cut: &mut Cut, start: usize, mut scan: BracketScan, is_end: bool) -> Step {
        let Some(end) = scan.end(&cut.text) else {
            if is_end {
                cut.no_call(cut.text.len(), CallProblem::CutOff);
                return self.leave(false);
            }
            self.place = Place::Json { start, scan };
            return Step::Wait;
        };
        let is_list = cut.text[start..].starts_with('[');
        let is_call = if is_list {
            cut.call_list(start..end, Keys::USUAL)
        } else {
            let read = read(&cut.text[cut.position()..start], &cut.text[start..end]);
            cut.call_or_text(end, read)
        };
        self.leave(is_call)
    }

    fn enter_json(&mut self, start: usize) {
        let scan = BracketScan::new(start, false);
        self.place = Place::Json { start, scan };
    }

    fn leave(&mut self, after_call: bool) -> Step {
        self.place = Place::Start;
        Step::Done { after_call }
    }
}

impl CallGrammar for Mistral {
    fn step(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        match self.place {
            Place::Start => self.start(cut, is_end),
            Place::Header => self.header(cut, is_end),
            Place::Json { start, scan } => self.json(cut, start, scan, is_end),
        }
    }
}

/// `header` is `[TOOL_CALLS]name[CALL_ID]id[ARGS]`.
fn read(header: &str, arguments: &str) -> Result<Call, CallProblem> {
    let header = header.strip_prefix(OPENER).unwrap_or(header).trim();
    let header = header.strip_suffix(ARGUMENTS).unwrap_or(header);
    let (name, id) = match header.split_once(CALL_ID) {
        Some((name, id)) => (name, Some(id.trim())),
        None => (header, None),
    };
    let mut call = named_call(name.trim(), arguments)?;
    call.id = id.filter(|id| !id.is_empty()).map(str::to_owned);
    Ok(call)
}
