//! Which parsers an answer of a model needs.

use super::machine::{COHERE_THINK, GEMMA_THINK, MISTRAL_THINK, THINK, ThinkMarkers};
use super::tagged::{Syntax, Tagged};
use super::{CallGrammar, cohere, deepseek, dsml, gemma, glm, harmony, hermes, kimi, llama};
use super::{minimax, mistral, pythonic, qwen3_coder};
use crate::error::LoadError;
use serde_json::Value;

/// Names that a tool parser can be set by.
pub const TOOL_PARSERS: [&str; 14] = [
    "hermes",
    "qwen3_coder",
    "llama3_json",
    "llama3_pythonic",
    "glm",
    "kimi",
    "deepseek",
    "deepseek_v32",
    "gemma4",
    "cohere",
    "harmony",
    "minimax",
    "mistral",
    "none",
];
/// Names that a reasoning parser can be set by.
pub const REASONING_PARSERS: [&str; 6] =
    ["think", "mistral", "gemma4", "cohere", "harmony", "none"];

/// The parsers of a model, by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParserChoice {
    /// One of [`TOOL_PARSERS`].
    pub tool: &'static str,
    /// One of [`REASONING_PARSERS`].
    pub reasoning: &'static str,
}

impl ParserChoice {
    pub const NONE: Self = Self {
        tool: "none",
        reasoning: "none",
    };

    /// By what the chat template writes; by `model_type` of `config.json` where the template writes no calls.
    pub fn of_model(template: &str, model_type: Option<&str>) -> Self {
        Self {
            tool: tool_of_template(template)
                .or_else(|| tool_of_model(model_type?))
                .unwrap_or("none"),
            reasoning: reasoning_of_template(template, model_type),
        }
    }

    /// With parsers set by hand.
    pub(crate) fn with(
        self,
        tool: Option<&str>,
        reasoning: Option<&str>,
    ) -> Result<Self, LoadError> {
        let chosen = |kind, known: &[&'static str], name: Option<&str>, default| match name {
            None => Ok(default),
            Some(name) => known
                .iter()
                .find(|known| **known == name)
                .copied()
                .ok_or_else(|| LoadError::UnknownParser {
                    kind,
                    name: name.to_owned(),
                    known: known.join(", "),
                }),
        };
        Ok(Self {
            tool: chosen("tool", &TOOL_PARSERS, tool, self.tool)?,
            reasoning: chosen("reasoning", &REASONING_PARSERS, reasoning, self.reasoning)?,
        })
    }

    pub(crate) fn think(&self) -> Option<&'static ThinkMarkers> {
        match self.reasoning {
            "think" => Some(&THINK),
            "mistral" => Some(&MISTRAL_THINK),
            "gemma4" => Some(&GEMMA_THINK),
            "cohere" => Some(&COHERE_THINK),
            _ => None,
        }
    }

    /// A reader of calls for one answer; none for parsers that are no [`CallGrammar`].
    pub(super) fn grammar(&self, tools: &[Value]) -> Option<Box<dyn CallGrammar>> {
        if let Some(syntax) = self.syntax() {
            return Some(Box::new(Tagged::new(syntax, tools)));
        }
        match self.tool {
            "llama3_json" => Some(Box::new(llama::LlamaJson::new(tools))),
            "llama3_pythonic" => Some(Box::new(pythonic::Pythonic::new())),
            "mistral" => Some(Box::new(mistral::Mistral::new())),
            "cohere" => Some(Box::new(cohere::Cohere::new())),
            _ => None,
        }
    }

    /// Markers of the tool syntax. As special tokens they are hidden only where they are read as such.
    pub(super) fn markers(&self) -> &'static [&'static str] {
        match (self.syntax(), self.tool) {
            (Some(syntax), _) => syntax.markers,
            (None, "llama3_json") => &llama::MARKERS,
            (None, "llama3_pythonic") => &pythonic::MARKERS,
            (None, "mistral") => &mistral::MARKERS,
            (None, "cohere") => &cohere::MARKERS,
            _ if self.is_harmony() => &harmony::MARKERS,
            _ => &[],
        }
    }

    pub(super) fn is_harmony(&self) -> bool {
        self.tool == "harmony" || self.reasoning == "harmony"
    }

    fn syntax(&self) -> Option<&'static Syntax> {
        match self.tool {
            "hermes" => Some(&hermes::SYNTAX),
            "qwen3_coder" => Some(&qwen3_coder::SYNTAX),
            "glm" => Some(&glm::SYNTAX),
            "kimi" => Some(&kimi::SYNTAX),
            "deepseek" => Some(&deepseek::SYNTAX),
            "deepseek_v32" => Some(&dsml::SYNTAX),
            "gemma4" => Some(&gemma::SYNTAX),
            "minimax" => Some(&minimax::SYNTAX),
            _ => None,
        }
    }
}

// The first match counts: later texts occur in the templates of several families.
fn tool_of_template(template: &str) -> Option<&'static str> {
    let says = |text: &str| template.contains(text);
    let families = [
        ("harmony", is_harmony(template)),
        ("kimi", says("<|tool_calls_section_begin|>")),
        ("deepseek_v32", says("｜DSML｜")),
        ("deepseek", says("<｜tool▁calls▁begin｜>")),
        ("gemma4", says("<|tool_call>call:")),
        ("cohere", says("<|START_ACTION|>")),
        ("minimax", says("<minimax:tool_call>")),
        ("glm", says("<tool_call>") && says("<arg_key>")),
        ("qwen3_coder", says("<function=") && says("<parameter=")),
        ("hermes", says("<tool_call>")),
        ("mistral", says("[TOOL_CALLS]")),
        (
            "llama3_pythonic",
            says("<|tool_call_start|>[") || says("<|python_start|>"),
        ),
        (
            "llama3_json",
            says("<|start_header_id|>") && says("\"parameters\": "),
        ),
    ];
    families.iter().find(|(_, is)| *is).map(|(name, _)| *name)
}

// Models whose folder may come without a template, or with one that knows no tools.
fn tool_of_model(model_type: &str) -> Option<&'static str> {
    match model_type {
        "gpt_oss" => Some("harmony"),
        "kimi_k2" => Some("kimi"),
        "deepseek_v3" => Some("deepseek"),
        "deepseek_v32" | "deepseek_v4" => Some("deepseek_v32"),
        "minimax_m2" => Some("minimax"),
        "glm4_moe" => Some("glm"),
        "llama4" => Some("llama3_pythonic"),
        "mistral" | "mistral3" | "mixtral" => Some("mistral"),
        _ => None,
    }
}

fn reasoning_of_template(template: &str, model_type: Option<&str>) -> &'static str {
    if is_harmony(template) || model_type == Some("gpt_oss") {
        "harmony"
    } else if template.contains("[THINK]") {
        "mistral"
    } else if template.contains(GEMMA_THINK.close) {
        "gemma4"
    } else if template.contains(COHERE_THINK.open) {
        "cohere"
    } else if template.contains("</think>") || model_type == Some("minimax_m2") {
        "think"
    } else {
        "none"
    }
}

fn is_harmony(template: &str) -> bool {
    ["<|channel|>", "<|message|>", "analysis"]
        .iter()
        .all(|text| template.contains(text))
}
