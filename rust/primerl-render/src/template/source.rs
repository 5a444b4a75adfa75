//! What minijinja reads differently than Jinja2, rewritten in the template's source:
//!
//! - `{% generation %}` blocks, an extension of `transformers` that marks what the assistant wrote, become filter blocks
//!   with the same white-space marks. (Call blocks, which transformers uses, would hide the namespaces that templates
//!   assign to.)
//! - `[::-1]` becomes a method call: minijinja's own reversal panics on an empty list.
//! - What a loop goes through is asked whether it can be iterated: minijinja takes none for an empty list, Python refuses.
//! - Line ends become `\n`, as Jinja2 reads them.

use super::environment::{GENERATION_FILTER, ITERABLE_FUNCTION};
use super::python_text::REVERSED;

/// The source for minijinja, and whether it has generation blocks.
pub(super) fn rewrite(source: &str) -> (String, bool) {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len());
    let mut found = false;
    let mut rest = source.as_str();
    while let Some(open) = rest.find('{') {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        let length = if let Some((length, replacement)) = statement(tag) {
            out.push_str(&replacement);
            found = true;
            length
        } else if tag.starts_with("{#") {
            // Comments may quote tags (`trl`'s training templates do).
            let length = tag.find("#}").map_or(tag.len(), |end| end + 2);
            out.push_str(&tag[..length]);
            length
        } else if tag.starts_with("{{") || tag.starts_with("{%") {
            let mut copied = String::new();
            let length = copy_tag(tag, &mut copied);
            out.push_str(&guard_loop(&copied).unwrap_or(copied));
            length
        } else {
            out.push('{');
            1
        };
        rest = &tag[length..];
    }
    out.push_str(rest);
    (out, found)
}

/// Copies the tag that `text` begins with, its reversals rewritten, and returns its length.
fn copy_tag(text: &str, out: &mut String) -> usize {
    let close = if text.starts_with("{{") { "}}" } else { "%}" };
    out.push_str(&text[..2]);
    let mut at = 2;
    let mut open_braces = 0_usize;
    while let Some(char) = text[at..].chars().next() {
        let rest = &text[at..];
        if open_braces == 0 && rest.starts_with(close) {
            out.push_str(close);
            return at + 2;
        }
        let length = match char {
            '"' | '\'' => literal_length(rest, char),
            '[' if reversal_length(rest).is_some() => {
                out.push_str(&format!(".{REVERSED}()"));
                at += reversal_length(rest).unwrap_or(1);
                continue;
            }
            _ => char.len_utf8(),
        };
        match char {
            '{' => open_braces += 1,
            '}' => open_braces = open_braces.saturating_sub(1),
            _ => {}
        }
        out.push_str(&rest[..length]);
        at += length;
    }
    at
}

/// `{% for x in y if z %}` with a call around `y`; `None` for other tags.
fn guard_loop(tag: &str) -> Option<String> {
    let body = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let body = body.strip_prefix(['-', '+']).unwrap_or(body);
    let body = body.strip_suffix(['-', '+']).unwrap_or(body);
    let mut words = top_level_words(body).into_iter();
    words.next().filter(|(_, word)| *word == "for")?;
    let (after, _) = words.find(|(_, word)| *word == "in")?;
    let start = after + "in".len();
    let end = words
        .find(|(_, word)| matches!(*word, "if" | "recursive" | ","))
        .map_or(body.len(), |(at, word)| if word == "," { 0 } else { at });
    // A tuple without brackets.
    let iterated = body.get(start..end)?;
    let offset = body.as_ptr() as usize - tag.as_ptr() as usize;
    Some(format!(
        "{} {ITERABLE_FUNCTION}({}) {}",
        &tag[..offset + start],
        iterated.trim(),
        &tag[offset + end..]
    ))
}

/// Words and commas outside of brackets and texts, with where they begin.
fn top_level_words(text: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let mut depth = 0_usize;
    let mut at = 0;
    while let Some(char) = text[at..].chars().next() {
        let rest = &text[at..];
        let length = match char {
            '"' | '\'' => literal_length(rest, char),
            char if char.is_alphanumeric() || char == '_' => rest
                .find(|char: char| !(char.is_alphanumeric() || char == '_'))
                .unwrap_or(rest.len()),
            char => char.len_utf8(),
        };
        match char {
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => depth = depth.saturating_sub(1),
            char if depth == 0 && (char == ',' || char.is_alphabetic() || char == '_') => {
                words.push((at, &rest[..length]));
            }
            _ => {}
        }
        at += length;
    }
    words
}

