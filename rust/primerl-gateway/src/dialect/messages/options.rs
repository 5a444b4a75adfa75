//! Template options in addition to the messages: tools, and whether the model thinks.

use crate::fields::{Fields, at, missing, unsupported, within};
use crate::sampling::Demanded;
use primerl_service::http::ApiError;
use serde_json::{Map, Value, json};

/// Tools in OpenAI's format, which templates know.
pub(super) fn tools(tools: Vec<Value>) -> Result<Vec<Value>, ApiError> {
    let read = |(index, tool): (usize, Value)| {
        Fields::of(tool)
            .and_then(function)
            .map_err(|error| within(&format!("tools.{index}"), error))
    };
    tools.into_iter().enumerate().map(read).collect()
}

fn function(mut tool: Fields) -> Result<Value, ApiError> {
    // A server tool has its own type: only Anthropic's servers and models know what it is.
    if let Some(kind) = tool.take("type").filter(|kind| kind != "custom") {
        return Err(unsupported("type", &kind));
    }
    let mut function = Map::new();
    function.insert("name".into(), tool.required_text("name")?.into());
    if let Some(description) = tool.text("description")? {
        function.insert("description".into(), description.into());
    }
    let schema = tool
        .map("input_schema")?
        .ok_or_else(|| missing("input_schema"))?;
    function.insert("parameters".into(), schema.into());
    tool.end(|name, value| match name {
        // Inputs are sent once they are complete.
        "cache_control" | "eager_input_streaming" => true,
        "strict" | "defer_loading" => value == false,
        "input_examples" => value.as_array().is_some_and(Vec::is_empty),
        "allowed_callers" => value == &json!(["direct"]),
        _ => false,
    })?;
    Ok(json!({"type": "function", "function": function}))
}

/// How the model may use its tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ToolChoice {
    /// Whether the template gets the tools.
    pub told: bool,
    pub one_call: bool,
    /// The call that the model must make.
    pub demanded: Option<Demanded>,
}

impl ToolChoice {
    pub(super) fn read(choice: Option<Value>) -> Result<ToolChoice, ApiError> {
        let mut read = ToolChoice {
            told: true,
            one_call: false,
            demanded: None,
        };
        let Some(choice) = choice else {
            return Ok(read);
        };
        let name = "tool_choice";
        let mut fields = at(name, Fields::of(choice.clone()))?;
        match at(name, fields.required_text("type"))?.as_str() {
            "auto" => {}
            "none" => read.told = false,
            "any" => read.demanded = Some(Demanded::Any),
            "tool" => {
                read.demanded = Some(Demanded::Tool(at(name, fields.required_text("name"))?));
            }
            _ => return Err(unsupported(name, &choice)),
        }
        let one_call = at(name, fields.flag("disable_parallel_tool_use"))?;
        read.one_call = one_call.unwrap_or(false);
        at(name, fields.end(|_, _| false))?;
        Ok(read)
    }
}

/// What the client asks for about thinking.
///
/// It is a switch: templates that have one take `enable_thinking`, and the model decides how much it thinks, because
/// ending its thinking at a budget would sample from another distribution. So a budget is only accepted if it cannot be
/// exceeded ([`Thinking::check_budget`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Thinking {
    /// `None`: the template's default.
    pub enabled: Option<bool>,
    pub budget_tokens: Option<u32>,
    /// Thinking blocks are returned without their text.
    pub omitted: bool,
}

impl Thinking {
    pub(super) fn read(thinking: Option<Value>) -> Result<Thinking, ApiError> {
        let Some(thinking) = thinking else {
            return Ok(Thinking::default());
        };
        Fields::of(thinking)
            .and_then(Thinking::of)
            .map_err(|error| within("thinking", error))
    }

    fn of(mut fields: Fields) -> Result<Thinking, ApiError> {
        let mut thinking = Thinking::default();
        let kind = fields.required_text("type")?;
        thinking.enabled = match kind.as_str() {
            "disabled" => Some(false),
            "enabled" | "adaptive" => Some(true),
            _ => return Err(unsupported("type", &kind.into())),
        };
        if kind == "enabled" {
            let budget = fields.count("budget_tokens")?;
            thinking.budget_tokens = Some(budget.ok_or_else(|| missing("budget_tokens"))?);
        }
        thinking.omitted = match fields.take("display") {
            None => false,
            // There is no summary: all of it is shown.
            Some(display) if display == "summarized" => false,
            Some(display) if display == "omitted" => true,
            Some(display) => return Err(unsupported("display", &display)),
        };
        fields.end(|_, _| false)?;
        Ok(thinking)
    }

    /// `longest` is the longest answer in tokens. The API requires budgets below it, so one less counts as all of it.
    pub(super) fn check_budget(&self, longest: u32) -> Result<(), ApiError> {
        let Some(budget) = self.budget_tokens else {
            return Ok(());
        };
        if budget.saturating_add(1) >= longest {
            return Ok(());
        }
        let problem = format!(
            "thinking.budget_tokens = {budget} cannot be kept: an answer here has up to {longest} tokens, and thinking may \
             take all of them; ask for {} or more, or for {{\"type\": \"adaptive\"}}",
            longest - 1
        );
        Err(ApiError::invalid(problem)
            .param("thinking.budget_tokens")
            .code("unsupported_parameter"))
    }

    /// Adds the switch to the template's arguments.
    pub(super) fn switch(&self, template_kwargs: &mut Map<String, Value>) -> Result<(), ApiError> {
        let Some(enabled) = self.enabled else {
            return Ok(());
        };
        let before = template_kwargs.insert("enable_thinking".into(), enabled.into());
        match before {
            Some(other) if other != enabled => {
                let problem = "chat_template_kwargs.enable_thinking contradicts thinking; omit one of the two";
                Err(ApiError::invalid(problem).param("chat_template_kwargs"))
            }
            _ => Ok(()),
        }
    }
}
