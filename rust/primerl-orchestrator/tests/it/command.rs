//! The native binary, as a launcher or a user starts it.

use crate::common::{PATIENCE, Place};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::Instant;

fn command(config: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_primerl-orchestrate"));
    command
        .arg("--config")
        .arg(config)
        .stderr(Stdio::piped())
        .stdout(Stdio::piped());
    command
}

/// The console script of the wheel is compared with the same file (`tests/test_packaging.py`): one definition, two
/// shells.
#[test]
fn help_is_that_of_the_console_script() {
    let output = Command::new(env!("CARGO_BIN_EXE_primerl-orchestrate"))
        .arg("--help")
        .output()
        .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        include_str!("../help.txt")
    );
}

fn write(place: &Place, toml: &str) -> std::path::PathBuf {
    let path = place.path("orchestrator.toml");
    std::fs::write(&path, toml).unwrap();
    path
}

/// Runs with this config; it has to be refused with exit code 2, with `words` in the message, and nothing written.
fn refused(place: &Place, toml: &str, words: &[&str]) {
    let Output { status, stderr, .. } = command(&write(place, toml)).output().unwrap();
    let message = String::from_utf8_lossy(&stderr);
    assert_eq!(status.code(), Some(2), "{message}");
    for word in words {
        assert!(message.contains(word), "{word:?} is not in: {message}");
    }
    assert!(!place.output().exists(), "nothing is written");
}

/// A program that starts it reads no sentence.
#[test]
fn a_check_says_as_json_why_it_refuses() {
    let place = Place::new();
    let said = |toml: &str| -> serde_json::Value {
        let mut check = command(&write(&place, toml));
        let Output { status, stdout, .. } = check.args(["--check", "--json"]).output().unwrap();
        assert_eq!(status.code(), Some(2));
        serde_json::from_slice(&stdout).unwrap()
    };
    let refusal = said(&place.toml("max_off_policy_steps = 1", ""));
    assert_eq!(refusal["code"], "config");
    assert_eq!(refusal["key"], "max_off_policy_steps");
    assert!(
        refusal["message"]
            .as_str()
            .unwrap()
            .contains("raise the first")
    );
    let refusal = said(&place.toml(
        "control_tokens = \"neutralize\"\nclient_type = \"openai_chat_completions_token\"",
        "",
    ));
    assert_eq!(
        (&refusal["code"], &refusal["key"]),
        (&"config".into(), &"control_tokens".into())
    );
    // A bound of the key itself.
    let refusal = said(
        &place
            .toml("", "")
            .replace("batch_size = 8", "batch_size = 0"),
    );
    assert_eq!(
        (&refusal["code"], &refusal["key"]),
        (&"config".into(), &"batch_size".into())
    );
    let file = place.path("orchestrator.toml");
    let begins = format!("{}: batch_size: is 0; give", file.display());
    assert!(refusal["message"].as_str().unwrap().starts_with(&begins));
    let alone = command(&place.path("orchestrator.toml"))
        .arg("--json")
        .output()
        .unwrap();
    assert_eq!(alone.status.code(), Some(2));
    assert!(alone.stdout.is_empty());
}

/// Nothing in this binary could call it.
#[test]
fn a_function_in_python_is_refused() {
    let place = Place::new();
    let custom = "\n[algorithm]\ntype = \"custom\"\npath = \"rewards:advantages\"\n";
    let toml = place.toml("", "") + custom;
    refused(
        &place,
        &toml,
        &["algorithm.type", "has no Python", "start the run with"],
    );
}

