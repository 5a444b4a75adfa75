//! What an answer must obey, as requests say it and as it is recorded.

use crate::GrammarError;
use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Name of the part of a grammar that comes after the reasoning.
const ANSWER: &str = "answer";
/// Options of vLLM's structured outputs that change nothing where they are off.
const SWITCHES: [&str; 2] = ["disable_any_whitespace", "disable_additional_properties"];
const KINDS: [&str; 5] = ["json", "json_object", "regex", "choice", "grammar"];
/// Longest text of a request's grammar, bytes of JSON.
const LONGEST: usize = 1 << 20;

/// All that decides the masks of an answer, except vocabulary and version.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Spec {
    /// vLLM's parameter of that name: exactly one of `json`, `json_object`, `regex`, `choice` and `grammar`.
    pub structured_outputs: Value,
    /// The reasoning block that may come before what is structured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<Reasoning>,
    /// Token ids that may end the answer where the grammar is complete.
    pub ends: Vec<u32>,
}

/// A reasoning block is free text up to its closing marker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reasoning {
    /// The answer may begin with a block that this marker opens. `None`: the prompt has opened it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<String>,
    pub close: String,
}

impl Spec {
    /// The library's grammar. `literals` writes a text in the grammar language, special tokens in it included.
    pub(crate) fn grammar(
        &self,
        literals: impl Fn(&str) -> String,
    ) -> Result<TopLevelGrammar, GrammarError> {
        let answer = answer(&self.structured_outputs)?;
        let Some(reasoning) = &self.reasoning else {
            return Ok(TopLevelGrammar::from_grammar(answer));
        };
        let whole = GrammarWithLexer::from_lark(reasoning.before_answer(literals));
        Ok(TopLevelGrammar {
            grammars: vec![whole, named(answer)],
            max_tokens: None,
        })
    }
}

fn named(mut grammar: GrammarWithLexer) -> GrammarWithLexer {
    grammar.name = Some(ANSWER.to_owned());
    grammar
}

impl Reasoning {
    fn before_answer(&self, literals: impl Fn(&str) -> String) -> String {
        let (open, optional) = match &self.open {
            Some(open) => (literals(open), "?"),
            None => (String::new(), ""),
        };
        let close = literals(&self.close);
        // A special token is never part of text, so text needs no other end.
        let text = match close.starts_with('<') {
            true => format!("text: /(.|\\n)*/ {close}"),
            false => format!("text[suffix={}]: /(.|\\n)*/", quoted(&self.close)),
        };
        format!(
            "start: block{optional} @{ANSWER}\nblock: {open} text GAP?\n{text}\nGAP: /[ \\n\\r\\t]{{1,16}}/\n"
        )
    }
}

/// As a string of the grammar language, which escapes as JSON does.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// vLLM's parameter as a grammar.
fn answer(outputs: &Value) -> Result<GrammarWithLexer, GrammarError> {
    let fields = outputs
        .as_object()
        .ok_or_else(|| GrammarError::unsupported("structured_outputs", "must be an object"))?;
    let (kind, value) = only_kind(fields)?;
    let refuse = |problem: &str| Err(GrammarError::unsupported(&within(kind), problem));
    let text = || {
        value
            .as_str()
            .ok_or_else(|| GrammarError::unsupported(&within(kind), "must be a string"))
    };
    if value.to_string().len() > LONGEST {
        return refuse(&format!("is longer than {LONGEST} bytes"));
    }
    match kind {
        "json" => schema(value),
        "json_object" if value == true => Ok(GrammarWithLexer::from_json_schema(
            json!({"type": "object"}),
        )),
        "json_object" => refuse("must be true"),
        "regex" => Ok(GrammarWithLexer::from_regex(text()?)),
        "grammar" => Ok(GrammarWithLexer::from_lark(text()?.to_owned())),
        _ => choice(value),
    }
}

fn within(name: &str) -> String {
    format!("structured_outputs.{name}")
}

fn only_kind(fields: &Map<String, Value>) -> Result<(&str, &Value), GrammarError> {
    let is_off = |value: &Value| value.is_null() || value == false;
    let given = fields.iter().filter(|(_, value)| !is_off(value));
    let mut kind = None;
    for (name, value) in given {
        if !KINDS.contains(&name.as_str()) {
            let known = KINDS.join(", ");
            let problem = match SWITCHES.contains(&name.as_str()) {
                true => "is not supported; leave it out, or say it in the schema".to_owned(),
                false => format!("is not supported; known are {known}"),
            };
            return Err(GrammarError::unsupported(&within(name), problem));
        }
        if kind.replace((name.as_str(), value)).is_some() {
            let problem = format!("must have exactly one of {}", KINDS.join(", "));
            return Err(GrammarError::unsupported("structured_outputs", problem));
        }
    }
    kind.ok_or_else(|| {
        let problem = format!("must have one of {}", KINDS.join(", "));
        GrammarError::unsupported("structured_outputs", problem)
    })
}

/// A schema as an object, or as its text.
fn schema(value: &Value) -> Result<GrammarWithLexer, GrammarError> {
    let refuse = |problem: String| GrammarError::unsupported(&within("json"), problem);
    let schema = match value {
        Value::String(text) => {
            serde_json::from_str(text).map_err(|error| refuse(format!("is not JSON: {error}")))?
        }
        other => other.clone(),
    };
    if !matches!(schema, Value::Object(_) | Value::Bool(true)) {
        return Err(refuse("the schema must be an object".to_owned()));
    }
    Ok(GrammarWithLexer::from_json_schema(schema))
}

fn choice(value: &Value) -> Result<GrammarWithLexer, GrammarError> {
    let texts: Option<Vec<&str>> = value
        .as_array()
        .and_then(|choices| choices.iter().map(Value::as_str).collect());
    match texts {
        Some(texts) if !texts.is_empty() && texts.iter().all(|text| !text.is_empty()) => {
            let texts: Vec<String> = texts.into_iter().map(quoted).collect();
            let start = format!("start: {}", texts.join(" | "));
            Ok(GrammarWithLexer::from_lark(start))
        }
        _ => Err(GrammarError::unsupported(
            &within("choice"),
            "must be a list of texts, none of them empty",
        )),
    }
}
