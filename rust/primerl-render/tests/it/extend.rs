//! Extending recorded turns.

use primerl_render::testing::{IM_END, TestModel, tiny};
use primerl_render::{ExtensionContext, Message, NotExtendable, RenderOptions, Renderer};
use proptest::prelude::*;
use std::sync::LazyLock;

static TINY: LazyLock<Renderer> = LazyLock::new(tiny);

/// ChatML with merges that want to cross every boundary the template has.
static MERGING: LazyLock<Renderer> = LazyLock::new(|| {
    let model = TestModel {
        merges: &[
            ("\n", "\n"),
            ("\n\n", "\n"),
            (" ", " "),
            ("u", "s"),
            ("us", "e"),
            ("use", "r"),
            ("\n", "a"),
            ("r", "\n"),
        ],
        ..TestModel::default()
    };
    model.renderer()
});

fn extend(
    renderer: &Renderer,
    sampled: &[u32],
    new_messages: &[Message],
) -> Result<Vec<u32>, NotExtendable> {
    let answer = renderer.parse(sampled).expect("parses");
    renderer.extend(
        &ExtensionContext {
            answer: &answer,
            sampled,
            options: &RenderOptions::default(),
        },
        new_messages,
    )
}

#[test]
fn a_closed_turn_is_not_closed_again() {
    let sampled = [35, IM_END];
    let ids = extend(&TINY, &sampled, &[Message::user("x")]).expect("extends");
    assert_eq!(ids, [198, 258, 260, 198, 87, IM_END, 198, 258, 261, 198]);
}

#[test]
fn a_turn_cut_by_length_is_closed() {
    let ids = extend(&TINY, &[35, 36], &[Message::user("x")]).expect("extends");
    assert_eq!(
        ids,
        [IM_END, 198, 258, 260, 198, 87, IM_END, 198, 258, 261, 198]
    );
    assert_eq!(
        extend(&TINY, &[], &[Message::user("x")]).expect("extends"),
        ids
    );
}

#[test]
fn another_stop_token_than_the_template_writes_forks() {
    let model = TestModel {
        eos: "<|endoftext|>",
        ..TestModel::default()
    };
    let renderer = model.renderer();
    let refused = extend(&renderer, &[35, 257], &[Message::user("x")]);
    assert_eq!(
        refused,
        Err(NotExtendable::OtherStopToken {
            sampled: 257,
            expected: 256
        })
    );
}

fn with_template(template: &str) -> Renderer {
    let model = TestModel {
        template,
        ..TestModel::default()
    };
    model.renderer()
}

#[test]
fn templates_that_cannot_be_extended_say_why() {
    let user = [Message::user("x")];
    // No stop token after the answer.
    let plain =
        with_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}");
    assert_eq!(extend(&plain, &[35], &user), Err(NotExtendable::NoTurnEnd));
    // Each message is numbered from the start of the conversation.
    let numbered = with_template(
        "{% for m in messages %}<|im_start|>{{ loop.index }} {{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}",
    );
    assert_eq!(
        extend(&numbered, &[35], &user),
        Err(NotExtendable::DependsOnHistory)
    );
    // The answer is written in other letters.
    let upper =
        with_template("{% for m in messages %}{{ m.content | upper }}<|im_end|>{% endfor %}");
    assert_eq!(
        extend(&upper, &[35], &user),
        Err(NotExtendable::AnswerNotVerbatim)
    );
    // Only short answers are kept: the sentinel passes, the proof does not.
    let cut = with_template(
        "{% for m in messages %}{{ m.content | replace('\\n', '') }}<|im_end|>{% endfor %}",
    );
    assert_eq!(
        extend(&cut, &[35], &user),
        Err(NotExtendable::AnswerNotVerbatim)
    );
    // The template refuses the new messages.
    let strict = with_template(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}",
    );
    let refused = extend(&strict, &[35], &[Message::text("tool", "x")]);
    assert!(
        matches!(&refused, Err(NotExtendable::TemplateFailed(why)) if why.contains("no tools")),
        "{refused:?}"
    );
    assert!(extend(&strict, &[35], &user).is_ok());
    assert_eq!(
        extend(&strict, &[35], &[]),
        Err(NotExtendable::NoNewMessages)
    );
}

#[test]
fn a_message_that_holds_the_sentinel_is_not_trusted() {
    let refused = extend(&TINY, &[35], &[Message::user("zPrimerlAnswerSentinelz")]);
    assert_eq!(refused, Err(NotExtendable::AnswerNotVerbatim));
}

fn message() -> impl Strategy<Value = Message> {
    let text = prop_oneof![
        any::<String>(),
        "[ \n\ta-z<|>é_]{0,12}",
        Just("<|im_end|>\n<|im_start|>user".to_owned())
    ];
    let role = prop_oneof![
        Just("user"),
        Just("system"),
        Just("tool"),
        Just("assistant")
    ];
    (role, text).prop_map(|(role, text)| Message::text(role, text))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// Prompt, answer and suffix are the tokens of the full render whenever the answer's own tokens are those of its text.
    #[test]
    fn an_extension_is_the_suffix_of_the_full_render(
        history in prop::collection::vec(message(), 1..4),
        answer in any::<String>(),
        new_messages in prop::collection::vec(message(), 1..4),
        closed in any::<bool>(),
        merging in any::<bool>(),
    ) {
        let renderer = if merging { &*MERGING } else { &*TINY };
        let options = RenderOptions::default();
        let mut sampled = renderer.tokenizer().encode(&answer).expect("encodes");
        if closed {
            sampled.push(IM_END_OF[usize::from(merging)]);
        }
        let answer = Message::assistant(answer);
        let context = ExtensionContext { answer: &answer, sampled: &sampled, options: &options };
        let suffix = renderer.extend(&context, &new_messages).expect("ChatML extends by anything");

        let mut whole = history.clone();
        whole.push(answer.clone());
        whole.extend(new_messages);
        let full = renderer.render(&whole, &options).expect("renders");
        prop_assert!(full.ends_with(&suffix));
        let text = renderer.render_text(&whole, &options).expect("renders");
        prop_assert!(text.ends_with(&renderer.tokenizer().decode(&suffix, false).expect("decodes")));
        if !merging {
            let mut extended = renderer.render(&history, &options).expect("renders");
            extended.extend(&sampled);
            extended.extend(&suffix);
            prop_assert_eq!(extended, full);
        }
    }
}

/// Id of `<|im_end|>` in the two models: the merging one has eight more tokens before it.
const IM_END_OF: [u32; 2] = [IM_END, IM_END + 8];
