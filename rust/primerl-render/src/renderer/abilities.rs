//! What a template silently omits: tools, where it does not look at them, messages of roles that it does not
//! ask for, and calls and reasoning of answers. A model that never sees what its client sent is worse than a request that
//! is refused, so it is tried out, once for each template and role. What a model would be taught wrongly by is refused
//! likewise.

use super::extend::{scenario_answer, scenario_tool};
use crate::error::RenderError;
use crate::message::Message;
use crate::renderer::Renderer;
use crate::template::RenderOptions;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::{Mutex, OnceLock, PoisonError};

/// Survives every trimming and splitting that templates do.
const MARK: &str = "zPrimerlMarkz";
/// Roles remembered; clients know a handful.
const MOST_ROLES: usize = 64;
const LONGEST_ROLE: usize = 64;
/// Combinations of template variables remembered; a dataset has a handful.
const MOST_VARIABLES: usize = 256;

/// What a template does with messages of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RoleSupport {
    Renders,
    /// It does not know `developer`, but OpenAI's older name for it.
    AsSystem,
    LeavesOut,
}

/// What was tried out so far.
#[derive(Default)]
pub(crate) struct Abilities {
    tools: OnceLock<bool>,
    /// By role, and whether the message is the first. Held only to look up or insert.
    roles: Mutex<HashMap<(String, bool), RoleSupport>>,
    /// By the part of an answer, whether there are tools, and the template's variables: some write reasoning only where
    /// one says so. Held only to look up or insert.
    answers: Mutex<HashMap<(AnswerPart, bool, String), bool>>,
}

/// What an answer may have in addition to its content.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum AnswerPart {
    ToolCalls,
    Reasoning,
}

impl Renderer {
    /// Whether tools that a conversation is given are in its prompt.
    pub fn renders_tools(&self) -> bool {
        *self.abilities.tools.get_or_init(|| {
            let tool = json!({"type": "function", "function": {"name": MARK, "description": MARK,
                "parameters": {"type": "object", "properties": {}, "required": []}}});
            let user = || Message::user("x");
            let conversations = [
                vec![user()],
                vec![Message::text("system", "x"), user()],
                vec![user(), Message::assistant("y"), user()],
            ];
            self.shows(&conversations, Some(tool)) != Some(false)
        })
    }

    /// As an error that names the field.
    ///
    /// # Errors
    /// There are tools, and the template leaves them out.
    pub fn check_tools(&self, options: &RenderOptions) -> Result<(), RenderError> {
        match &options.tools {
            Some(tools) if !tools.is_empty() && !self.renders_tools() => {
                Err(RenderError::ToolsLeftOut)
            }
            _ => Ok(()),
        }
    }

    /// What becomes of a message of this role; `first`: nothing is before it.
    pub fn role_support(&self, role: &str, first: bool) -> RoleSupport {
        if matches!(role, "user" | "assistant") {
            return RoleSupport::Renders;
        }
        if role.len() > LONGEST_ROLE {
            return RoleSupport::LeavesOut;
        }
        let key = (role.to_owned(), first);
        let roles = || {
            let roles = self.abilities.roles.lock();
            roles.unwrap_or_else(PoisonError::into_inner)
        };
        if let Some(known) = roles().get(&key) {
            return *known;
        }
        let support = self.try_role(role, first);
        let mut roles = roles();
        if roles.len() < MOST_ROLES {
            roles.insert(key, support);
        }
        support
    }

    /// The message as it is rendered.
    ///
    /// # Errors
    /// The template omits messages of this role, or the role is unknown. `index` is its place, for the error.
    pub fn renderable(&self, message: Message, index: usize) -> Result<Message, RenderError> {
        let mut message = self.with_renderable_content(message);
        match self.role_support(&message.role, index == 0) {
            RoleSupport::Renders => Ok(message),
            RoleSupport::AsSystem => {
                message.role = "system".into();
                Ok(message)
            }
            RoleSupport::LeavesOut => Err(RenderError::RoleLeftOut {
                message: index,
                role: message.role.chars().take(LONGEST_ROLE).collect(),
            }),
        }
    }

    /// Messages to train on as they are rendered.
    ///
    /// # Errors
    /// Those of [`Renderer::renderable`] and [`Renderer::check_tools`]; an answer has tool calls or reasoning, and the
    /// template writes such a thing nowhere. Reasoning that it leaves out of past answers only (Qwen3) is no error: the
    /// model is not shown it either.
    pub fn trainable(
        &self,
        messages: Vec<Message>,
        options: &RenderOptions,
    ) -> Result<Vec<Message>, RenderError> {
        self.check_tools(options)?;
        let prepare = |(index, message): (usize, Message)| {
            let message = self.renderable(message, index)?;
            self.check_answer(&message, index, options)?;
            Ok(message)
        };
        messages.into_iter().enumerate().map(prepare).collect()
    }

