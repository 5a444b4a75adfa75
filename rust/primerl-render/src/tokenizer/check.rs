//! The start-up check: does the fast library give the reference's ids for this `tokenizer.json`?

use super::bytes::TokenBytes;
use super::fast::Fast;
use super::stable::Stable;
use super::{AddedToken, Backend};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Texts that tokenizers disagree on when they disagree at all: white-space runs, digits, contractions,
/// scripts without spaces, combining marks, emoji sequences, control and private-use characters.
const PROBES: &[&str] = &[
    "",
    " ",
    "\n",
    "a",
    "Hello, world! It's 12345 o'clock; we'LL see 3.14159 and 1,000,000.",
    "  two  three   four    \t\ttabs\t \n\n\nlines\r\n\r\n \n  \u{a0}nbsp\u{2003}em\u{3000}wide ",
    "fn main() {\n    let x = vec![1, 2, 3];\n\t// comment\n    println!(\"{:?}\", x);\n}\n",
    "{\"name\": \"f\", \"arguments\": {\"a\": [1.5e-7, null, true], \"b\": \"\\u00e9\\n\"}}",
    "Größe café naïve e\u{301}cole Å A\u{30a} ﬁ ﬃ Ⅷ ½ ™ ＡＢＣ ｶﾞ",
    "你好,世界。今日は良い天気ですね。안녕하세요 สวัสดีครับ שלום مرحبا नमस्ते Привет Γειά",
    "👩‍👩‍👧‍👦 👍🏽 🇩🇪🇫🇷 ❤️ 🤷🏻‍♂️ x\u{200d}y \u{feff}bom \u{200b}zero \u{202e}rtl",
    "\u{0}\u{1}\u{7f}\u{80}\u{9f}\u{ad} \u{e000} \u{f8ff} \u{fffd} \u{10ffff}",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa          bbbbbbbbbbbbbbbb",
    "https://example.org/a_b-c?d=e&f=%20#g <tag attr='v'>text</tag> \\frac{a}{b} $x^2$ ## Title\n\n* item\n",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<tool_call>\n{}\n</tool_call>",
    "can't won't I'm you've HE'S they'd ain't 'tis rock'n'roll ''' \"\"\" ``` ''s",
    "0 00 000 0000 00000 000000 1a2b3c 10th 2nd ①②③ ٣٤٥ ௧௨௩",
];

/// The fast library, when it gives the reference's ids for every probe; else why not.
pub(super) fn trusted(
    json: &str,
    reference: &Stable,
    added: &[AddedToken],
) -> Result<Fast, String> {
    let fast = quietly(|| Fast::load(json))
        .map_err(|error| format!("the fast tokenizer cannot read it: {error}"))?;
    for text in probes(added) {
        let expected = reference.encode(&text)?;
        let ids = quietly(|| fast.encode(&text))
            .map_err(|error| format!("encoding {text:?}: {error}"))?;
        if ids != expected {
            return Err(format!(
                "the fast tokenizer gives other ids for {text:?}: {ids:?}, expected {expected:?}"
            ));
        }
    }
    Ok(fast)
}

/// Whether concatenating token bytes decodes as the library does, for the probes and for every token.
pub(super) fn decodes_alike(
    table: &TokenBytes,
    backend: &dyn Backend,
    added: &[AddedToken],
) -> bool {
    let probes_agree = probes(added).iter().all(|text| {
        let Ok(ids) = backend.encode(text) else {
            return false;
        };
        let text = table.text(ids.iter().copied());
        backend
            .decode(&ids, false)
            .is_ok_and(|decoded| decoded == text)
    });
    probes_agree
        && (0..table.len() as u32).all(|id| {
            backend
                .decode(&[id], false)
                .is_ok_and(|decoded| decoded == table.text([id].into_iter()))
        })
}

fn probes(added: &[AddedToken]) -> Vec<String> {
    let fixed = PROBES.iter().map(|text| (*text).to_owned());
    // Every added token bare, inside words, between spaces and newlines, doubled and cut short.
    let around = added.iter().map(|AddedToken { content: token, .. }| {
        let cut: String = token
            .chars()
            .take(token.chars().count().saturating_sub(1))
            .collect();
        format!("{token}a{token}b {token} c\n{token}\n{token}{token} {cut} {cut}{token}\t{token}")
    });
    fixed.chain(around).collect()
}

/// A panic of the release candidate is a reason not to use it, not a crash.
fn quietly<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("it panicked".to_owned()))
}
