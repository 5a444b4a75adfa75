//! Whether a process of this machine is still the same one. Linux has files for this; on other systems nothing is
//! known.

use serde::{Deserialize, Serialize};

/// One start of a machine, and one of its process namespaces (each container has its own).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Place(pub(super) String);

impl Place {
    /// As `primerl.train.loop.client` writes it.
    pub(crate) fn own() -> Option<Place> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let numbers = std::fs::read_link("/proc/self/ns/pid").ok()?;
        Some(Place(format!("{} {}", boot.trim(), numbers.display())))
    }
}

/// When the process began, in the kernel's ticks since the machine started; `None` if there is no such process, or it
/// has ended and its exit code was not collected.
pub(crate) fn began(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // Its name, in brackets, may hold anything.
    let (_, fields) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    let has_ended = matches!(fields.first(), Some(&("Z" | "X")));
    let began = fields.get(19)?.parse().ok();
    began.filter(|_| !has_ended)
}