    fn check_answer(
        &self,
        message: &Message,
        index: usize,
        options: &RenderOptions,
    ) -> Result<(), RenderError> {
        if !message.is_assistant() {
            return Ok(());
        }
        if message.has_tool_calls() && !self.writes(AnswerPart::ToolCalls, options) {
            return Err(RenderError::ToolCallsLeftOut { message: index });
        }
        let reasoning = message.reasoning_content.as_deref().unwrap_or_default();
        if !reasoning.trim().is_empty() && !self.writes(AnswerPart::Reasoning, options) {
            return Err(RenderError::ReasoningLeftOut { message: index });
        }
        Ok(())
    }

    /// Whether this part of an answer, the last one if no other, is in what is rendered with these options.
    fn writes(&self, part: AnswerPart, options: &RenderOptions) -> bool {
        let has_tools = options
            .tools
            .as_ref()
            .is_some_and(|tools| !tools.is_empty());
        let variables = serde_json::to_string(&options.template_kwargs).unwrap_or_default();
        let key = (part, has_tools, variables);
        let answers = || {
            let answers = self.abilities.answers.lock();
            answers.unwrap_or_else(PoisonError::into_inner)
        };
        if let Some(known) = answers().get(&key) {
            return *known;
        }
        let options = RenderOptions {
            tools: has_tools.then(|| vec![scenario_tool()]),
            add_generation_prompt: false,
            ..options.clone()
        };
        // Where the template fails on all of them, its own words say more.
        let writes = self.shown(&answers_with(part), &options) != Some(false);
        let mut answers = answers();
        if answers.len() < MOST_VARIABLES {
            answers.insert(key, writes);
        }
        writes
    }

    fn try_role(&self, role: &str, first: bool) -> RoleSupport {
        let shows = |role: &str| self.shows(&around(role, first), tool_of(role));
        let supported = match role {
            // Where the template fails on it, its own words say more.
            "system" | "tool" => shows(role) != Some(false),
            "developer" if shows(role) == Some(true) => true,
            "developer" if shows("system") == Some(true) => return RoleSupport::AsSystem,
            "developer" => false,
            // A template that writes any role would write a misspelt one, too: it has to ask for it by name.
            other => self.names(other) && shows(other) == Some(true),
        };
        match supported {
            true => RoleSupport::Renders,
            false => RoleSupport::LeavesOut,
        }
    }

    /// Whether the mark is in what is rendered of any of the conversations; `None` if all fail.
    fn shows(&self, conversations: &[Vec<Message>], tool: Option<Value>) -> Option<bool> {
        let options = RenderOptions {
            tools: tool.map(|tool| vec![tool]),
            add_generation_prompt: true,
            ..RenderOptions::default()
        };
        self.shown(conversations, &options)
    }

    fn shown(&self, conversations: &[Vec<Message>], options: &RenderOptions) -> Option<bool> {
        let shown = conversations
            .iter()
            .filter_map(|messages| self.render_text(messages, options).ok())
            .map(|text| text.contains(MARK));
        shown.reduce(|any, shown| any | shown)
    }

    /// Whether a template compares something with this text.
    fn names(&self, role: &str) -> bool {
        ['\'', '"']
            .iter()
            .any(|quote| self.template_sources_contain(&format!("{quote}{role}{quote}")))
    }
}

/// Conversations with a marked message of this role, where such messages are found.
fn around(role: &str, first: bool) -> Vec<Vec<Message>> {
    let user = || Message::user("x");
    let mut marked = Message::text(role, MARK);
    if role == "tool" {
        let answer = scenario_answer("", 1);
        for call in answer.tool_calls.iter().flatten() {
            marked.tool_call_id.clone_from(&call.id);
            marked.name = Some(call.function.name.clone());
        }
        return vec![vec![user(), answer, marked]];
    }
    match first {
        true => vec![vec![marked, user()]],
        false => vec![
            vec![user(), Message::assistant("y"), marked.clone(), user()],
            vec![user(), Message::assistant("y"), marked.clone()],
            vec![Message::text("system", "s"), marked, user()],
        ],
    }
}

/// Conversations with answers that have this part, marked: the last answer, one that is followed, with and without
/// content.
fn answers_with(part: AnswerPart) -> Vec<Vec<Message>> {
    let user = || Message::user("x");
    let mut conversations = Vec::new();
    for (content, calls) in [("", 1), ("y", 1), ("y", 0)] {
        let mut answer = scenario_answer(content, calls);
        match part {
            AnswerPart::ToolCalls if calls == 0 => continue,
            AnswerPart::ToolCalls => {
                for call in answer.tool_calls.iter_mut().flatten() {
                    call.function.name = MARK.to_owned();
                    // Templates that are given an object write it out; some fail on a text.
                    call.function.arguments = json!({"a": "b"});
                }
            }
            AnswerPart::Reasoning => answer.reasoning_content = Some(MARK.to_owned()),
        }
        conversations.push(vec![user(), answer.clone()]);
        conversations.push(vec![user(), answer, user()]);
    }
    conversations
}

