//! What a full disk is reported as: its name, the path, and how much is needed and free.

use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// `error`, which a write of at least `needed` bytes to `path` met; of a disk without room, one that says where and how
/// much. The path need not exist.
pub fn named(path: &Path, needed: u64, error: io::Error) -> io::Error {
    let kind = error.kind();
    let is_full = matches!(kind, ErrorKind::StorageFull | ErrorKind::QuotaExceeded);
    // One without a number is one that says so already.
    if !is_full || error.raw_os_error().is_none() {
        return error;
    }
    let (Some(disk), Some(free)) = (mounted_at(path), free_at(path)) else {
        return error;
    };
    let needs = match needed {
        0 => format!("{} needs more", path.display()),
        needed => format!("{} needs at least {}", path.display(), in_gb(needed)),
    };
    let (disk, free) = (disk.display(), in_gb(free));
    let message = match kind {
        ErrorKind::QuotaExceeded => format!(
            "your quota of the disk mounted at {disk} is used up (the disk has {free} free), and {needs}: make room on it"
        ),
        _ => format!("the disk mounted at {disk} has {free} free, and {needs}: make room on it"),
    };
    io::Error::new(kind, message)
}

fn existing(path: &Path) -> Option<PathBuf> {
    let whole = std::path::absolute(path).ok()?;
    let there = whole.ancestors().find(|folder| folder.exists())?;
    there.canonicalize().ok()
}

fn free_at(path: &Path) -> Option<u64> {
    let found = rustix::fs::statvfs(existing(path)?).ok()?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

/// The uppermost folder of the disk.
fn mounted_at(path: &Path) -> Option<PathBuf> {
    let there = existing(path)?;
    let device = |folder: &Path| folder.metadata().ok().map(|metadata| metadata.dev());
    let own = device(&there)?;
    let same = there
        .ancestors()
        .take_while(|folder| device(folder) == Some(own));
    same.last().map(Path::to_owned)
}

fn in_gb(bytes: u64) -> String {
    match bytes {
        10_000_000.. => format!("{:.2} GB", bytes as f64 / 1e9),
        _ => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_named_with_what_is_needed_and_free() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("spool/step_1/rank_0.msgpack");
        for (number, begins) in [
            (28, "the disk mounted at /"),
            (122, "your quota of the disk mounted at /"),
        ] {
            let told = named(&path, 20_000_000, io::Error::from_raw_os_error(number)).to_string();
            assert!(told.starts_with(begins), "{told}");
            assert!(told.contains(" free"), "{told}");
            let needs = format!("{} needs at least 0.02 GB: make room on it", path.display());
            assert!(told.ends_with(&needs), "{told}");
        }
        assert!(free_at(&path).is_some());
    }

    #[test]
    fn other_errors_stay() {
        let refused = io::Error::from(ErrorKind::PermissionDenied);
        let told = refused.to_string();
        assert_eq!(named(Path::new("x"), 1, refused).to_string(), told);
    }
}