/// Length of the string literal that `text` begins with, its quotes included.
fn literal_length(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, char) in text.char_indices().skip(1) {
        match char {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            char if char == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of `[::-1]`, blanks allowed, when `text` begins with it.
fn reversal_length(text: &str) -> Option<usize> {
    let mut wanted = "[::-1]".chars().peekable();
    for (at, char) in text.char_indices() {
        if wanted.next_if_eq(&char).is_some() {
            if wanted.peek().is_none() {
                return Some(at + 1);
            }
        } else if char != ' ' {
            return None;
        }
    }
    None
}

/// When `tag` begins with a generation statement: its length, and what to write instead.
fn statement(tag: &str) -> Option<(usize, String)> {
    let inner = tag.strip_prefix("{%")?;
    let end = inner.find("%}")?;
    let body = &inner[..end];
    let (left, body) = mark(
        body,
        |text| text.strip_prefix(['-', '+']),
        |text| text.get(..1),
    );
    let (right, body) = mark(
        body,
        |text| text.strip_suffix(['-', '+']),
        |text| text.get(text.len() - 1..),
    );
    let replacement = match body.trim() {
        "generation" => format!("filter {GENERATION_FILTER}"),
        "endgeneration" => "endfilter".to_owned(),
        _ => return None,
    };
    Some((end + 4, format!("{{%{left} {replacement} {right}%}}")))
}

fn mark<'a>(
    text: &'a str,
    strip: impl Fn(&'a str) -> Option<&'a str>,
    sign: impl Fn(&'a str) -> Option<&'a str>,
) -> (&'a str, &'a str) {
    match strip(text) {
        Some(stripped) => (sign(text).unwrap_or_default(), stripped),
        None => ("", text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_white_space_marks_and_leaves_comments_alone() {
        let (text, found) = rewrite(
            "{#- {% generation %} -#}{%- generation -%}a{{ '{' }}{% endgeneration +%}{% if x %}",
        );
        assert!(found);
        assert_eq!(
            text,
            "{#- {% generation %} -#}{%- filter __primerl_generation -%}a{{ '{' }}{% endfilter +%}{% if x %}"
        );
    }

    #[test]
    fn reversals_become_calls_outside_of_texts() {
        let (text, _) = rewrite(
            "[::-1]{{ x[::-1][0] ~ '[::-1]' ~ {'a': {}}.a[1:] }}[::-1]\r\n{% if y[ : : -1 ] %}",
        );
        assert_eq!(
            text,
            "[::-1]{{ x.__primerl_reversed()[0] ~ '[::-1]' ~ {'a': {}}.a[1:] }}[::-1]\n{% if y.__primerl_reversed() %}"
        );
        assert_eq!(rewrite("{{ 'a\\'[::-1]' {{ x").0, "{{ 'a\\'[::-1]' {{ x");
    }

    #[test]
    fn loops_ask_whether_they_can() {
        let rewritten = |source: &str| rewrite(source).0.replace(ITERABLE_FUNCTION, "each");
        assert_eq!(
            rewritten("{%- for a, b in x.items() if a in 'if' -%}"),
            "{%- for a, b in each(x.items()) if a in 'if' -%}"
        );
        assert_eq!(
            rewritten("{% for a in [1, 2] recursive %}"),
            "{% for a in each([1, 2]) recursive %}"
        );
        assert_eq!(
            rewritten("{%for a in (x if y else z)%}"),
            "{%for a in each((x if y else z)) %}"
        );
        for same in ["{% for a in 1, 2 %}", "{% if a in b %}", "{{ a in b }}"] {
            assert_eq!(rewritten(same), same);
        }
    }

    #[test]
    fn says_when_there_are_none() {
        assert!(!rewrite("{% if generation %}{").1);
        assert_eq!(rewrite("{# {% generation %} ").0, "{# {% generation %} ");
    }
}
