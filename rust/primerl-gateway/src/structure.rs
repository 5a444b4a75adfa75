//! The structure that an answer's tokens must follow: the client's format, a tool call that it demands, or either of
//! the two.

use super::request::{Parse, TurnRequest};
use super::sampling::Demanded;
use super::text::Reading;
use primerl_render::{Demand, DemandError, Renderer};
use primerl_service::http::ApiError;
use serde_json::{Value, json};

/// Sent to the engine with the request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Structure {
    /// vLLM's `structured_outputs`.
    pub outputs: Value,
    /// The reasoning block before it: `{"open"?, "close"}`. vLLM uses its own reasoning parser instead.
    pub reasoning: Option<Value>,
}

const TOOL_CHOICE: &str = "tool_choice";
const FORMAT: &str = "response_format";

/// `suffix`: the last ids of the prompt, including the generation prompt. `None`: the answer is not constrained.
///
/// # Errors
/// This model's calls cannot be demanded, or the demand contradicts itself.
pub(super) fn of(
    renderer: &Renderer,
    request: &TurnRequest,
    reading: &Reading,
    suffix: &[u32],
) -> Result<Option<Structure>, ApiError> {
    let format = request.sampling.structured_outputs.as_ref();
    let demanded = request.sampling.demanded.as_ref();
    if format.is_none() && demanded.is_none() {
        return Ok(None);
    }
    let Parse::Message { one_call } = request.parse else {
        return Ok(format.cloned().map(Structure::of_text));
    };
    let options = reading.options.as_ref();
    let wanted = Wanted {
        format,
        demanded,
        tools: options.and_then(|options| options.render.tools.as_deref()),
        one_call,
    };
    let outputs = wanted.outputs(renderer, suffix)?;
    let reasoning = reasoning_ahead(renderer, suffix);
    Ok(Some(Structure { outputs, reasoning }))
}

impl Structure {
    /// For an answer that is parsed for nothing.
    fn of_text(outputs: Value) -> Structure {
        Structure {
            outputs,
            reasoning: None,
        }
    }
}

fn reasoning_ahead(renderer: &Renderer, suffix: &[u32]) -> Option<Value> {
    let (open, close) = renderer.reasoning_ahead(suffix)?;
    Some(match open {
        Some(open) => json!({"open": open, "close": close}),
        None => json!({"close": close}),
    })
}

/// What a request wants of its answer.
struct Wanted<'a> {
    format: Option<&'a Value>,
    demanded: Option<&'a Demanded>,
    tools: Option<&'a [Value]>,
    one_call: bool,
}

impl Wanted<'_> {
    fn outputs(&self, renderer: &Renderer, suffix: &[u32]) -> Result<Value, ApiError> {
        if self.format.is_some() && renderer.parsers().is_harmony() {
            return Err(refused(
                FORMAT,
                "this model answers in channels (harmony), and only calls have a grammar there",
            ));
        }
        match (self.format, self.demanded, self.tools) {
            (Some(_), Some(_), _) => Err(refused(
                TOOL_CHOICE,
                "an answer with a format cannot be required to be a tool call; omit one of the two",
            )),
            (Some(format), None, None) => Ok(format.clone()),
            (Some(format), None, Some(_)) => {
                let schema = schema(format).ok_or_else(not_a_schema)?;
                let demand = Demand {
                    or_json: Some(&schema),
                    ..self.demand(suffix)
                };
                grammar(renderer, &demand, FORMAT)
            }
            (None, _, _) => grammar(renderer, &self.demand(suffix), TOOL_CHOICE),
        }
    }

    fn demand<'a>(&'a self, suffix: &'a [u32]) -> Demand<'a> {
        let name = match self.demanded {
            Some(Demanded::Tool(name)) => Some(name.as_str()),
            _ => None,
        };
        Demand {
            tools: self.tools.unwrap_or_default(),
            name,
            one_call: self.one_call,
            or_json: None,
            prompt: suffix,
        }
    }
}

fn not_a_schema() -> ApiError {
    refused(
        FORMAT,
        "with tools, an answer may have a JSON schema, but no other structured output; omit one of the two",
    )
}

fn schema(format: &Value) -> Option<Value> {
    match &format["json"] {
        schema @ Value::Object(_) => Some(schema.clone()),
        Value::String(text) => serde_json::from_str(text).ok(),
        _ if format["json_object"] == true => Some(json!({"type": "object"})),
        _ => None,
    }
}

fn grammar(renderer: &Renderer, demand: &Demand<'_>, name: &str) -> Result<Value, ApiError> {
    match renderer.call_grammar(demand) {
        Ok(grammar) => Ok(json!({"grammar": grammar})),
        Err(error @ DemandError::Family(_)) if name == FORMAT => {
            let problem = format!(
                "with tools, an answer is a tool call or has the format, but {error}; omit the tools"
            );
            Err(refused(name, &problem))
        }
        Err(error @ DemandError::Family(_)) => Err(refused(
            name,
            &format!("{error}; omit it, and ask for the tool call in the prompt"),
        )),
        Err(error) => Err(ApiError::invalid(format!("{name}: {error}")).param(name)),
    }
}

fn refused(name: &str, problem: &str) -> ApiError {
    ApiError::invalid(format!("{name} is not supported here: {problem}"))
        .param(name)
        .code("unsupported_parameter")
}
