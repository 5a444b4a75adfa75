//! Llama 3's built-in tools, after `<|python_tag|>`: `brave_search.call(query="..")`, or Python code for the interpreter.

use crate::parse::arguments::{Arguments, quoted};
use crate::parse::protocol::Call;
use crate::parse::{CallProblem, list};
use serde_json::Value;

/// Tools that every model of the family knows by name.
const KNOWN: [&str; 2] = ["brave_search", "wolfram_alpha"];
/// Names that environments give to the interpreter. It takes the code as `code`.
const INTERPRETERS: [&str; 3] = ["code_interpreter", "python", "ipython"];

/// What a request's tools say about calls after the tag.
pub(super) struct Builtins {
    tools: Vec<String>,
    interpreter: Option<&'static str>,
}

impl Builtins {
    pub fn new(tools: &[Value]) -> Self {
        let name = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            Some(function.get("name")?.as_str()?.to_owned())
        };
        let tools: Vec<String> = tools.iter().filter_map(name).collect();
        let named = |interpreter: &&str| tools.iter().any(|tool| tool == interpreter);
        Self {
            interpreter: INTERPRETERS.into_iter().find(named),
            tools,
        }
    }

    /// Reads what follows the tag, which is the rest of the answer.
    pub fn read(&self, text: &str, is_complete: bool) -> Result<Call, CallProblem> {
        let text = text.trim();
        if let Some((name, arguments)) = text.split_once(".call(")
            && (KNOWN.contains(&name) || self.tools.iter().any(|tool| tool == name))
        {
            return match arguments.strip_suffix(')') {
                Some(arguments) => Call::new(name, read_arguments(arguments)?),
                None => Err(CallProblem::CutOff),
            };
        }
        match self.interpreter {
            _ if !is_complete => Err(CallProblem::CutOff),
            Some(name) => Call::new(name, format!("{{\"code\": {}}}", quoted(text))),
            None => Err(CallProblem::Structure(
                "code follows the marker, and no tool of the request is an interpreter",
            )),
        }
    }
}

/// The template writes `key="value"` without escaping quotes; models write Python, too.
fn read_arguments(text: &str) -> Result<String, CallProblem> {
    if let Some(arguments) = verbatim(text) {
        return Ok(arguments.into_json());
    }
    list::read_arguments(text)
}

/// `a="..", b=".."`, with anything between the quotes; none where it is written otherwise.
fn verbatim(text: &str) -> Option<Arguments> {
    let mut arguments = Arguments::default();
    if text.is_empty() {
        return Some(arguments);
    }
    let inner = text.strip_suffix('"')?;
    let (mut key, mut rest) = inner.split_once("=\"")?;
    loop {
        if !is_name(key) {
            return None;
        }
        let next = next_argument(rest);
        let value = next.map_or(rest, |(end, _, _)| &rest[..end]);
        arguments.add_json(key, quoted(value));
        let Some((_, next_key, after)) = next else {
            return Some(arguments);
        };
        (key, rest) = (next_key, after);
    }
}

/// The first `", key="` of `text`: where it begins, its key, and the text after it.
fn next_argument(text: &str) -> Option<(usize, &str, &str)> {
    text.match_indices("\", ").find_map(|(at, separator)| {
        let (key, after) = text[at + separator.len()..].split_once("=\"")?;
        is_name(key).then_some((at, key, after))
    })
}

fn is_name(text: &str) -> bool {
    let mut letters = text.chars();
    letters
        .next()
        .is_some_and(|letter| letter.is_alphabetic() || letter == '_')
        && letters.all(|letter| letter.is_alphanumeric() || letter == '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(text: &str) -> Result<(String, Value), CallProblem> {
        let tools = [
            json!({"function": {"name": "python"}}),
            json!({"function": {"name": "look_up"}}),
        ];
        let call = Builtins::new(&tools).read(text, true)?;
        Ok((
            call.name,
            serde_json::from_str(&call.arguments).expect("JSON"),
        ))
    }

    #[test]
    fn a_search_is_read_as_its_template_writes_it() {
        let query = "say \"a\", b=c \\n\nü";
        let written = format!("brave_search.call(query=\"{query}\")");
        assert_eq!(
            read(&written),
            Ok(("brave_search".to_owned(), json!({"query": query})))
        );
        let two = "look_up.call(first=\"a\", \"b\", second_1=\"c\")";
        assert_eq!(
            read(two),
            Ok((
                "look_up".to_owned(),
                json!({"first": "a\", \"b", "second_1": "c"})
            ))
        );
        assert_eq!(
            read("wolfram_alpha.call()"),
            Ok(("wolfram_alpha".to_owned(), json!({})))
        );
    }

    #[test]
    fn python_literals_are_read_too() {
        assert_eq!(
            read("look_up.call(n=3, all=True, name='x')"),
            Ok((
                "look_up".to_owned(),
                json!({"n": 3, "all": true, "name": "x"})
            ))
        );
        assert!(read("look_up.call(3)").is_err());
    }

    #[test]
    fn anything_else_is_code() {
        let code = "import os\nos.call(\"x\")";
        assert_eq!(read(code), Ok(("python".to_owned(), json!({"code": code}))));
        let no_interpreter = Builtins::new(&[]);
        assert!(no_interpreter.read(code, true).is_err());
        assert!(matches!(
            no_interpreter.read("brave_search.call(query=\"a", true),
            Err(CallProblem::CutOff)
        ));
        let tools = [json!({"function": {"name": "python"}})];
        assert!(matches!(
            Builtins::new(&tools).read("print(", false),
            Err(CallProblem::CutOff)
        ));
    }
}
