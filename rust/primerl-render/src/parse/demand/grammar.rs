//! Text in the language of grammars: strings, special tokens, regular expressions.

use serde_json::Value;
use std::fmt::Write;

/// A text as the grammar language writes it: strings, and the ids of the special tokens in it.
pub fn literals(text: &str, special: &[(&str, u32)]) -> String {
    let mut sequence = Sequence::new(special);
    sequence.fixed(text);
    sequence.finish()
}

/// Strings of the grammar language escape as JSON's do.
pub(super) fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A text as a regular expression between slashes.
pub(super) fn escaped(text: &str) -> String {
    let mut out = String::new();
    for letter in text.chars() {
        match letter {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            letter => {
                if "\\.+*?()|[]{}^$#&-~/".contains(letter) {
                    out.push('\\');
                }
                out.push(letter);
            }
        }
    }
    out
}

/// A text in pieces, each of them a special token or free of them.
#[derive(Debug, PartialEq)]
pub(super) enum Piece<'a> {
    Text(&'a str),
    Token(u32),
}

pub(super) fn pieces<'a>(mut text: &'a str, special: &[(&str, u32)]) -> Vec<Piece<'a>> {
    let mut pieces = Vec::new();
    while !text.is_empty() {
        // The first one; of those that begin there the longest.
        let found = special
            .iter()
            .filter_map(|(token, id)| Some((text.find(token)?, *token, *id)));
        let first = found.min_by_key(|(at, token, _)| (*at, std::cmp::Reverse(token.len())));
        let Some((at, token, id)) = first else {
            pieces.push(Piece::Text(text));
            break;
        };
        if at > 0 {
            pieces.push(Piece::Text(&text[..at]));
        }
        pieces.push(Piece::Token(id));
        text = &text[at + token.len()..];
    }
    pieces
}

/// What follows one another in a rule. Texts that meet become one string.
pub(super) struct Sequence<'a> {
    special: &'a [(&'a str, u32)],
    items: Vec<String>,
    text: String,
}

impl<'a> Sequence<'a> {
    pub fn new(special: &'a [(&'a str, u32)]) -> Self {
        Self {
            special,
            items: Vec::new(),
            text: String::new(),
        }
    }

    /// A text of the syntax: its markers are special tokens, where the tokenizer has them.
    pub fn fixed(&mut self, text: &str) {
        for piece in pieces(text, self.special) {
            match piece {
                Piece::Text(text) => self.text(text),
                Piece::Token(id) => self.item(format!("<[{id}]>")),
            }
        }
    }

    /// A text in which no special token is looked for.
    pub fn text(&mut self, text: &str) {
        self.text += text;
    }

    /// An expression of the grammar language.
    pub fn item(&mut self, item: impl Into<String>) {
        self.end_text();
        self.items.push(item.into());
    }

    /// The expression; an empty sequence is the empty string.
    pub fn finish(mut self) -> String {
        self.end_text();
        match self.items.is_empty() {
            true => quoted(""),
            false => self.items.join(" "),
        }
    }

    fn end_text(&mut self) {
        if !self.text.is_empty() {
            self.items.push(quoted(&std::mem::take(&mut self.text)));
        }
    }
}

/// The rules written so far.
#[derive(Default)]
pub(super) struct Rules {
    text: String,
    named: usize,
}

impl Rules {
    pub fn add(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{name}: {body}");
    }

    /// A rule with a name of its own, which it returns.
    pub fn rule(&mut self, body: &str) -> String {
        let name = self.new_name("rule");
        self.add(&name, body);
        name
    }

    /// A name that no rule has.
    pub fn new_name(&mut self, kind: &str) -> String {
        self.named += 1;
        format!("{kind}_{}", self.named)
    }

    /// A terminal: one regular expression, in which `&` and `~` may be used.
    pub fn terminal(&mut self, body: &str) -> String {
        let name = self.new_name("TEXT");
        self.add(&name, body);
        name
    }

    pub fn finish(self) -> String {
        self.text
    }
}

/// Texts of this expression, without these, up to the first `close`, which ends them: an expression of a rule.
pub(super) fn delimited(
    rules: &mut Rules,
    special: &[(&str, u32)],
    text: &str,
    without: &[&str],
    close: &str,
) -> String {
    // One complement of all is far cheaper than one of each.
    let excluded: Vec<_> = without.iter().map(|text| escaped(text)).collect();
    let without = match excluded.is_empty() {
        true => String::new(),
        false => format!(" & ~/(?s:.*)(?:{})(?s:.*)/", excluded.join("|")),
    };
    let mut rest = Sequence::new(special);
    // The lexer is greedy: the text that ends the value must be part of its terminal.
    let pieces = pieces(close, special);
    let (end, after) = match pieces.split_first() {
        Some((Piece::Text(end), after)) => (quoted(end), after),
        _ => (String::new(), &pieces[..]),
    };
    rest.item(rules.terminal(&format!("({text}{without}) {end}")));
    for piece in after {
        match piece {
            Piece::Text(text) => rest.text(text),
            Piece::Token(id) => rest.item(format!("<[{id}]>")),
        }
    }
    rest.finish()
}
