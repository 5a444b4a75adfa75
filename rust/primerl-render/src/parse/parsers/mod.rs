//! The parsers of this crate, one file each. A new one is a file here and one line in [`TOOL_PARSERS`].

mod cohere;
mod deepseek;
mod deepseek_v32;
pub(super) mod gemma4;
mod glm;
pub(super) mod harmony;
mod hermes;
mod kimi;
mod llama3_json;
mod llama3_pythonic;
mod minimax;
mod mistral;
mod qwen3_coder;
mod reasoning;

use super::protocol::ToolParser;
pub(super) use reasoning::REASONING_PARSERS;

/// In the order in which they are listed to users.
pub(super) static TOOL_PARSERS: [&ToolParser; 14] = [
    &hermes::PARSER,
    &qwen3_coder::PARSER,
    &llama3_json::PARSER,
    &llama3_pythonic::PARSER,
    &glm::PARSER,
    &kimi::PARSER,
    &deepseek::PARSER,
    &deepseek_v32::PARSER,
    &gemma4::PARSER,
    &cohere::PARSER,
    &harmony::PARSER,
    &minimax::PARSER,
    &mistral::PARSER,
    &ToolParser::NONE,
];
