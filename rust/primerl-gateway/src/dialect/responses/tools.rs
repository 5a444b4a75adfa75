//! A response's tools: functions in a flat format, which are converted to chat's format for templates.

use crate::fields::{Fields, at, unsupported};
use crate::request::Options;
use primerl_service::http::ApiError;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Tools and template arguments of a request.
#[derive(Debug)]
pub(crate) struct Tools {
    /// The tools as the client sent them.
    declared: Vec<Value>,
    template_kwargs: Map<String, Value>,
    wanted: bool,
    /// The tools as the response repeats them.
    pub shown: Vec<Value>,
    pub options: Arc<Options>,
}

impl Tools {
    /// `wanted`: whether the template gets the tools.
    pub(crate) fn read(
        declared: Vec<Value>,
        template_kwargs: Map<String, Value>,
        wanted: bool,
    ) -> Result<Tools, ApiError> {
        let mut functions = Vec::with_capacity(declared.len());
        let mut shown = Vec::with_capacity(declared.len());
        for (index, tool) in declared.iter().enumerate() {
            let function = at(&format!("tools[{index}]"), function(tool))?;
            shown.push(shown_again(tool));
            functions.push(json!({"type": "function", "function": function}));
        }
        let options = Options::new(wanted.then_some(functions), template_kwargs.clone());
        Ok(Tools {
            declared,
            template_kwargs,
            wanted,
            shown,
            options: Arc::new(options),
        })
    }

    /// The tools as the client sent them, and whether the template gets them.
    pub(crate) fn as_came(&self) -> (&[Value], &Map<String, Value>, bool) {
        (&self.declared, &self.template_kwargs, self.wanted)
    }

    pub(crate) fn is(&self, declared: &[Value], kwargs: &Map<String, Value>, wanted: bool) -> bool {
        self.wanted == wanted && self.declared == declared && self.template_kwargs == *kwargs
    }
}

fn check_kind(kind: String) -> Result<(), ApiError> {
    if kind == "function" {
        return Ok(());
    }
    Err(ApiError {
        message: format!("tools of type {kind:?} are not supported here: only function"),
        ..unsupported("type", &Value::String(kind))
    })
}

/// `strict` is accepted but not shown to the model: it is meant for a server that samples by the schema, which would
/// not be the policy. SDKs set it by default.
fn function(tool: &Value) -> Result<Map<String, Value>, ApiError> {
    let Value::Object(fields) = tool else {
        return Err(ApiError::invalid("must be an object"));
    };
    let mut fields = Fields(fields.clone());
    check_kind(fields.text("type")?.unwrap_or_default())?;
    let name = fields.text("name")?.filter(|name| !name.is_empty());
    let Some(name) = name else {
        return Err(ApiError::invalid("name is missing").param("name"));
    };
    let mut function = Map::from_iter([("name".to_owned(), Value::String(name))]);
    let description = fields.text("description")?.map(Value::String);
    let parameters = fields.map("parameters")?.map(Value::Object);
    function.extend(description.map(|text| ("description".to_owned(), text)));
    function.extend(parameters.map(|schema| ("parameters".to_owned(), schema)));
    fields.flag("strict")?;
    fields.end(|name, value| match name {
        "defer_loading" => value == false,
        "allowed_callers" => value == &json!(["direct"]),
        _ => false,
    })?;
    Ok(function)
}

/// The tools with the fields that a response's tools must have.
fn shown_again(tool: &Value) -> Value {
    let mut shown = tool.clone();
    if let Value::Object(fields) = &mut shown {
        fields.entry("parameters").or_insert(Value::Null);
        fields.entry("strict").or_insert(Value::Null);
    }
    shown
}
