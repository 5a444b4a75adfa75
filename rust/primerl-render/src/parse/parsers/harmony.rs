//! Harmony (gpt-oss): an answer is a row of messages, `<|start|>assistant<|channel|>final<|message|>..<|end|>`. The prompt
//! ends with `<|start|>assistant`, so the first header comes without its beginning.
//!
//! `analysis` is reasoning, `final` and `commentary` are content, a message to `functions.name` is a call with JSON
//! arguments. A call to another recipient (a built-in tool) keeps the recipient as its name.

use crate::parse::CallProblem;
use crate::parse::cut::Cut;
use crate::parse::demand::{ArgumentSyntax, Form, Part};
use crate::parse::json::named_call;
use crate::parse::markers::{Found, Starts, find, skip_blank, starts};
use crate::parse::protocol::{Syntax, ToolParser};

const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const START: &str = "<|start|>";
const CONSTRAIN: &str = "<|constrain|>";
/// What ends a message; the last one begins the next.
pub(in crate::parse) const ENDS: [&str; 4] = ["<|end|>", "<|call|>", "<|return|>", START];
/// What a header begins with. Other text is an answer without a header.
const HEADER_BEGINNINGS: [&str; 6] = [CHANNEL, MESSAGE, START, CONSTRAIN, "to=", "assistant"];
/// A longer text is no header.
const LONGEST_HEADER: usize = 512;

pub(in crate::parse) static PARSER: ToolParser = ToolParser {
    name: "harmony",
    templates: &[&[CHANNEL, MESSAGE, "analysis"]],
    rank: 0,
    model_types: &["gpt_oss"],
    syntax: Syntax::Harmony,
    special: &[
        CHANNEL,
        MESSAGE,
        START,
        CONSTRAIN,
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ],
    forms: &[Form {
        call: &[
            // As the model writes it, and as its template does.
            Part::Either(&[
                &[
                    Part::Text("<|channel|>commentary to=functions."),
                    Part::Name,
                    Part::Text(" "),
                ],
                &[
                    Part::Text(" to=functions."),
                    Part::Name,
                    Part::Text("<|channel|>commentary "),
                ],
            ]),
            Part::Maybe(CONSTRAIN),
            Part::Text("json<|message|>"),
            Part::Arguments,
            Part::Text("<|call|>"),
        ],
        // The token that ends a call ends the answer.
        between: None,
        arguments: ArgumentSyntax::Json(&ENDS),
        ..Form::BARE
    }],
    reasoning: "harmony",
    ..ToolParser::NONE
};

/// Around a block of reasoning, which another message of the model follows.
pub(in crate::parse) const ANALYSIS: (&str, &str) = (
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant",
);
/// The header of an answer to the user.
pub(in crate::parse) const FINAL: &str = "<|channel|>final<|message|>";

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Header,
    Reasoning,
    Content,
    /// Of which the header is not cut yet; the arguments begin at `body`.
    Call {
        name: String,
        body: usize,
    },
    /// A call where none is wanted: all of it is text.
    CallAsText,
}

/// Cuts an answer.
pub(in crate::parse) struct Harmony {
    state: State,
    /// Nothing of interest begins before this place.
    searched: usize,
    reads_reasoning: bool,
    reads_calls: bool,
}

impl Harmony {
    pub fn new(reads_reasoning: bool, reads_calls: bool, starts_in_reasoning: bool) -> Self {
        let state = match starts_in_reasoning && reads_reasoning {
            true => State::Reasoning,
            false => State::Header,
        };
        Self {
            state,
            searched: 0,
            reads_reasoning,
            reads_calls,
        }
    }

    /// Cuts what is certain; at the end, everything.
    pub fn run(&mut self, cut: &mut Cut, is_end: bool) {
        while self.step(cut, is_end) {}
        if is_end {
            cut.content(cut.text.len());
        }
    }