fn address(place: &Place, child: &mut Child) -> String {
    let path = place.output().join("run/orchestrator.json");
    let begun = Instant::now();
    loop {
        if let Ok(bytes) = std::fs::read(&path) {
            let address: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
            assert_eq!(address["pid"], child.id());
            return address["url"].as_str().unwrap().to_owned();
        }
        assert!(child.try_wait().unwrap().is_none(), "it ended early");
        assert!(begun.elapsed() < PATIENCE, "it did not start");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

fn signal(child: &Child, name: &str) {
    let status = Command::new("kill")
        .arg(format!("-{name}"))
        .arg(child.id().to_string())
        .status()
        .unwrap();
    assert!(status.success());
}

/// Nothing has started: there is nothing to stop, and the signal must not be lost.
#[test]
fn a_signal_before_the_run_has_begun_ends_it_at_once() {
    for (name, number) in [("TERM", 15), ("HUP", 1), ("INT", 2)] {
        let place = Place::new();
        // It is read for as long as no one writes to it.
        let fifo = place.path("orchestrator.toml");
        assert!(
            Command::new("mkfifo")
                .arg(&fifo)
                .status()
                .unwrap()
                .success()
        );
        let mut child = command(&fifo).spawn().unwrap();
        // Both ends open it once the process reads, with its handlers installed.
        let writer = std::fs::OpenOptions::new().write(true).open(&fifo).unwrap();
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(128 + number), "{name}");
        drop(writer);
    }
}

#[test]
fn bad_configs_are_refused_before_anything_starts() {
    let place = Place::new();
    let good = place.toml("", "");
    refused(
        &place,
        &place.toml("batchsize = 8", ""),
        &["orchestrator.toml", "batchsize", "unknown field"],
    );
    refused(
        &place,
        &good.replace("batch_size = 8", "batch_size = 10"),
        &["batch_size", "multiple", "8 or 12"],
    );
    refused(
        &place,
        &good.replace("batch_size = 8", "batch_size = \"x\""),
        &["batch_size", "invalid type"],
    );
    refused(
        &place,
        &good.replace("max_tokens = 12", "max_tokens = 12\ntop_p = 0.9"),
        &["sampling.top_p", "1.0", "sampling.truncated = \"replay\""],
    );
    refused(
        &place,
        &good.replace(
            "max_tokens = 12",
            "max_tokens = 12\ntruncated = \"replay\"\nmin_p = 1.5",
        ),
        &["sampling.min_p", "0 to 1"],
    );
    refused(
        &place,
        &good.replace("max_tokens = 12", "max_tokens = 512"),
        &["sampling.max_tokens", "seq_len"],
    );
    refused(
        &place,
        &good.replace("[[train.env]]\nid = \"task\"", ""),
        &["training environment"],
    );
    refused(
        &place,
        &place.toml("engines = [\"host:1\"]", ""),
        &["engines[0]", "http://host:port"],
    );
    refused(
        &place,
        &good.replace("worker_s = 5.0", "worker_s = -1.0"),
        &["timeouts.worker_s", "1 to a year"],
    );
    refused(
        &place,
        &place.toml("", "[buffer]\nhard_threshold = 0.9"),
        &[
            "buffer.hard_threshold = 0.9",
            "buffer.easy_threshold = 0.8",
            "lower the first",
        ],
    );
    refused(
        &place,
        &place.toml("", "[buffer]\nenv_ratios = [1.0, 2.0]"),
        &["buffer.env_ratios", "2 numbers for the 1", "in the order"],
    );
    let ratio = "[[train.env]]\nid = \"other\"\nratio = 2.0\n[buffer]\nenv_ratios = [1.0, 2.0]";
    refused(
        &place,
        &place.toml("", ratio),
        &["buffer.env_ratios", "\"other\"", "leave one"],
    );
    refused(
        &place,
        &place.toml("", "[buffer]\nenv_ratios = [0.0]"),
        &["buffer.env_ratios[0]: is 0", "more than 0"],
    );
    refused(
        &place,
        &place.toml("", "[log]\nlevel = \"=,=\""),
        &["log.level"],
    );
    refused(
        &place,
        &good.replace("/model\"", "/nowhere\""),
        &["model.path", "nowhere", "does not exist"],
    );
    let template = place.path("model/tokenizer_config.json");
    std::fs::write(&template, "{}").unwrap();
    refused(&place, &good, &["model.path", "chat template"]);
}

#[test]
fn a_missing_file_and_a_bad_flag_are_refused() {
    let place = Place::new();
    let Output { status, stderr, .. } = command(&place.path("none.toml")).output().unwrap();
    assert_eq!(status.code(), Some(2));
    assert!(String::from_utf8_lossy(&stderr).contains("none.toml"));
    let output = Command::new(env!("CARGO_BIN_EXE_primerl-orchestrate"))
        .arg("--nope")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2));
    let output = Command::new(env!("CARGO_BIN_EXE_primerl-orchestrate"))
        .arg("--help")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_check_starts_nothing() {
    let place = Place::new();
    let path = write(&place, &place.toml("", ""));
    let output = command(&path).arg("--check").output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(!place.output().exists());
}

#[test]
fn a_port_in_use_is_refused() {
    let place = Place::new();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    refused(
        &place,
        &place.toml(&format!("port = {port}"), ""),
        &["port", &port.to_string(), "choose another"],
    );
}

#[test]
fn an_output_folder_belongs_to_one_run() {
    let place = Place::new();
    let path = write(&place, &place.toml("", ""));
    let mut first = command(&path).spawn().unwrap();
    address(&place, &mut first);
    let second = command(&path).output().unwrap();
    let message = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(2), "{message}");
    assert!(message.contains("another orchestrator"), "{message}");
    signal(&first, "TERM");
    assert_eq!(first.wait().unwrap().code(), Some(0));
}

#[test]
fn signals_end_it_in_order_and_soon() {
    for name in ["TERM", "INT"] {
        let place = Place::new();
        let mut child = command(&write(&place, &place.toml("", "")))
            .spawn()
            .unwrap();
        address(&place, &mut child);
        let begun = Instant::now();
        signal(&child, name);
        assert_eq!(child.wait().unwrap().code(), Some(0));
        assert!(
            begun.elapsed().as_secs() < 5,
            "{name}: {:?}",
            begun.elapsed()
        );
    }
}
