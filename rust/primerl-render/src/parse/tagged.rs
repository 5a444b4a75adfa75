//! Calls between an opening and a closing marker, possibly several within a section.

use super::arguments::ToolTypes;
use super::cut::Cut;
use super::markers::{Found, Starts, find, skip_blank, starts};
use super::{Call, CallGrammar, CallProblem, Progress};

/// A family's syntax.
pub(super) struct Syntax {
    /// Markers around all calls of an answer; the first is the canonical form. None: every call stands alone.
    pub sections: &'static [[&'static str; 2]],
    /// Markers around one call; the first is the canonical form.
    pub calls: &'static [[&'static str; 2]],
    /// What begins a call in content: the section's marker and those of `calls` that may stand alone.
    pub openers: &'static [&'static str],
    /// All markers that are special tokens in some tokenizer of the family, and the above.
    pub markers: &'static [&'static str],
    /// Reads one call, with its markers.
    pub read: fn(&str, &ToolTypes) -> Result<Call, CallProblem>,
    pub types_matter: bool,
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
    syntax: &'static Syntax,
    types: ToolTypes,
    place: Place,
    /// Nothing of interest begins before this place.
    searched: usize,
}

impl Tagged {
    pub fn new(syntax: &'static Syntax, tools: &[serde_json::Value]) -> Self {
        let types = if syntax.types_matter {
            ToolTypes::new(tools)
        } else {
            ToolTypes::default()
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

    fn enter(&mut self, cut: &Cut) -> Progress {
        let rest = cut.rest();
        let position = cut.position();
        let mut sections = self.syntax.sections.iter();
        if let Some(section) = sections.position(|[open, _]| rest.starts_with(open)) {
            self.searched = position + self.syntax.sections[section][0].len();
            self.place = Place::Section {
                section,
                has_call: false,
            };
            return Progress::More;
        }
        match self.call_openers().position(|open| rest.starts_with(open)) {
            Some(which) => {
                self.enter_call(which, position, None);
                Progress::More
            }
            None => self.leave(false),
        }
    }

    fn enter_call(&mut self, which: usize, start: usize, section: Option<usize>) {
        self.searched = start + self.syntax.calls[which][0].len();
        self.place = Place::Call { which, section };
    }

    fn leave(&mut self, after_call: bool) -> Progress {
        self.place = Place::Outside;
        Progress::Done { after_call }
    }

    // `None`: more text decides.
    fn section(
        &mut self,
        cut: &mut Cut,
        section: usize,
        has_call: bool,
        is_end: bool,
    ) -> Option<Progress> {
        self.searched = skip_blank(&cut.text, self.searched);
        let rest = &cut.text[self.searched..];
        if rest.is_empty() && !is_end {
            return None;
        }
        let close = self.syntax.sections[section][1];
        match starts(rest, &[close], is_end) {
            Starts::With(_) => {
                cut.hide(self.searched + close.len());
                return Some(self.leave(true));
            }
            Starts::Maybe => return None,
            Starts::No => {}
        }
        let mut may_be_call = false;
        for (which, open) in self.call_openers().enumerate() {
            match starts(rest, &[open], is_end) {
                Starts::With(_) => {
                    cut.hide(self.searched);
                    self.enter_call(which, self.searched, Some(section));
                    return Some(Progress::More);
                }
                Starts::Maybe => may_be_call = true,
                Starts::No => {}
            }
        }
        if may_be_call {
            return None;
        }
        // The end may come within a marker, too.
        let end = cut.text.len();
        if has_call && close.starts_with(rest) {
            cut.hide(end);
        } else if self.call_openers().any(|open| open.starts_with(rest)) {
            cut.no_call(end, CallProblem::CutOff);
        } else if !has_call {
            let reason = CallProblem::Structure("no call follows the marker");
            cut.no_call(self.searched, reason);
        }
        Some(self.leave(has_call))
    }

    fn call(
        &mut self,
        cut: &mut Cut,
        which: usize,
        section: Option<usize>,
        is_end: bool,
    ) -> Option<Progress> {
        let close = self.syntax.calls[which][1];
        match find(&cut.text, self.searched, &[close], is_end) {
            Found::At { at, .. } => {
                let end = at + close.len();
                let read = (self.syntax.read)(&cut.text[cut.position()..end], &self.types);
                let is_call = cut.call_or_text(end, read);
                self.searched = end;
                if let Some(section) = section {
                    self.place = Place::Section {
                        section,
                        has_call: true,
                    };
                    return Some(Progress::More);
                }
                Some(self.leave(is_call))
            }
            Found::NotBefore(place) if !is_end => {
                self.searched = place;
                None
            }
            Found::NotBefore(_) => {
                cut.no_call(cut.text.len(), CallProblem::CutOff);
                Some(self.leave(false))
            }
        }
    }
}

impl CallGrammar for Tagged {
    fn openers(&self) -> &'static [&'static str] {
        self.syntax.openers
    }

    fn advance(&mut self, cut: &mut Cut, is_end: bool) -> Progress {
        loop {
            let progress = match self.place {
                Place::Outside => Some(self.enter(cut)),
                Place::Section { section, has_call } => {
                    self.section(cut, section, has_call, is_end)
                }
                Place::Call { which, section } => self.call(cut, which, section, is_end),
            };
            match progress {
                None => return Progress::More,
                Some(Progress::More) => {}
                Some(done) => return done,
            }
        }
    }
}

/// Splits `text` at the first `marker`.
pub(super) fn split<'a>(text: &'a str, marker: &str) -> Result<(&'a str, &'a str), CallProblem> {
    text.split_once(marker).ok_or(CallProblem::Structure(
        "a marker within the call is missing",
    ))
}

/// `text` without the markers around it.
pub(super) fn inside<'a>(text: &'a str, [open, close]: [&str; 2]) -> &'a str {
    let text = text.strip_prefix(open).unwrap_or(text);
    text.strip_suffix(close).unwrap_or(text)
}

/// `text` without the newline that templates write at each end of a value.
pub(super) fn without_line_breaks(text: &str) -> &str {
    let text = text.strip_prefix('\n').unwrap_or(text);
    text.strip_suffix('\n').unwrap_or(text)
}