    // Whether there is more to do with the text at hand.
    fn step(&mut self, cut: &mut Cut, is_end: bool) -> bool {
        if self.state == State::Header {
            return self.header(cut, is_end);
        }
        let found = find(&cut.text, self.searched, &ENDS, is_end);
        let (Found::At { at: place, .. } | Found::NotBefore(place)) = found;
        self.searched = place;
        match self.state {
            State::Reasoning => cut.reasoning(place),
            State::Content | State::CallAsText => cut.content(place),
            _ => {}
        }
        match found {
            Found::At { at, which } => {
                let is_start = ENDS[which] == START;
                let end = if is_start { at } else { at + ENDS[which].len() };
                self.end_message(cut, at, end);
                true
            }
            Found::NotBefore(_) => {
                if is_end && matches!(self.state, State::Call { .. }) {
                    self.end_message(cut, place, place);
                }
                false
            }
        }
    }

    /// The body ends at `body_end`, its closing marker at `end`.
    fn end_message(&mut self, cut: &mut Cut, body_end: usize, end: usize) {
        match std::mem::replace(&mut self.state, State::Header) {
            State::Call { name, body } => {
                let arguments = &cut.text[body..body_end];
                let read = named_call(&name, arguments);
                // The stop token that closes the last call is not part of the text: only its JSON tells.
                let is_cut_off = end == body_end && end == cut.text.len();
                let read = read.map_err(|problem| match problem {
                    CallProblem::InvalidJson(_) if is_cut_off => CallProblem::CutOff,
                    problem => problem,
                });
                cut.call_or_text(end, read);
            }
            State::CallAsText => cut.content(end),
            _ => cut.hide(end),
        }
        self.searched = cut.position();
    }

    fn header(&mut self, cut: &mut Cut, is_end: bool) -> bool {
        let first = skip_blank(&cut.text, cut.position());
        if first - cut.position() <= LONGEST_HEADER {
            if is_end && first == cut.text.len() {
                cut.hide(first);
                return false;
            }
            if starts(&cut.text[first..], &HEADER_BEGINNINGS, is_end) == Starts::No {
                return self.enter(State::Content, cut.position());
            }
        }
        let found = find(&cut.text, self.searched, &[MESSAGE], is_end);
        let (Found::At { at: place, .. } | Found::NotBefore(place)) = found;
        if place - cut.position() > LONGEST_HEADER {
            // A letter is shown first, so that a marker there is not read as one again.
            let letter = cut.rest().chars().next().map_or(0, char::len_utf8);
            cut.content(cut.position() + letter);
            return self.enter(State::Content, cut.position());
        }
        match found {
            Found::At { at, .. } => self.begin_message(cut, at),
            Found::NotBefore(place) => {
                self.searched = place;
                if is_end {
                    self.end_in_header(cut);
                }
                false
            }
        }
    }

    fn begin_message(&mut self, cut: &mut Cut, header_end: usize) -> bool {
        let body = header_end + MESSAGE.len();
        let header = &cut.text[cut.position()..header_end];
        let state = match (recipient(header), word_after(header, CHANNEL)) {
            (Some(name), _) if self.reads_calls => {
                let name = name.strip_prefix("functions.").unwrap_or(name).to_owned();
                State::Call { name, body }
            }
            (Some(_), _) => State::CallAsText,
            (None, Some("analysis")) if self.reads_reasoning => State::Reasoning,
            _ => State::Content,
        };
        if matches!(state, State::Reasoning | State::Content) {
            cut.hide(body);
        }
        self.enter(state, body)
    }

    fn end_in_header(&mut self, cut: &mut Cut) {
        let end = cut.text.len();
        match recipient(cut.rest()) {
            Some(_) if self.reads_calls => cut.no_call(end, CallProblem::CutOff),
            Some(_) => cut.content(end),
            None => cut.hide(end),
        }
    }

    fn enter(&mut self, state: State, searched: usize) -> bool {
        self.state = state;
        self.searched = searched;
        true
    }
}

/// The tool a message is for.
fn recipient(header: &str) -> Option<&str> {
    word_after(header, "to=").filter(|name| !matches!(*name, "assistant" | "user" | "all"))
}

/// The word that follows `marker`.
fn word_after<'a>(header: &'a str, marker: &str) -> Option<&'a str> {
    let (_, after) = header.split_once(marker)?;
    let is_end = |letter: char| letter.is_whitespace() || letter == '<';
    after.split(is_end).next()
}
