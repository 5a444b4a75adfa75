//! Calls between an opening and a closing marker, possibly several within a section.

use super::CallProblem;
use super::arguments::ToolTypes;
use super::cut::Cut;
use super::json::{Keys, named_call};
use super::markers::{Found, Starts, find, skip_blank, starts};
use super::pairs::{Pairs, split};
use super::protocol::{Call, CallGrammar, Step};

/// A family's syntax.
pub(super) struct TaggedSyntax {
    /// Markers around all calls of an answer; the first is the canonical form. None: every call stands alone.
    pub sections: &'static [[&'static str; 2]],
    /// Markers around one call; the first is the canonical form.
    pub calls: &'static [[&'static str; 2]],
    pub read: Read,
}

/// How the text within the markers of a call is read.
pub(super) enum Read {
    Json(Keys),
    /// The name, this text, and the arguments as JSON.
    Named(&'static str),
    Pairs(Pairs),
    Own(fn(&str) -> Result<Call, CallProblem>),
    /// Values without a type are read by the tool's schema.
    Typed(fn(&str, &ToolTypes) -> Result<Call, CallProblem>),
}

impl TaggedSyntax {
    pub fn has_marker(&self, token: &str) -> bool {
        let of_read = match &self.read {
            Read::Pairs(pairs) => [pairs.function, pairs.key, pairs.value]
                .as_flattened()
                .contains(&token),
            Read::Named(name_end) => *name_end == token,
            _ => false,
        };
        let mut around = self.sections.iter().chain(self.calls);
        of_read || around.any(|pair| pair.contains(&token))
    }

    /// Reads one call, with its markers.
    fn read(&self, text: &str, types: &ToolTypes) -> Result<Call, CallProblem> {
        let call = inside(text, self.calls[0]);
        match &self.read {
            Read::Json(keys) => keys.call(call),
            Read::Named(name_end) => {
                let (name, arguments) = split(call, name_end)?;
                named_call(name.trim(), arguments)
            }
            Read::Pairs(pairs) => pairs.read(call, types),
            Read::Own(read) => read(call),
            Read::Typed(read) => read(call, types),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// At an opener.
    Outside,
    /// Between the calls of a section.
    Section { section: usize, has_call: bool },
    Call {
        which: usize,
        section: Option<usize>,
    },
}

/// The state of one answer.
pub(super) struct Tagged {
    syntax: &'static TaggedSyntax,
    types: ToolTypes,
    place: Place,
    /// Nothing of interest begins before this place.
    searched: usize,
}

impl Tagged {
    pub fn new(syntax: &'static TaggedSyntax, tools: &[serde_json::Value]) -> Self {
        let types = match syntax.read {
            Read::Pairs(_) | Read::Typed(_) => ToolTypes::new(tools),
            Read::Json(_) | Read::Named(_) | Read::Own(_) => ToolTypes::default(),
        };
        Self {
            syntax,
            types,
            place: Place::Outside,
            searched: 0,
        }
    }

    fn call_openers(&self) -> impl Iterator<Item = &'static str> + use<> {
        self.syntax.calls.iter().map(|[open, _]| *open)
    }

    fn enter(&mut self, cut: &Cut) -> Step {
        let rest = cut.rest();
        let position = cut.position();
        let mut sections = self.syntax.sections.iter();
        if let Some(section) = sections.position(|[open, _]| rest.starts_with(open)) {
            self.searched = position + self.syntax.sections[section][0].len();
            self.place = Place::Section {
                section,
                has_call: false,
            };
            return Step::Next;
        }
        match self.call_openers().position(|open| rest.starts_with(open)) {
            Some(which) => {
                self.enter_call(which, position, None);
                Step::Next
            }
            None => self.leave(false),
        }
    }

    fn enter_call(&mut self, which: usize, start: usize, section: Option<usize>) {
        self.searched = start + self.syntax.calls[which][0].len();
        self.place = Place::Call { which, section };
    }

    fn leave(&mut self, after_call: bool) -> Step {
        self.place = Place::Outside;
        Step::Done { after_call }
    }

    fn section(&mut self, cut: &mut Cut, section: usize, has_call: bool, is_end: bool) -> Step {
        self.searched = skip_blank(&cut.text, self.searched);
        let rest = &cut.text[self.searched..];
        if rest.is_empty() && !is_end {
            return Step::Wait;
        }
        let close = self.syntax.sections[section][1];
        match starts(rest, &[close], is_end) {
            Starts::With(_) => {
                cut.hide(self.searched + close.len());
                return self.leave(true);
            }
            Starts::Maybe => return Step::Wait,
            Starts::No => {}
        }
        if let Some(step) = self.next_call(cut, section, is_end) {
            return step;
        }
        self.end_section(cut, close, has_call);
        self.leave(has_call)
    }

    /// Enters the call that follows within a section. `None` if none does.
    fn next_call(&mut self, cut: &mut Cut, section: usize, is_end: bool) -> Option<Step> {
        let rest = &cut.text[self.searched..];
        let mut may_be_call = false;
        for (which, open) in self.call_openers().enumerate() {
            match starts(rest, &[open], is_end) {
                Starts::With(_) => {
                    cut.hide(self.searched);
                    self.enter_call(which, self.searched, Some(section));
                    return Some(Step::Next);
                }
                Starts::Maybe => may_be_call = true,
                Starts::No => {}
            }
        }
        may_be_call.then_some(Step::Wait)
    }

    /// Cuts a section that something else follows. The answer's end may come within a marker, too.
    fn end_section(&self, cut: &mut Cut, close: &str, has_call: bool) {
        let (rest, end) = (&cut.text[self.searched..], cut.text.len());
        if has_call && close.starts_with(rest) {
            cut.hide(end);
        } else if self.call_openers().any(|open| open.starts_with(rest)) {
            cut.no_call(end, CallProblem::CutOff);
        } else if !has_call {
            let reason = CallProblem::Structure("no call follows the marker");
            cut.no_call(self.searched, reason);
        }
    }

    fn call(&mut self, cut: &mut Cut, which: usize, section: Option<usize>, is_end: bool) -> Step {
        let close = self.syntax.calls[which][1];
        match find(&cut.text, self.searched, &[close], is_end) {
            Found::At { at, .. } => {
                let end = at + close.len();
                let read = self
                    .syntax
                    .read(&cut.text[cut.position()..end], &self.types);
                let is_call = cut.call_or_text(end, read);
                self.searched = end;
                if let Some(section) = section {
                    self.place = Place::Section {
                        section,
                        has_call: true,
                    };
                    return Step::Next;
                }
                self.leave(is_call)
            }
            Found::NotBefore(place) if !is_end => {
                self.searched = place;
                Step::Wait
            }
            Found::NotBefore(_) => {
                cut.no_call(cut.text.len(), CallProblem::CutOff);
                self.leave(false)
            }
        }
    }
}

impl CallGrammar for Tagged {
    fn step(&mut self, cut: &mut Cut, is_end: bool) -> Step {
        match self.place {
            Place::Outside => self.enter(cut),
            Place::Section { section, has_call } => self.section(cut, section, has_call, is_end),
            Place::Call { which, section } => self.call(cut, which, section, is_end),
        }
    }
}

/// `text` without the markers around it.
fn inside<'a>(text: &'a str, [open, close]: [&str; 2]) -> &'a str {
    let text = text.strip_prefix(open).unwrap_or(text);
    text.strip_suffix(close).unwrap_or(text)
}
