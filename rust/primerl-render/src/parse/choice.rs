//! Which parsers an answer of a model needs.

use super::description::Description;
use super::parsers::{REASONING_PARSERS, TOOL_PARSERS, harmony};
use super::protocol::{ReasoningParser, Syntax, ThinkMarkers, ToolParser};
use crate::error::LoadError;
use serde::{Deserialize, Deserializer, de};
use serde_json::Value;

/// Names that a tool parser can be set by.
pub fn tool_parsers() -> impl Iterator<Item = &'static str> {
    TOOL_PARSERS.iter().map(|parser| parser.name)
}

/// Names that a reasoning parser can be set by.
pub fn reasoning_parsers() -> impl Iterator<Item = &'static str> {
    REASONING_PARSERS.iter().map(|parser| parser.name)
}

/// A parser that is set by hand.
#[derive(Clone, Debug)]
pub enum ParserSetting {
    /// One of [`tool_parsers`] or [`reasoning_parsers`].
    Name(String),
    /// One that is not ours.
    Description(Box<Description>),
}

impl<'de> Deserialize<'de> for ParserSetting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(name) => Ok(Self::Name(name)),
            value => match Description::from_json(value) {
                Ok(description) => Ok(Self::Description(Box::new(description))),
                Err(error) => Err(de::Error::custom(error)),
            },
        }
    }
}

/// The parsers of a model.
#[derive(Clone, Copy)]
pub struct ParserChoice {
    pub(super) tool: &'static ToolParser,
    pub(super) reasoning: &'static ReasoningParser,
}

impl ParserChoice {
    /// By what the chat template writes; by `model_type` of `config.json` where the template writes no calls.
    pub fn of_model(template: &str, model_type: Option<&str>) -> Self {
        let is_in_template = |rows: &[&[&str]]| {
            let holds_all = |row: &&[&str]| row.iter().all(|text| template.contains(text));
            rows.iter().any(holds_all)
        };
        let is_of_type = |types: &[&str]| model_type.is_some_and(|name| types.contains(&name));
        let by_template = TOOL_PARSERS
            .iter()
            .filter(|parser| is_in_template(parser.templates))
            .min_by_key(|parser| parser.rank);
        let tool = by_template.or_else(|| {
            let mut parsers = TOOL_PARSERS.iter();
            parsers.find(|parser| is_of_type(parser.model_types))
        });
        let reasoning = REASONING_PARSERS
            .iter()
            .filter(|parser| is_in_template(parser.templates) || is_of_type(parser.model_types))
            .min_by_key(|parser| parser.rank);
        Self {
            tool: tool.copied().unwrap_or(&ToolParser::NONE),
            reasoning: reasoning.copied().unwrap_or(&ReasoningParser::NONE),
        }
    }

    /// With parsers set by hand. A description that has reasoning markers sets both, unless another one is given.
    pub(crate) fn with(
        self,
        tool: Option<&ParserSetting>,
        reasoning: Option<&ParserSetting>,
    ) -> Result<Self, LoadError> {
        let described = match tool {
            Some(ParserSetting::Description(description)) => description.reasoning_parser(),
            _ => None,
        };
        let tool = tool.map(tool_of).transpose()?;
        let reasoning = reasoning.map(reasoning_of).transpose()?;
        Ok(Self {
            tool: tool.unwrap_or(self.tool),
            reasoning: reasoning.or(described).unwrap_or(self.reasoning),
        })
    }

    /// The tool parser's name.
    pub fn tool(&self) -> &'static str {
        self.tool.name
    }

    /// The reasoning parser's name.
    pub fn reasoning(&self) -> &'static str {
        self.reasoning.name
    }

    /// Whether answers are in channels, which the Harmony parser reads.
    pub fn is_harmony(&self) -> bool {
        self.reads_harmony_calls() || self.reads_harmony_reasoning()
    }

    pub(super) fn reads_harmony_calls(&self) -> bool {
        matches!(self.tool.syntax, Syntax::Harmony)
    }

    pub(super) fn reads_harmony_reasoning(&self) -> bool {
        self.reasoning.is_harmony
    }

    pub(crate) fn think(&self) -> Option<&'static ThinkMarkers> {
        self.reasoning.markers.as_ref()
    }

    /// Whether this special token is hidden only where it is read as a marker.
    pub(super) fn has_marker(&self, token: &str) -> bool {
        match self.tool.syntax {
            Syntax::None if self.reads_harmony_reasoning() => harmony::PARSER.has_marker(token),
            _ => self.tool.has_marker(token),
        }
    }
}

fn tool_of(setting: &ParserSetting) -> Result<&'static ToolParser, LoadError> {
    match setting {
        ParserSetting::Name(name) => {
            let known = TOOL_PARSERS.iter().find(|parser| parser.name == name);
            let known = known.copied();
            known.ok_or_else(|| unknown("tool", name, tool_parsers()))
        }
        ParserSetting::Description(description) => description
            .tool_parser()
            .ok_or_else(|| not_described("tool", "format", description)),
    }
}

fn reasoning_of(setting: &ParserSetting) -> Result<&'static ReasoningParser, LoadError> {
    match setting {
        ParserSetting::Name(name) => {
            let known = REASONING_PARSERS.iter().find(|parser| parser.name == name);
            let known = known.copied();
            known.ok_or_else(|| unknown("reasoning", name, reasoning_parsers()))
        }
        ParserSetting::Description(description) => description
            .reasoning_parser()
            .ok_or_else(|| not_described("reasoning", "reasoning", description)),
    }
}

fn not_described(kind: &'static str, field: &'static str, description: &Description) -> LoadError {
    LoadError::NotDescribed {
        kind,
        field,
        name: description.name.clone(),
    }
}

fn unknown(kind: &'static str, name: &str, known: impl Iterator<Item = &'static str>) -> LoadError {
    LoadError::UnknownParser {
        kind,
        name: name.to_owned(),
        known: known.collect::<Vec<_>>().join(", "),
    }
}
