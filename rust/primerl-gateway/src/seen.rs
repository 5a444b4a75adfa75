//! Skips the known beginning of a body. A request repeats the previous body, message by message, and adds some. What
//! was read before is not read again: if the new body begins with the same bytes, only the rest is parsed.

use crate::request::{Incoming, Recurring};
use bytes::Bytes;
use primerl_core::conversation::message_hash;
use serde_json::value::RawValue;
use std::sync::Arc;
use xxhash_rust::xxh3::Xxh3;

/// The part of the last body of a conversation that is known.
#[derive(Clone)]
pub(crate) struct Seen {
    /// Where the first message begins, and the last one ends.
    begin: usize,
    end: usize,
    messages: Vec<SeenMessage>,
    /// Hash of the bytes through the last message.
    prefix: Xxh3,
    digest: u128,
}

impl std::fmt::Debug for Seen {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Seen({} messages)", self.messages.len())
    }
}

#[derive(Clone, Copy)]
struct SeenMessage {
    from: usize,
    to: usize,
    digest: u128,
}

/// A body's hash, computed in one pass, which also finds out whether the body begins with the known part.
pub(crate) struct Hashed {
    pub digest: u128,
    pub known: Option<Arc<Seen>>,
}

impl Hashed {
    pub(crate) fn of(body: &[u8], seen: Option<Arc<Seen>>) -> Hashed {
        let mut hasher = Xxh3::new();
        let prefix = seen.as_ref().and_then(|seen| body.get(..seen.end));
        hasher.update(prefix.unwrap_or_default());
        let known = seen.filter(|seen| prefix.is_some() && hasher.digest128() == seen.digest);
        hasher.update(&body[prefix.map_or(0, <[u8]>::len)..]);
        Hashed {
            digest: hasher.digest128(),
            known,
        }
    }
}

/// A body without the known messages.
pub(crate) struct Unseen {
    /// JSON with the body's shape.
    pub text: Bytes,
    before: Option<Before>,
}

struct Before {
    seen: Arc<Seen>,
    /// Where the body continues after the known messages.
    resumed: usize,
}

impl Unseen {
    /// `known`: the part with which the body begins.
    pub(crate) fn of(body: &Bytes, known: Option<Arc<Seen>>) -> Unseen {
        let resumed = known.and_then(|seen| seen.resume(body).map(|at| (seen, at)));
        match resumed {
            None => Unseen {
                text: body.clone(),
                before: None,
            },
            Some((seen, resumed)) => Unseen {
                text: [&body[..seen.begin], &body[resumed..]].concat().into(),
                before: Some(Before { seen, resumed }),
            },
        }
    }

    /// The place in the body of a message in `text`.
    fn place(&self, message: &RawValue) -> SeenMessage {
        let before = self.before.as_ref();
        let shift = before.map_or(0, |before| before.resumed - before.seen.begin);
        let start = self.text.as_ptr() as usize;
        let from = message.get().as_ptr() as usize - start + shift;
        SeenMessage {
            from,
            to: from + message.get().len(),
            digest: message_hash(message.get().as_bytes()),
        }
    }

    /// All messages of `body`, of which those in `text` are `new`; and the part that is known from now on.
    pub(crate) fn messages(
        &self,
        body: &Bytes,
        new: &[&RawValue],
    ) -> (Vec<Incoming>, Option<Arc<Seen>>) {
        let new = new.iter().map(|raw| self.place(raw));
        let seen = match &self.before {
            None => Seen::begin(body, new.collect()),
            Some(before) => Some(Seen::go_on(&before.seen, body, new.collect())),
        };
        let incoming = |message: &SeenMessage| Incoming::Raw {
            text: body.slice(message.from..message.to),
            digest: message.digest,
        };
        let messages = seen
            .iter()
            .flat_map(|seen| seen.messages.iter().map(incoming));
        (messages.collect(), seen)
    }
}

impl Unseen {
    /// `seen`: the part of the body that is known from now on.
    pub(crate) fn recurring(&self, seen: &Seen) -> Recurring {
        Recurring {
            through: seen.digest,
            from: self.before.as_ref().map(|before| before.seen.digest),
        }
    }
}

