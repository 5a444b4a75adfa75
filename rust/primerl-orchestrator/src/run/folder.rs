//! The lock of the output folder: one orchestrator at a time.

use crate::failure::RunError;
use std::fs::File;
use std::path::{Path, PathBuf};

pub(super) fn absolute(path: &Path) -> Result<PathBuf, RunError> {
    std::path::absolute(path).map_err(|source| RunError::OutputFolder {
        path: path.to_owned(),
        source,
    })
}

/// Two orchestrators in one folder would mix their journals. The kernel holds the lock, so a crash leaves none behind.
pub(super) fn lock_folder(output_dir: &Path) -> Result<File, RunError> {
    let path = output_dir.join("run/orchestrator.lock");
    let failed = |source| RunError::OutputFolder {
        path: output_dir.to_owned(),
        source,
    };
    std::fs::create_dir_all(output_dir.join("run")).map_err(failed)?;
    let file = File::options()
        .create(true)
        .append(true)
        .open(path)
        .map_err(failed)?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(RunError::OutputFolderInUse {
            path: output_dir.to_owned(),
        }),
        Err(std::fs::TryLockError::Error(source)) => Err(failed(source)),
    }
}
