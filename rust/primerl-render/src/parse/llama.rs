//! Llama 3: `{"name": .., "parameters": {..}}` as the whole answer, several separated by `;`, with or without
//! `<|python_tag|>` before them. After the tag there may also be a built-in tool ([`super::llama_builtin`]), to the end.

use super::cut::Cut;
use super::json::{self, JsonScan};
use super::llama_builtin::Builtins;
use super::markers::skip_blank;
use super::{Begins, CallGrammar, CallProblem, Progress};
use serde_json::Value;

pub(super) const MARKERS: [&str; 1] = ["<|python_tag|>"];

#[derive(Clone, Copy, Debug)]
enum Place {
    Start,
    Object {
        start: usize,
        scan: JsonScan,
    },
    AfterObject,
    /// In a built-in call, of which `code` is what follows the tag.
    Builtin {
        code: usize,
    },
}

/// The state of one answer.
pub(super) struct LlamaJson {
    builtins: Builtins,
    place: Place,
    /// The tag says that a call is meant; without it an object may be an answer.
    is_tagged: bool,
    searched: usize,
    /// White space up to here is known, so that no flood of it is read again with each token.
    blank: usize,
}

impl LlamaJson {
    pub fn new(tools: &[Value]) -> Self {
        Self {
            builtins: Builtins::new(tools),
            place: Place::Start,
            is_tagged: false,
            searched: 0,
            blank: 0,
        }
    }

    // `None`: more text decides.
    fn start(&mut self, cut: &mut Cut, is_end: bool) -> Option<Progress> {
        let mut at = skip_blank(&cut.text, cut.position());
        self.is_tagged = cut.text[at..].starts_with(MARKERS[0]);
        if self.is_tagged {
            at = skip_blank(&cut.text, self.blank.max(at + MARKERS[0].len()));
            self.blank = at;
        }
        match cut.text.as_bytes().get(at) {
            None if !is_end => None,
            Some(b'{') => Some(self.enter_object(at)),
            Some(_) if self.is_tagged => {
                self.place = Place::Builtin { code: at };
                Some(Progress::More)
            }
            _ => {
                cut.no_call(at, CallProblem::CutOff);
                Some(self.leave(false))
            }
        }
    }

    // Neither quotes nor code are escaped: only the end of the answer ends it.
    fn builtin(&mut self, cut: &mut Cut, code: usize, is_end: bool) -> Option<Progress> {
        if !is_end {
            return None;
        }
        let read = self.builtins.read(&cut.text[code..], cut.is_complete);
        let is_call = cut.call_or_text(cut.text.len(), read);
        Some(self.leave(is_call))
    }

    fn object(
        &mut self,
        cut: &mut Cut,
        start: usize,
        mut scan: JsonScan,
        is_end: bool,
    ) -> Option<Progress> {
        let Some(end) = scan.end(&cut.text) else {
            if is_end {
                // What is meant cannot be told from half an object; a name is the best hint.
                let is_meant = self.is_tagged || cut.text[start..].contains("\"name\"");
                self.text(cut, cut.text.len(), is_meant.then_some(CallProblem::CutOff));
                return Some(self.leave(false));
            }
            self.place = Place::Object { start, scan };
            return None;
        };
        let object = &cut.text[start..end];
        let is_meant = self.is_tagged || json::looks_like_call(object);
        match json::call(object) {
            Ok(call) if is_meant => {
                cut.hide(start);
                cut.call(end, call);
                self.searched = end;
                self.place = Place::AfterObject;
                Some(Progress::More)
            }
            read => {
                self.text(cut, end, read.err().filter(|_| is_meant));
                Some(self.leave(false))
            }
        }
    }

    fn after_object(&mut self, cut: &mut Cut, is_end: bool) -> Option<Progress> {
        self.searched = skip_blank(&cut.text, self.searched);
        let mut at = self.searched;
        let has_separator = matches!(cut.text.as_bytes().get(at), Some(b';' | b','));
        if has_separator {
            at = skip_blank(&cut.text, self.blank.max(at + 1));
            self.blank = at;
        }
        match cut.text.as_bytes().get(at) {
            None if !is_end => None,
            Some(b'{') => Some(self.enter_object(at)),
            None => {
                cut.hide(at);
                Some(self.leave(true))
            }
            Some(_) => Some(self.leave(true)),
        }
    }

    fn text(&self, cut: &mut Cut, end: usize, problem: Option<CallProblem>) {
        match problem {
            Some(reason) => cut.no_call(end, reason),
            None => cut.content(end),
        }
    }

    fn enter_object(&mut self, start: usize) -> Progress {
        let scan = JsonScan::from(start);
        self.place = Place::Object { start, scan };
        Progress::More
    }

    fn leave(&mut self, after_call: bool) -> Progress {
        self.place = Place::Start;
        Progress::Done { after_call }
    }
}

impl CallGrammar for LlamaJson {
    fn openers(&self) -> &'static [&'static str] {
        &MARKERS
    }

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

    fn advance(&mut self, cut: &mut Cut, is_end: bool) -> Progress {
        loop {
            let progress = match self.place {
                Place::Start => self.start(cut, is_end),
                Place::Object { start, scan } => self.object(cut, start, scan, is_end),
                Place::AfterObject => self.after_object(cut, is_end),
                Place::Builtin { code } => self.builtin(cut, code, is_end),
            };
            match progress {
                None => return Progress::More,
                Some(Progress::More) => {}
                Some(done) => return done,
            }
        }
    }
}
