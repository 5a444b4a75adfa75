//! Whole orchestrators over HTTP, in one program: each test program links the crate again.
//!
//! `access` and `limits` are separate programs, because they check the log and the memory of their process.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../common/mod.rs"]
mod common;

mod admission;
mod client_types;
mod command;
mod damage;
mod engine_health;
mod env_client;
mod faults;
mod gateway;
mod going_back;
mod learning;
mod page;
mod proxies;
mod repeats;
mod restart;
mod router_replay;
mod structured;
mod teacher;
mod trainer;
mod truncation;
mod whole_groups;
mod whole_run;
