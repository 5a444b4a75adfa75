//! A parser that is data: how a model that we do not know writes tool calls and reasoning. It is read when the model is
//! loaded, and runs on the machinery of the parsers in [`super::parsers`].

use super::json::Keys;
use super::list::{Items, ListSyntax};
use super::pairs::Pairs;
use super::protocol::{ReasoningParser, Syntax, ThinkMarkers, ToolParser};
use super::tagged::{Read, TaggedSyntax};
use serde::Deserialize;
use serde_json::Value;
use std::sync::{Mutex, PoisonError};

/// What comes before a part of an answer and what comes after it.
type Markers = [String; 2];

/// How a model writes tool calls and reasoning. `docs/render.md` describes the fields.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    #[serde(default = "unnamed")]
    pub(super) name: String,
    /// None: it describes reasoning only.
    format: Option<Format>,
    call: Option<Markers>,
    calls: Option<Markers>,
    #[serde(default)]
    position: Position,
    #[serde(default)]
    special_tokens: Vec<String>,
    json: Option<JsonFields>,
    tagged: Option<TaggedFields>,
    reasoning: Option<Markers>,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    Json,
    Pythonic,
    Tagged,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Position {
    #[default]
    Anywhere,
    Start,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct JsonFields {
    name: Option<String>,
    arguments: Option<String>,
    name_end: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaggedFields {
    #[serde(default)]
    function: Markers,
    #[serde(default)]
    name_end: String,
    key: Markers,
    value: Markers,
    #[serde(default)]
    quoted: bool,
    #[serde(default)]
    line_breaks: bool,
}

/// A description that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}")]
pub struct DescriptionError {
    pub field: String,
    pub problem: String,
}

const BEGINS_BLANK: &str = "begins with white space, which is skipped; leave it out";

fn unnamed() -> String {
    "described".to_owned()
}

fn refused<T>(field: &str, problem: impl Into<String>) -> Result<T, DescriptionError> {
    Err(DescriptionError {
        field: field.to_owned(),
        problem: problem.into(),
    })
}

fn begins_blank(text: &str) -> bool {
    text.trim_start() != text
}

impl TaggedFields {
    fn check(&self) -> Result<(), DescriptionError> {
        let needed = [
            ("tagged.key[0]", &self.key[0]),
            ("tagged.key[1]", &self.key[1]),
            ("tagged.value[1]", &self.value[1]),
        ];
        if let Some((field, _)) = needed.iter().find(|(_, text)| text.is_empty()) {
            let problem = "\"\" ends nothing; give the text that the model writes";
            return refused(field, problem);
        }
        let after_blank = [
            ("tagged.function[0]", &self.function[0]),
            ("tagged.key[0]", &self.key[0]),
            ("tagged.value[0]", &self.value[0]),
        ];
        if let Some((field, text)) = after_blank.iter().find(|(_, text)| begins_blank(text)) {
            return refused(field, format!("{text:?} {BEGINS_BLANK}"));
        }
        let end = &self.function[1];
        if end.trim_end() != end {
            let problem = format!("{end:?} ends with white space, which is skipped; leave it out");
            return refused("tagged.function[1]", problem);
        }
        Ok(())
    }
}

impl Description {
    /// Reads a description and checks it.
    pub fn from_json(value: Value) -> Result<Self, DescriptionError> {
        let described: Self = serde_path_to_error::deserialize(value).map_err(|error| {
            let path = error.path().to_string();
            DescriptionError {
                field: if path == "." { "parser".into() } else { path },
                problem: error.into_inner().to_string(),
            }
        })?;
        described.check_markers()?;
        described.check_format()?;
        Ok(described)
    }

    fn check_markers(&self) -> Result<(), DescriptionError> {
        let around = [
            ("call", &self.call, false),
            // A list ends by itself.
            ("calls", &self.calls, self.call.is_none()),
            ("reasoning", &self.reasoning, false),
        ];
        for (field, markers, may_stay_open) in around {
            let Some([open, close]) = markers else {
                continue;
            };
            if open.is_empty() || close.is_empty() && !may_stay_open {
                return refused(field, format!("[{open:?}, {close:?}] has an empty marker"));
            }
            if begins_blank(open) || begins_blank(close) {
                return refused(field, format!("[{open:?}, {close:?}] {BEGINS_BLANK}"));
            }
        }
        match &self.tagged {
            Some(tagged) => tagged.check(),
            None => Ok(()),
        }
    }

    fn check_format(&self) -> Result<(), DescriptionError> {
        let Some(format) = self.format else {
            return match self.reasoning {
                Some(_) => Ok(()),
                None => refused(
                    "format",
                    "is missing; it is \"json\", \"pythonic\" or \"tagged\"",
                ),
            };
        };
        if self.json.is_some() && format != Format::Json {
            return refused("json", "belongs to format = \"json\"");
        }
        if self.tagged.is_some() && format != Format::Tagged {
            return refused("tagged", "belongs to format = \"tagged\"");
        }
        self.check_call_markers(format)
    }

    fn check_call_markers(&self, format: Format) -> Result<(), DescriptionError> {
        let json = self.json.as_ref();
        let has_name_end = json.is_some_and(|json| json.name_end.is_some());
        match (format, &self.call, &self.calls) {
            (Format::Pythonic, Some(_), _) => refused(
                "call",
                "calls in Python's syntax are one list; give the markers around it as `calls`",
            ),
            (Format::Json, None, None) => refused(
                "call",
                "is missing; give the markers around a call, or `calls` around a list of calls",
            ),
            (Format::Json, None, Some(_)) if has_name_end => {
                refused("json.name_end", "needs the markers around a call, `call`")
            }
            (Format::Tagged, None, _) => {
                refused("call", "is missing; give the markers around a call")
            }
            (Format::Tagged, ..) if self.tagged.is_none() => refused(
                "tagged",
                "is missing; it says what is around keys and values",
            ),
            _ => Ok(()),
        }
    }

    /// Both parsers. Parsers live as long as the process, ours as those that are described; a description that is used
    /// again gives the same ones.
    fn parsers(&self) -> Parsers {
        static KNOWN: Mutex<Vec<(Description, Parsers)>> = Mutex::new(Vec::new());
        let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, parsers)) = known.iter().find(|(description, _)| description == self) {
            return *parsers;
        }
        let parsers = Parsers {
            tool: self.format.map(|format| leak(self.new_tool_parser(format))),
            reasoning: self.reasoning.as_ref().map(|markers| {
                let [open, close] = pair(markers);
                leak(ReasoningParser {
                    name: text(&self.name),
                    markers: Some(ThinkMarkers { open, close }),
                    ..ReasoningParser::NONE
                })
            }),
        };
        known.push((self.clone(), parsers));
        parsers
    }

    /// None: it describes reasoning only.
    pub(super) fn tool_parser(&self) -> Option<&'static ToolParser> {
        self.parsers().tool
    }

    /// None: it describes no reasoning.
    pub(super) fn reasoning_parser(&self) -> Option<&'static ReasoningParser> {
        self.parsers().reasoning
    }

    fn new_tool_parser(&self, format: Format) -> ToolParser {
        let outer = self.calls.as_ref().or(self.call.as_ref());
        ToolParser {
            name: text(&self.name),
            openers: texts(outer.iter().map(|[open, _]| text(open))),
            calls_come_first: self.position == Position::Start,
            syntax: self.syntax(format),
            special: texts(self.special_tokens.iter().map(|token| text(token))),
            ..ToolParser::NONE
        }
    }

    fn syntax(&self, format: Format) -> Syntax {
        let pairs = |markers: &Option<Markers>| texts(markers.iter().map(pair));
        match &self.call {
            None => Syntax::List(ListSyntax {
                pairs: pairs(&self.calls),
                items: match format {
                    Format::Pythonic => Items::Python,
                    _ => Items::Json(self.keys()),
                },
                stands_alone: self.calls.is_none(),
            }),
            Some(_) => Syntax::Tagged(TaggedSyntax {
                sections: pairs(&self.calls),
                calls: pairs(&self.call),
                read: self.read(),
            }),
        }
    }

    fn read(&self) -> Read {
        if let Some(tagged) = &self.tagged {
            return Read::Pairs(Pairs {
                function: pair(&tagged.function),
                name_end: text(&tagged.name_end),
                key: pair(&tagged.key),
                value: pair(&tagged.value),
                are_quoted: tagged.quoted,
                have_line_breaks: tagged.line_breaks,
            });
        }
        let name_end = self.json.as_ref().and_then(|json| json.name_end.as_ref());
        match name_end {
            Some(name_end) => Read::Named(text(name_end)),
            None => Read::Json(self.keys()),
        }
    }

    fn keys(&self) -> Keys {
        let usual = Keys::USUAL;
        let Some(json) = &self.json else {
            return usual;
        };
        let arguments = json.arguments.iter().map(|name| text(name));
        Keys {
            name: json.name.as_deref().map_or(usual.name, text),
            arguments: match json.arguments {
                Some(_) => texts(arguments),
                None => usual.arguments,
            },
        }
    }
}

#[derive(Clone, Copy)]
struct Parsers {
    tool: Option<&'static ToolParser>,
    reasoning: Option<&'static ReasoningParser>,
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn text(text: &str) -> &'static str {
    Box::leak(text.into())
}

fn pair([open, close]: &Markers) -> [&'static str; 2] {
    [text(open), text(close)]
}

fn texts<T>(texts: impl Iterator<Item = T>) -> &'static [T] {
    Box::leak(texts.collect())
}
