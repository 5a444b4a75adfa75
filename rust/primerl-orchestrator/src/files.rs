//! Files that are either absent or whole: temporary name, fsync, rename, fsync of the folder.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
#[error("cannot write {path}")]
pub struct WriteError {
    pub path: PathBuf,
    #[source]
    pub source: io::Error,
}

/// Write `bytes` to `path`, whole or not at all; missing folders are made.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<(), WriteError> {
    write(path, bytes).map_err(|source| WriteError {
        path: path.to_owned(),
        source,
    })
}

fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or_else(|| Path::new("."));
    fs::create_dir_all(folder)?;
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = folder.join(name);
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, path)?;
    File::open(folder)?.sync_all()
}

/// Append one line and make it durable.
pub fn append_line(path: &Path, line: &str) -> Result<(), WriteError> {
    let append = || {
        let mut file = File::options().create(true).append(true).open(path)?;
        file.write_all(format!("{line}\n").as_bytes())?;
        file.sync_data()
    };
    append().map_err(|source| WriteError {
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn an_error_names_the_file() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let blocker = folder.path().join("file");
        fs::write(&blocker, b"").expect("writes");
        let error = write_whole(&blocker.join("x"), b"").expect_err("a file is no folder");
        assert!(error.to_string().contains("file/x"), "{error}");
    }
}
