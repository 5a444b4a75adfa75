//! Answers that are nothing but tool calls have no content, which a client sends back as null. Some templates fail on that
//! or write the word None; others tell calls by it. Which kind a template is shows by trying.

use crate::message::{Content, Message};
use crate::renderer::{Renderer, scenario_answer, scenario_tool};
use crate::template::RenderOptions;

impl Renderer {
    /// An assistant message as this model's template takes it: null content becomes empty text where the template cannot
    /// render null.
    pub fn with_renderable_content(&self, mut message: Message) -> Message {
        if self.null_content_fails && message.content == Content::Null && message.is_assistant() {
            message.content = Content::Text(String::new());
        }
        message
    }

    pub(crate) fn fails_on_null_content(&self) -> bool {
        let options = RenderOptions {
            tools: Some(vec![scenario_tool()]),
            add_generation_prompt: false,
            ..RenderOptions::default()
        };
        let render = |content| {
            let answer = Message {
                content,
                ..scenario_answer("", 1)
            };
            self.render_text(&[Message::user("x"), answer], &options)
        };
        let empty = render(Content::Text(String::new()));
        let is_right = render(Content::Null).is_ok_and(|text| !text.contains("None"));
        !is_right && empty.is_ok_and(|text| !text.contains("None"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestModel;

    fn content_after(template: &str) -> Content {
        let message = Message {
            content: Content::Null,
            ..scenario_answer("", 1)
        };
        let model = TestModel {
            template,
            ..TestModel::default()
        };
        model.renderer().with_renderable_content(message).content
    }

    #[test]
    fn null_is_kept_where_the_template_knows_it() {
        let tells_by_null = "{% for m in messages %}{% if m.content is none %}calls{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}";
        assert_eq!(content_after(tells_by_null), Content::Null);
        let writes_none = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}";
        assert_eq!(content_after(writes_none), Content::Text(String::new()));
        let fails = "{% for m in messages %}{{ m.content + '<|im_end|>' }}{% endfor %}";
        assert_eq!(content_after(fails), Content::Text(String::new()));
    }
}