impl Seen {
    fn begin(body: &Bytes, messages: Vec<SeenMessage>) -> Option<Arc<Seen>> {
        let (begin, end) = (messages.first()?.from, messages.last()?.to);
        let mut prefix = Xxh3::new();
        prefix.update(&body[..end]);
        let digest = prefix.digest128();
        Some(Arc::new(Seen {
            begin,
            end,
            messages,
            prefix,
            digest,
        }))
    }

    fn go_on(self: &Arc<Seen>, body: &Bytes, new: Vec<SeenMessage>) -> Arc<Seen> {
        let Some(last) = new.last() else {
            return Arc::clone(self);
        };
        let mut seen = Seen {
            end: last.to,
            ..Seen::clone(self)
        };
        seen.messages.extend(new);
        seen.prefix.update(&body[self.end..seen.end]);
        seen.digest = seen.prefix.digest128();
        Arc::new(seen)
    }

    /// Where `body`, which begins with the known part, continues: after the comma, or at the end of the list.
    fn resume(&self, body: &[u8]) -> Option<usize> {
        let rest = body.get(self.end..)?;
        let white = rest
            .iter()
            .take_while(|byte| byte.is_ascii_whitespace())
            .count();
        match rest.get(white)? {
            b',' => Some(self.end + white + 1),
            b']' => Some(self.end + white),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;
    use serde_json::json;

    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow)]
        messages: Vec<&'a RawValue>,
        model: &'a str,
    }

    fn read(body: &Bytes, seen: Option<Arc<Seen>>) -> (Vec<String>, usize, Option<Arc<Seen>>) {
        let hashed = Hashed::of(body, seen);
        assert_eq!(hashed.digest, Hashed::of(body, None).digest);
        let unseen = Unseen::of(body, hashed.known);
        let parsed: Body<'_> = serde_json::from_slice(&unseen.text).expect("is a body");
        assert_eq!(parsed.model, "m");
        let (messages, seen) = unseen.messages(body, &parsed.messages);
        let text = |message: Incoming| match message {
            Incoming::Raw { text, digest } => {
                assert_eq!(digest, message_hash(&text));
                String::from_utf8(text.to_vec()).expect("is text")
            }
            other => panic!("{other:?}"),
        };
        (
            messages.into_iter().map(text).collect(),
            parsed.messages.len(),
            seen,
        )
    }

    fn body(messages: &[String], model_first: bool, space: &str) -> Bytes {
        let list = messages.join(&format!(",{space}"));
        match model_first {
            true => format!("{{\"model\":\"m\",\"messages\":[{space}{list}{space}],\"n\":1}}"),
            false => format!("{{\"messages\":[{list}], \"model\":\"m\"}}"),
        }
        .into()
    }

    proptest! {
        /// Whatever was known before, the messages are those of the whole body.
        #[test]
        fn nothing_is_read_otherwise(
            turns in prop::collection::vec((0_usize..4, any::<bool>(), any::<bool>()), 1..12),
            model_first in any::<bool>(),
            space in prop_oneof![Just(""), Just(" \n")],
        ) {
            let mut messages: Vec<String> = Vec::new();
            let mut seen = None;
            for (number, (new, edit, shorten)) in turns.into_iter().enumerate() {
                messages.extend((0..new).map(|index| json!({"role": "user", "content": format!("{number} é {index} ]}},")}).to_string()));
                if edit && let Some(message) = messages.get_mut(number / 2) {
                    *message = json!({"role": "user", "content": number}).to_string();
                }
                if shorten {
                    messages.pop();
                }
                let body = body(&messages, model_first, space);
                let (read, _, now) = read(&body, seen);
                prop_assert_eq!(&read, &messages);
                seen = now;
            }
        }
    }

    #[test]
    fn only_new_messages_are_parsed() {
        let mut messages = vec![json!({"role": "user", "content": "hi"}).to_string()];
        let (_, parsed, seen) = read(&body(&messages, true, ""), None);
        assert_eq!(parsed, 1);
        messages.push(json!({"role": "assistant", "content": "yes"}).to_string());
        messages.push(json!({"role": "user", "content": "so"}).to_string());
        let (all, parsed, seen) = read(&body(&messages, true, ""), seen);
        assert_eq!((all.len(), parsed), (3, 2));
        let (all, parsed, _) = read(&body(&messages, true, ""), seen);
        assert_eq!((all.len(), parsed), (3, 0));
    }
}
