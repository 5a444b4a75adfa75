//! Llama 3: `{"name": .., "parameters": {..}}` as the whole answer, several separated by `;`, with or without
//! `<|python_tag|>` before them. After the tag there may also be a built-in tool ([`builtins`]), to the end.

mod builtins;

use crate::parse::CallProblem;
use crate::parse::cut::Cut;
use crate::parse::demand::{Form, Part};
use crate::parse::json::Keys;
use crate::parse::markers::skip_blank;
use crate::parse::protocol::{Begins, CallGrammar, Step, Syntax, ToolParser};
use crate::parse::scan::BracketScan;
use builtins::Builtins;
use serde_json::Value;

const TAG: &str = "<|python_tag|>";

pub(super) static PARSER: ToolParser = ToolParser {
    name: "llama3_json",
    templates: &[&["<|start_header_id|>", "\"parameters\": "]],
    rank: 8,
    openers: &[TAG],
    syntax: Syntax::Own(|tools| Box::new(LlamaJson::new(tools))),
    forms: &[Form {
        call: &[
            Part::Text("{\"name\": "),
            Part::QuotedName,
            Part::Text(", \"parameters\": "),
            Part::Arguments,
            Part::Text("}"),
        ],
        between: Some(&[Part::Text("; ")]),
        ..Form::BARE
    }],
    reasoning: "none",
    ..ToolParser::NONE
};

#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    Object {
        start: usize,
        scan: BracketScan,
    },
    AfterObject,
    /// In a built-in call, of which `code` is what follows the tag.
    Builtin {
        code: usize,
    },
}

/// The state of one answer.
struct LlamaJson {
    builtins: Builtins,
    place: Place,
    /// The tag says that a call is meant; without it an object may be an answer.
    is_tagged: bool,
    searched: usize,
    /// White space up to here is known, so that no flood of it is read again with each token.
    blank: usize,
}

impl LlamaJson {
    fn new(tools: &[Value]) -> Self {
        Self {
            builtins: Builtins::new(tools),
            place: Place::Start,
            is_tagged: false,
            searched: 0,
            blank: 0,
        }
    }

    fn start(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        let mut at = skip_blank(&cut.text, cut.position());
        self.is_tagged = cut.text[at..].starts_with(TAG);
        if self.is_tagged {
            at = skip_blank(&cut.text, self.blank.max(at + TAG.len()));
            self.blank = at;
        }
        match cut.text.as_bytes().get(at) {
            None if !is_end => Step::Wait,
            Some(b'{') => self.enter_object(at),
            Some(_) if self.is_tagged => {
                self.place = Place::Builtin { code: at };
                Step::Next
            }
            _ => {
                cut.no_call(at, CallProblem::CutOff);
                self.leave(false)
            }
        }
    }

    // Neither quotes nor code are escaped: only the end of the answer ends it.
    fn builtin(&mut self, cut: &mut Cut, code: usize, is_end: bool) -> Step {
        if !is_end {
            return Step::Wait;
        }
        let read = self.builtins.read(&cut.text[code..], cut.is_complete);
        let is_call = cut.call_or_text(cut.text.len(), read);
        self.leave(is_call)
    }

    fn object(&mut self, cut: &mut Cut, start: usize, mut scan: BracketScan, is_end: bool) -> Step {
        let Some(end) = scan.end(&cut.text) else {
            if is_end {
                // What is meant cannot be distinguished from half an object; a name is the best hint.
                let is_meant = self.is_tagged || cut.text[start..].contains("\"name\"");
                self.text(cut, cut.text.len(), is_meant.then_some(CallProblem::CutOff));
                return self.leave(false);
            }
            self.place = Place::Object { start, scan };
            return Step::Wait;
        };
        let object = &cut.text[start..end];
        let is_meant = self.is_tagged || Keys::USUAL.looks_like_call(object);
        match Keys::USUAL.call(object) {
            Ok(call) if is_meant => {
                cut.hide(start);
                cut.call(end, call);
                self.searched = end;
                self.place = Place::AfterObject;
                Step::Next
            }
            read => {
                self.text(cut, end, read.err().filter(|_| is_meant));
                self.leave(false)
            }
        }
    }

    fn after_object(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        self.searched = skip_blank(&cut.text, self.searched);
        let mut at = self.searched;
        let has_separator = matches!(cut.text.as_bytes().get(at), Some(b';' | b','));
        if has_separator {
            at = skip_blank(&cut.text, self.blank.max(at + 1));
            self.blank = at;
        }
        match cut.text.as_bytes().get(at) {
            None if !is_end => Step::Wait,
            Some(b'{') => self.enter_object(at),
            None => {
                cut.hide(at);
                self.leave(true)
            }
            Some(_) => self.leave(true),
        }
    }

    fn text(&self, cut: &mut Cut, end: usize, problem: Option<CallProblem>) {
        match problem {
            Some(reason) => cut.no_call(end, reason),
            None => cut.content(end),
        }
    }

    fn enter_object(&mut self, start: usize) -> Step {
        let scan = BracketScan::new(start, false);
        self.place = Place::Object { start, scan };
        Step::Next
    }

    fn leave(&mut self, after_call: bool) -> Step {
        self.place = Place::Start;
        Step::Done { after_call }
    }
}

impl CallGrammar for LlamaJson {
    fn begins_at_start(&self, text: &str, _is_end: bool) -> Begins {
        let Some(inner) = text.strip_prefix('{') else {
            return Begins::No;
        };
        match inner.trim_start().as_bytes().first() {
            None => Begins::Unknown,
            Some(b'"') => Begins::Yes,
            Some(_) => Begins::No,
        }
    }

    fn step(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        match self.place {
            Place::Start => self.start(cut, is_end),
            Place::Object { start, scan } => self.object(cut, start, scan, is_end),
            Place::AfterObject => self.after_object(cut, is_end),
            Place::Builtin { code } => self.builtin(cut, code, is_end),
        }
    }
}
