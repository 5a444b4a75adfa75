//! Every target: the program's name says which one it runs.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| primerl_fuzz::run(env!("CARGO_BIN_NAME"), data));
