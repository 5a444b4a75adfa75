//! Fuzz targets: code that reads untrusted bytes (from an agent, an engine, a model) must accept any of them.
//!
//! A target is a function that panics when the code panics, or when a property that must always hold is violated. libFuzzer
//! runs it for any length of time (`fuzz/README.md`), and `tests/short.rs` for a second or two with every
//! test run, on the seeds in `fuzz/seeds/<target>` and on mutations of them by [`mutate`].

#![forbid(unsafe_code)]
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a target reports a finding by a panic"
)]

mod chat_request;
mod completions_request;
mod decode_stream;
mod engine_stream;
mod message_canonical;
mod messages_request;
pub mod mutate;
mod renderers;
mod responses_request;
mod template_render;
mod tool_parsers;

/// Panics when it finds something.
pub type Fuzz = fn(&[u8]);

/// Every target by the name of its seeds' folder. A new one is a line here and one in `fuzz/Cargo.toml`.
pub const TARGETS: &[(&str, Fuzz)] = &[
    ("chat_request", chat_request::fuzz),
    ("completions_request", completions_request::fuzz),
    ("decode_stream", decode_stream::fuzz),
    ("engine_stream", engine_stream::fuzz),
    ("message_canonical", message_canonical::fuzz),
    ("messages_request", messages_request::fuzz),
    ("responses_request", responses_request::fuzz),
    ("template_render", template_render::fuzz),
    ("tool_parsers", tool_parsers::fuzz),
];

/// One input for the target of this name.
///
/// # Panics
/// There is no such target, or it found something.
pub fn run(name: &str, data: &[u8]) {
    let target = TARGETS.iter().find(|(known, _)| *known == name);
    let (_, fuzz) = target.expect("the target is listed in TARGETS");
    fuzz(data);
}
