//! What a parser is: the description of one syntax of tool calls, or of one pair of reasoning markers, and the trait that
//! reads calls. Each parser is one file in [`super::parsers`].

use super::cut::Cut;
use super::demand::Form;
use super::{CallProblem, list, tagged};
use crate::message::{FunctionCall, ToolCall};
use serde_json::{Map, Value};

/// How the models of one family write tool calls.
pub(super) struct ToolParser {
    pub name: &'static str,
    /// A chat template is of this family if it contains all texts of one of these rows.
    pub templates: &'static [&'static [&'static str]],
    /// Of the parsers that recognise a template the one with the lowest rank is chosen, then the first of the table. Texts
    /// of the higher ranks occur in templates of other families too.
    pub rank: u8,
    /// `model_type` of `config.json` of models that may come without a template, or with one that knows no tools.
    pub model_types: &'static [&'static str],
    /// Texts that begin a call anywhere in the content.
    pub openers: &'static [&'static str],
    /// An opener counts at the start of an answer and after a call only.
    pub calls_come_first: bool,
    pub syntax: Syntax,
    /// Special tokens of the syntax that are not in `syntax`.
    pub special: &'static [&'static str],
    /// Newlines between content and the first call, where the template does not show them.
    pub newlines_before_call: usize,
    /// How calls are written exactly, for answers that must call a tool. None: they cannot be demanded.
    pub forms: &'static [Form],
    /// The reasoning parser that the family's models usually need.
    #[cfg_attr(
        not(feature = "testing"),
        expect(dead_code, reason = "fuzzers take parsers in pairs")
    )]
    pub reasoning: &'static str,
}

impl ToolParser {
    /// Reads no calls: the base of the others.
    pub const NONE: Self = Self {
        name: "none",
        templates: &[],
        rank: 1,
        model_types: &[],
        openers: &[],
        calls_come_first: false,
        syntax: Syntax::None,
        special: &[],
        newlines_before_call: 1,
        forms: &[],
        reasoning: "think",
    };

    /// The reader of calls for one answer to a request with these tools.
    pub fn grammar(&'static self, tools: &[Value]) -> Option<Box<dyn CallGrammar>> {
        match &self.syntax {
            Syntax::None | Syntax::Harmony => None,
            Syntax::Tagged(syntax) => Some(Box::new(tagged::Tagged::new(syntax, tools))),
            Syntax::List(syntax) => Some(Box::new(list::List::new(syntax))),
            Syntax::Own(new) => Some(new(tools)),
        }
    }

    /// Whether this special token is part of the syntax: it is hidden only where it is read as such.
    pub fn has_marker(&self, token: &str) -> bool {
        self.openers.contains(&token)
            || self.special.contains(&token)
            || match &self.syntax {
                Syntax::Tagged(syntax) => syntax.has_marker(token),
                Syntax::List(syntax) => syntax.pairs.as_flattened().contains(&token),
                Syntax::None | Syntax::Own(_) | Syntax::Harmony => false,
            }
    }
}

/// Which machinery reads the calls.
pub(super) enum Syntax {
    /// Calls stay text.
    None,
    /// Each call is between markers.
    Tagged(tagged::TaggedSyntax),
    /// All calls are one list, after a marker.
    List(list::ListSyntax),
    /// A reader of the family's own, for one answer to a request with these tools.
    Own(fn(&[Value]) -> Box<dyn CallGrammar>),
    /// The whole answer has a structure of its own ([`super::parsers::harmony`]).
    Harmony,
}

/// Where the models of one family write their reasoning: first and once, or in channels (Harmony).
pub(super) struct ReasoningParser {
    pub name: &'static str,
    /// As in [`ToolParser`].
    pub templates: &'static [&'static [&'static str]],
    pub rank: u8,
    pub model_types: &'static [&'static str],
    pub markers: Option<ThinkMarkers>,
    /// Reasoning is in a channel of its own.
    pub is_harmony: bool,
}

impl ReasoningParser {
    /// Reads no reasoning: the base of the others.
    pub const NONE: Self = Self {
        name: "none",
        templates: &[],
        rank: 1,
        model_types: &[],
        markers: None,
        is_harmony: false,
    };
}

/// The markers of a reasoning block.
pub(crate) struct ThinkMarkers {
    pub open: &'static str,
    pub close: &'static str,
}

/// Reads tool calls out of the text. One implementation a syntax; the state of one answer lives in it.
pub(super) trait CallGrammar: Send {
    /// Whether an answer may begin with a call that has no opener. `text` begins at its first letter.
    fn begins_at_start(&self, _text: &str, _is_end: bool) -> Begins {
        Begins::No
    }

    /// Cuts the next piece of a call. At first `cut` is at an opener, or at the start of an answer that begins with a call.
    fn step(&mut self, cut: &mut Cut, is_end: bool) -> Step;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Begins {
    Yes,
    No,
    /// More text decides.
    Unknown,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Needs more text; never at the end of the answer.
    Wait,
    /// The next step can be taken with the text at hand.
    Next,
    /// What follows is content again.
    Done { after_call: bool },
}

/// A call as a family's reader finds it.
#[derive(Debug)]
pub(super) struct Call {
    pub id: Option<String>,
    pub name: String,
    /// Text of a JSON object.
    pub arguments: String,
}

impl Call {
    pub fn new(name: &str, arguments: String) -> Result<Self, CallProblem> {
        if name.is_empty() {
            return Err(CallProblem::NoName);
        }
        Ok(Self {
            id: None,
            name: name.to_owned(),
            arguments,
        })
    }

    pub fn into_tool_call(self) -> ToolCall {
        ToolCall {
            id: self.id,
            kind: Some("function".to_owned()),
            function: FunctionCall {
                name: self.name,
                arguments: Value::String(self.arguments),
            },
            extra: Map::new(),
        }
    }
}
