//! The order of an answer: reasoning, then content with tool calls between.

use super::cut::Cut;
use super::markers::{Found, Starts, find, skip_blank, starts};
use super::newlines::Newlines;
use super::protocol::{Begins, CallGrammar, Step, ThinkMarkers, ToolParser};
use super::{AnswerContext, ParserChoice};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Only white space so far.
    Start,
    /// The prompt opened the reasoning; the model may open it once more.
    ReasoningStart,
    /// Newlines that the template writes at the start of what comes next.
    Newlines {
        left: usize,
        before: Region,
    },
    Reasoning,
    Content {
        /// No letter of this stretch is cut yet: a call would hide its white space.
        is_blank: bool,
        after_call: bool,
    },
    Calls,
    /// After a call of a syntax that takes no content before calls.
    AfterCall,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Region {
    Reasoning,
    Content,
}

/// Cuts an answer of a family whose reasoning, if any, comes first and once.
pub(super) struct Machine {
    state: State,
    think: Option<&'static ThinkMarkers>,
    /// None: calls stay text.
    grammar: Option<Box<dyn CallGrammar>>,
    parser: &'static ToolParser,
    newlines: Newlines,
    /// No marker begins before this place.
    searched: usize,
}

impl Machine {
    pub fn new(choice: ParserChoice, newlines: Newlines, context: &AnswerContext<'_>) -> Self {
        let think = choice.think();
        let tools = context.tools.filter(|tools| !tools.is_empty());
        let state = match think {
            Some(_) if context.starts_in_reasoning => State::ReasoningStart,
            _ => State::Start,
        };
        Self {
            state,
            think,
            grammar: tools.and_then(|tools| choice.tool.grammar(tools)),
            parser: choice.tool,
            newlines,
            searched: 0,
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
        match self.state {
            State::Start => self.start(cut, is_end),
            State::ReasoningStart => self.reasoning_start(cut, is_end),
            State::Newlines { left, before } => self.newlines(cut, left, before, is_end),
            State::Reasoning => self.reasoning(cut, is_end),
            State::Content {
                is_blank,
                after_call,
            } => self.content(cut, is_blank, after_call, is_end),
            State::Calls => self.calls(cut, is_end),
            State::AfterCall => self.after_call(cut, is_end),
        }
    }

    fn start(&mut self, cut: &mut Cut, is_end: bool) -> bool {
        self.searched = skip_blank(&cut.text, self.searched);
        let text = &cut.text[self.searched..];
        if text.is_empty() && !is_end {
            return false;
        }
        if let Some(think) = self.think {
            match starts(text, &[think.open], is_end) {
                Starts::With(_) => {
                    cut.hide(self.searched + think.open.len());
                    return self.enter_newlines(self.newlines.after_open, Region::Reasoning);
                }
                Starts::Maybe => return false,
                Starts::No => {}
            }
        }
        match self.call_here(cut, is_end) {
            Begins::Unknown if !is_end => return false,
            Begins::Yes => {}
            _ => self.enter_content(cut, true, false),
        }
        true
    }

    fn after_call(&mut self, cut: &mut Cut, is_end: bool) -> bool {
        self.searched = skip_blank(&cut.text, self.searched);
        match self.call_here(cut, is_end) {
            Begins::Unknown if !is_end => return false,
            Begins::Yes => {}
            _ => self.enter_content(cut, true, true),
        }
        true
    }

    /// Whether a call begins at `searched`, where openers need not be looked for; enters it.
    fn call_here(&mut self, cut: &mut Cut, is_end: bool) -> Begins {
        let Some(grammar) = &self.grammar else {
            return Begins::No;
        };
        let text = &cut.text[self.searched..];
        if self.parser.calls_come_first {
            match starts(text, self.parser.openers, is_end) {
                Starts::With(_) => {
                    cut.hide(self.searched);
                    self.state = State::Calls;
                    return Begins::Yes;
                }
                Starts::Maybe => return Begins::Unknown,
                Starts::No => {}
            }
        }
        let begins = grammar.begins_at_start(text, is_end);
        if begins == Begins::Yes {
            self.state = State::Calls;
        }
        begins
    }

    fn reasoning_start(&mut self, cut: &mut Cut, is_end: bool) -> bool {
        self.searched = skip_blank(&cut.text, self.searched);
        let text = &cut.text[self.searched..];
        let open = self.think.map_or("", |think| think.open);
        match starts(text, &[open], is_end) {
            Starts::With(_) => cut.hide(self.searched + open.len()),
            Starts::Maybe => return false,
            Starts::No => self.searched = cut.position(),
        }
        self.enter_newlines(self.newlines.after_open, Region::Reasoning)
    }

    fn newlines(&mut self, cut: &mut Cut, left: usize, before: Region, is_end: bool) -> bool {
        if left > 0 && cut.rest().is_empty() && !is_end {
            return false;
        }
        if left > 0 && cut.rest().starts_with('\n') {
            cut.hide(cut.position() + 1);
            return self.enter_newlines(left - 1, before);
        }
        match before {
            Region::Reasoning => {
                self.searched = cut.position();
                self.state = State::Reasoning;
            }
            Region::Content => self.enter_content(cut, true, false),
        }
        true
    }

    fn reasoning(&mut self, cut: &mut Cut, is_end: bool) -> bool {
        let close = self.think.map_or("", |think| think.close);
        match find(&cut.text, self.searched, &[close], is_end) {
            Found::At { at, .. } => {
                cut.reasoning(cut.without_newlines(at, self.newlines.before_close));
                cut.hide(at + close.len());
                self.enter_newlines(self.newlines.after_close, Region::Content)
            }
            Found::NotBefore(place) => {
                let held = if is_end {
                    0
                } else {
                    self.newlines.before_close
                };
                cut.reasoning(cut.without_newlines(place, held));
                self.searched = place;
                false
            }
        }
    }

    fn content(
        &mut self,
        cut: &mut Cut,
        mut is_blank: bool,
        after_call: bool,
        is_end: bool,
    ) -> bool {
        let openers = match &self.grammar {
            Some(_) if !self.parser.calls_come_first => self.parser.openers,
            _ => &[],
        };
        let from = self.searched;
        let found = find(&cut.text, from, openers, is_end);
        let (Found::At { at: place, .. } | Found::NotBefore(place)) = found;
        is_blank = is_blank && skip_blank(&cut.text[..place], from.min(place)) == place;
        let held = self.newlines.before_call;
        match found {
            Found::At { at, .. } => {
                if !is_blank {
                    cut.content(cut.without_newlines(at, held));
                }
                cut.hide(at);
                self.state = State::Calls;
                return true;
            }
            // Without calls there is nothing to hold back for.
            Found::NotBefore(place) if openers.is_empty() && !after_call => cut.content(place),
            Found::NotBefore(place) if is_blank && is_end && after_call => cut.hide(place),
            Found::NotBefore(place) if is_end => cut.content(place),
            Found::NotBefore(place) if !is_blank => cut.content(cut.without_newlines(place, held)),
            Found::NotBefore(_) => {}
        }
        self.searched = place;
        self.state = State::Content {
            is_blank,
            after_call,
        };
        false
    }

    fn calls(&mut self, cut: &mut Cut, is_end: bool) -> bool {
        let step = match &mut self.grammar {
            Some(grammar) => grammar.step(cut, is_end),
            None => Step::Done { after_call: false },
        };
        match step {
            Step::Wait => return false,
            Step::Next => {}
            Step::Done { after_call: true } if self.parser.calls_come_first => {
                self.searched = cut.position();
                self.state = State::AfterCall;
            }
            Step::Done { after_call } => self.enter_content(cut, after_call, after_call),
        }
        true
    }

    fn enter_newlines(&mut self, left: usize, before: Region) -> bool {
        self.state = State::Newlines { left, before };
        true
    }

    fn enter_content(&mut self, cut: &Cut, is_blank: bool, after_call: bool) {
        self.searched = cut.position();
        self.state = State::Content {
            is_blank,
            after_call,
        };
    }
}
