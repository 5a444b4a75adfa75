//! The reasoning parsers: between which markers the models of a family think.

use super::harmony;
use crate::parse::protocol::{ReasoningParser, ThinkMarkers};

const NONE: ReasoningParser = ReasoningParser::NONE;

const fn between(open: &'static str, close: &'static str) -> Option<ThinkMarkers> {
    Some(ThinkMarkers { open, close })
}

/// In the order in which they are listed to users.
pub(in crate::parse) static REASONING_PARSERS: [&ReasoningParser; 6] = [
    &ReasoningParser {
        name: "think",
        templates: &[&["</think>"]],
        rank: 2,
        model_types: &["minimax_m2"],
        markers: between("<think>", "</think>"),
        ..NONE
    },
    &ReasoningParser {
        name: "mistral",
        templates: &[&["[THINK]"]],
        markers: between("[THINK]", "[/THINK]"),
        ..NONE
    },
    &ReasoningParser {
        name: "gemma4",
        templates: &[&["<channel|>"]],
        markers: between("<|channel>thought", "<channel|>"),
        ..NONE
    },
    &ReasoningParser {
        name: "cohere",
        templates: &[&["<|START_THINKING|>"]],
        markers: between("<|START_THINKING|>", "<|END_THINKING|>"),
        ..NONE
    },
    &ReasoningParser {
        name: "harmony",
        templates: harmony::PARSER.templates,
        rank: 0,
        model_types: harmony::PARSER.model_types,
        is_harmony: true,
        ..NONE
    },
    &NONE,
];
