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
    let (format, demanded) = (
        request.sampling.structured_outputs.as_ref(),
        request.sampling.demanded.as_ref(),
    );
    if format.is_none() && demanded.is_none() {
        return Ok(None);
    }
    let Parse::Message { one_call } = request.parse else {
        let outputs = format.cloned();
        return Ok(outputs.map(|outputs| Structure {
            outputs,
            reasoning: None,
        }));
    };
    if renderer.parsers().is_harmony() && format.is_some() {
        return Err(refused(
            FORMAT,
            "this model answers in channels (harmony), and only calls have a grammar there",
        ));
    }
    let options = reading.options.as_ref();
    let tools = options.and_then(|options| options.render.tools.as_deref());
    let wanted = Wanted {
        format,
        demanded,
        tools,
        one_call,
    };
    let outputs = wanted.outputs(renderer, suffix)?;
    let reasoning = renderer
        .reasoning_ahead(suffix)
        .map(|(open, close)| match open {
            Some(open) => json!({"open": open, "close": close}),
            None => json!({"close": close}),
        });
    Ok(Some(Structure { outputs, reasoning }))
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
        let one_call = self.one_call;
        Ok(match (self.format, self.demanded, self.tools) {
            (Some(_), Some(_), _) => {
                return Err(refused(
                    TOOL_CHOICE,
                    "an answer with a format cannot be required to be a tool call; omit one of the two",
                ));
            }
            (Some(format), None, None) => format.clone(),
            (Some(format), None, Some(tools)) => {
                let schema = schema(format).ok_or_else(|| {
                refused(FORMAT, "with tools, an answer may have a JSON schema, but no other structured output; omit one of the two")
            })?;
                let demand = Demand {
                    tools,
                    name: None,
                    one_call,
                    or_json: Some(&schema),
                    prompt: suffix,
                };
                grammar(renderer, &demand, FORMAT)?
            }
            (None, demanded, tools) => {
                let name = match demanded {
                    Some(Demanded::Tool(name)) => Some(name.as_str()),
                    _ => None,
                };
                let demand = Demand {
                    tools: tools.unwrap_or_default(),
                    name,
                    one_call,
                    or_json: None,
                    prompt: suffix,
                };
                grammar(renderer, &demand, TOOL_CHOICE)?
            }
        })
    }
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
