//! `{% generation %}` blocks, an extension of `transformers` that marks what the assistant wrote.

use super::environment::GENERATION_FILTER;

/// Rewrites generation blocks to filter blocks, which minijinja knows, keeping their white-space marks. (Call blocks,
/// which transformers uses, would hide the namespaces that templates assign to.)
/// Returns the source and whether it has such blocks.
pub(super) fn rewrite(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let mut found = false;
    let mut rest = source;
    while let Some(open) = rest.find(['{']) {
        let (before, tag) = rest.split_at(open);
        out.push_str(before);
        // Comments may quote the tag (`trl`'s training templates do).
        let skip = if tag.starts_with("{#") {
            tag.find("#}").map_or(tag.len(), |end| end + 2)
        } else {
            0
        };
        if skip > 0 {
            out.push_str(&tag[..skip]);
            rest = &tag[skip..];
            continue;
        }
        match statement(tag) {
            Some((length, replacement)) => {
                out.push_str(&replacement);
                found = true;
                rest = &tag[length..];
            }
            None => {
                out.push('{');
                rest = &tag[1..];
            }
        }
    }
    out.push_str(rest);
    (out, found)
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
    fn says_when_there_are_none() {
        assert!(!rewrite("{% if generation %}{").1);
        assert_eq!(rewrite("{# {% generation %} ").0, "{# {% generation %} ");
    }
}
