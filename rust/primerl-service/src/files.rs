//! Writes files that are either absent or complete: temporary name, fsync, rename, fsync of the folder.

pub mod room;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}")]
pub struct WriteError {
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

impl WriteError {
    /// An error of a path; where its disk is full, with its name and what is needed and free.
    pub fn new(path: &Path, source: io::Error) -> WriteError {
        WriteError {
            path: path.to_owned(),
            source: room::named(path, 0, source),
        }
    }
}

/// Writes `bytes` to `path`, completely or not at all; creates missing folders.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    write(path, 0o666, bytes.len(), |file| file.write_all(bytes))
        .map_err(|source| WriteError::new(path, source))
}

/// As [`write_whole`], for content that is too large to build in memory first: `content` writes it.
pub fn write_whole_with(
    path: &Path,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), WriteError> {
    write(path, 0o666, 0, content).map_err(|source| WriteError::new(path, source))
}

/// As [`write_whole`], for content that no one but its owner may read at any time.
pub fn write_secret(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    write(path, 0o600, bytes.len(), |file| file.write_all(bytes))
        .map_err(|source| WriteError::new(path, source))
}

/// `size`: what the content has at least, in bytes.
fn write(
    path: &Path,
    mode: u32,
    size: usize,
    content: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(folder)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = folder.join(name);
    // A file that a crashed process with the same id left would keep its mode.
    let _ = fs::remove_file(&temporary);
    let mut file = File::options()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(&temporary)?;
    let written = content(&mut file)
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        let begun = file.metadata().map_or(0, |metadata| metadata.len());
        // Half a file is of no use, and takes the room that others need.
        drop(file);
        let _ = fs::remove_file(&temporary);
        return Err(room::named(path, begun.max(size as u64), error));
    }
    File::open(folder)?.sync_all()
}

/// Links a complete file that will not change to another name, and replaces the file there; copies it if the file
/// system has no links.
pub fn link_or_copy(from: &Path, to: &Path) -> io::Result<()> {
    match fs::remove_file(to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    match fs::hard_link(from, to) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(error),
        Err(_) => {
            fs::copy(from, to)?;
            File::open(to)?.sync_all()
        }
    }
}

/// Makes files that were created, renamed or removed in a folder survive a power loss.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

/// Appends one line and makes it durable.
pub fn append_line(path: &Path, line: &str) -> Result<(), WriteError> {
    let append = || {
        let mut file = File::options().create(true).append(true).open(path)?;
        file.write_all(format!("{line}\n").as_bytes())?;
        file.sync_data()
    };
    append().map_err(|source| {
        let source = room::named(path, line.len() as u64, source);
        WriteError {
            path: path.to_owned(),
            source,
        }
    })
}

/// The lines of a file; no lines if there is no file. Removes a last line that a crash truncated first.
pub fn whole_lines(path: &Path) -> io::Result<Vec<String>> {
    let bytes = match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        read => read?,
    };
    let whole = bytes
        .iter()
        .rposition(|byte| *byte == b'\n')
        .map_or(0, |at| at + 1);
    if whole < bytes.len() {
        let file = File::options().write(true).open(path)?;
        file.set_len(whole as u64)?;
        file.sync_all()?;
    }
    let text = String::from_utf8_lossy(&bytes[..whole]);
    Ok(text.lines().map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_was_cut_short_is_removed() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("lines");
        assert_eq!(whole_lines(&path).expect("no file, no lines").len(), 0);
        fs::write(&path, b"one\ntwo\nthr").expect("writes");
        assert_eq!(whole_lines(&path).expect("reads"), ["one", "two"]);
        append_line(&path, "three").expect("appends");
        assert_eq!(fs::read(&path).expect("reads"), b"one\ntwo\nthree\n");
    }

    #[test]
    fn a_file_is_replaced_whole_and_leaves_no_temporary() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("a/b.json");
        write_whole(&path, b"first").expect("writes");
        write_whole(&path, b"second").expect("writes");
        assert_eq!(fs::read(&path).expect("reads"), b"second");
        let names = fs::read_dir(folder.path().join("a"))
            .expect("lists")
            .count();
        assert_eq!(names, 1);
    }

    #[test]
    fn a_full_disk_is_named_and_leaves_no_half_of_a_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let path = folder.path().join("rank_0.msgpack");
        let error = write_whole_with(&path, |file| {
            file.write_all(&[0; 4096])?;
            File::options()
                .write(true)
                .open("/dev/full")?
                .write_all(b"more")
        });
        let error = error.expect_err("the disk is full");
        assert!(error.to_string().contains("rank_0.msgpack"), "{error}");
        let told = error.source.to_string();
        assert!(told.starts_with("the disk mounted at /"), "{told}");
        let needs = format!(
            "{} needs at least 4096 bytes: make room on it",
            path.display()
        );
        assert!(told.ends_with(&needs), "{told}");
        assert_eq!(fs::read_dir(folder.path()).expect("lists").count(), 0);
    }

    #[test]
    fn an_error_names_the_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let blocker = folder.path().join("file");
        fs::write(&blocker, b"").expect("writes");
        let error = write_whole(&blocker.join("x"), b"").expect_err("a file is no folder");
        assert!(error.to_string().contains("file/x"), "{error}");
    }
}