fn tool_of(role: &str) -> Option<Value> {
    (role == "tool").then(scenario_tool)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestModel;

    fn renderer(template: &str) -> Renderer {
        TestModel {
            template,
            ..TestModel::default()
        }
        .renderer()
    }

    /// Writes the roles that it asks for.
    const PICKS: &str = "{% for m in messages %}{% if m.role == 'system' and loop.first or m.role == 'user' or m.role == \
        'assistant' or m.role == 'observation' %}{{ m.role }}: {{ m.content }}<|im_end|>{% endif %}{% endfor %}";
    const WRITES_ALL: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: \
        {{ m.content }}<|im_end|>{% endfor %}";

    #[test]
    fn what_a_template_leaves_out_is_found() {
        let picks = renderer(PICKS);
        use RoleSupport::{AsSystem, LeavesOut, Renders};
        for (role, first, expected) in [
            ("user", false, Renders),
            ("assistant", true, Renders),
            ("system", true, Renders),
            ("system", false, LeavesOut),
            ("developer", true, AsSystem),
            ("developer", false, LeavesOut),
            ("tool", false, LeavesOut),
            ("observation", false, Renders),
            ("asistant", false, LeavesOut),
        ] {
            assert_eq!(picks.role_support(role, first), expected, "{role}");
        }
        assert!(!picks.renders_tools());
        let tools = RenderOptions {
            tools: Some(vec![scenario_tool()]),
            ..RenderOptions::default()
        };
        let error = picks.check_tools(&tools).expect_err("are left out");
        assert!(error.to_string().contains("tools"), "{error}");
        assert!(picks.check_tools(&RenderOptions::default()).is_ok());
    }

    #[test]
    fn a_template_that_writes_any_role_takes_no_misspelt_one() {
        let all = renderer(WRITES_ALL);
        assert!(all.renders_tools());
        assert_eq!(all.role_support("developer", true), RoleSupport::Renders);
        let error = all.renderable(Message::text("asistant", "hi"), 2);
        let error = error.expect_err("is refused").to_string();
        assert!(
            error.contains("messages[2].role") && error.contains("asistant"),
            "{error}"
        );
    }

    fn trained(template: &str, answer: Message) -> Result<(), String> {
        let trained = renderer(template)
            .trainable(vec![Message::user("x"), answer], &RenderOptions::default());
        trained.map(drop).map_err(|error| error.to_string())
    }

    #[test]
    fn parts_of_answers_that_a_template_never_writes_are_refused() {
        let thinking = || Message {
            reasoning_content: Some("Hm".into()),
            ..Message::assistant("y")
        };
        let error = trained(WRITES_ALL, scenario_answer("", 1)).expect_err("are left out");
        assert!(error.contains("messages[1].tool_calls"), "{error}");
        let error = trained(WRITES_ALL, thinking()).expect_err("is left out");
        assert!(error.contains("messages[1].reasoning_content"), "{error}");
        let empty = Message {
            reasoning_content: Some(" ".into()),
            tool_calls: Some(vec![]),
            ..Message::assistant("y")
        };
        assert_eq!(trained(WRITES_ALL, empty), Ok(()));

        let writes = "{% for m in messages %}{{ m.role }}: {% if loop.last and m.reasoning_content %}\
            {{ m.reasoning_content }}{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}\
            {% endfor %}<|im_end|>{% endfor %}";
        assert_eq!(trained(writes, scenario_answer("", 1)), Ok(()));
        assert_eq!(trained(writes, thinking()), Ok(()), "of the last answer");
    }

    #[test]
    fn a_template_that_writes_reasoning_by_a_variable_is_tried_with_it() {
        let asks = renderer(
            "{% for m in messages %}{% if thinks %}{{ m.reasoning_content }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
        );
        let answer = Message {
            reasoning_content: Some("Hm".into()),
            ..Message::assistant("y")
        };
        let messages = vec![Message::user("x"), answer];
        let mut options = RenderOptions::default();
        assert!(asks.trainable(messages.clone(), &options).is_err());
        options.template_kwargs.insert("thinks".into(), true.into());
        assert!(asks.trainable(messages, &options).is_ok());
    }

    #[test]
    fn a_developers_message_is_a_systems_where_only_that_is_known() {
        let message = renderer(PICKS).renderable(Message::text("developer", "hi"), 0);
        assert_eq!(message.expect("is known").role, "system");
    }
}
