//! What a template leaves out without a word: tools, where it does not look at them, and messages of roles that it does
//! not ask for. A model that never sees what its client sent is worse than a request that is refused, so it is tried out,
//! once for each template and role.

use crate::error::RenderError;
use crate::extend::{scenario_answer, scenario_tool};
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
    /// The template leaves messages of its role out, or nobody knows the role. `index` is its place, for the error.
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
        let shown = conversations
            .iter()
            .filter_map(|messages| self.render_text(messages, &options).ok())
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

fn tool_of(role: &str) -> Option<Value> {
    (role == "tool").then(scenario_tool)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::write_model;

    fn renderer(template: &str) -> Renderer {
        let folder = tempfile::tempdir().expect("temporary folder");
        let added = [("<|im_end|>", true)];
        let end = "<|im_end|>";
        write_model(folder.path(), &added, &[], template, end, end).expect("model folder");
        Renderer::load(folder.path()).expect("loads")
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

    #[test]
    fn a_developers_message_is_a_systems_where_only_that_is_known() {
        let message = renderer(PICKS).renderable(Message::text("developer", "hi"), 0);
        assert_eq!(message.expect("is known").role, "system");
    }
}
