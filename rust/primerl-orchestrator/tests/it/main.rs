//! Whole orchestrators over HTTP, in one program: each program of tests links the crate once more.
//!
//! `access` and `limits` have programs of their own, since they look at the log and the memory of their process.

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
mod page;
mod proxies;
mod repeats;
mod restart;
mod structured;
mod teacher;
mod trainer;
mod truncation;
mod whole_groups;
mod whole_run;
