//! What is public, in one program: each program of tests links the tokenizers once more.

mod answer;
mod check;
mod described;
mod extend;
mod families;
mod message;
mod neutral;
mod parse;
mod parse_properties;
mod renderer;
mod tokenizer;
