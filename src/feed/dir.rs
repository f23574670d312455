//! The directory that a host's processes meet in, and the checks that make it a boundary.
//!
//! A socket's own mode depends on the process's umask, and some systems do not look at it at all.
//! So the *directory* is the boundary: of mode 0700, owned by this process's user, and no symbolic
//! link. On connecting, each side also asks the kernel for the other's user.

use crate::error::{Error, ErrorKind, Result};
use rustix::process::geteuid;
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use tokio::net::{UnixListener, UnixStream};

/// Where the list is served.
pub(crate) const FEED: &str = "feed.sock";
/// Where operators' commands are taken.
pub(crate) const ADMIN: &str = "admin.sock";
/// Who holds it serves.
const LOCK: &str = "lock";

/// A path of a socket may not be longer (`sun_path` less its end).
const SOCKET_PATH_MAX: usize = 107;

#[derive(Clone, Debug)]
pub(crate) struct Dir {
    path: PathBuf,
    allowed: Vec<u32>,
}

impl Dir {
    /// Makes the directory if it is not there, and checks it.
    pub(crate) fn make(path: &Path, allowed: &[u32]) -> Result<Dir> {
        match DirBuilder::new().mode(0o700).create(path) {
            Ok(()) => {}
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(refused(path, "cannot be made").with_source(e)),
        }
        Dir::open(path, allowed)
    }

    /// Checks the directory.
    pub(crate) fn open(path: &Path, allowed: &[u32]) -> Result<Dir> {
        let longest = path.as_os_str().len() + 1 + ADMIN.len();
        if longest > SOCKET_PATH_MAX {
            return Err(refused(path, "is too long for the path of a socket"));
        }
        // Of the link itself, not of what it points to.
        let meta = fs::symlink_metadata(path)
            .map_err(|e| refused(path, "cannot be looked at").with_source(e))?;
        let own = geteuid().as_raw();
        if meta.is_symlink() {
            return Err(refused(path, "is a symbolic link"));
        }
        if !meta.is_dir() {
            return Err(refused(path, "is no directory"));
        }
        if meta.uid() != own && !allowed.contains(&meta.uid()) {
            return Err(refused(path, "belongs to another user"));
        }
        if meta.mode() & 0o077 != 0 {
            return Err(refused(path, "is open to other users; its mode must be 0700"));
        }
        Ok(Dir { path: path.into(), allowed: allowed.into() })
    }

    /// The lock, if nobody else holds it; held until it is dropped.
    pub(crate) fn try_lead(&self) -> io::Result<Option<File>> {
        let file = OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .mode(0o600)
            .open(self.path.join(LOCK))?;
        match file.try_lock() {
            Ok(()) => Ok(Some(file)),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(e)) => Err(e),
        }
    }

    /// Listens. Only for who holds the lock: what is left of an earlier one is removed.
    pub(crate) fn listen(&self, name: &str) -> io::Result<UnixListener> {
        let path = self.path.join(name);
        match fs::symlink_metadata(&path) {
            Ok(meta) if meta.file_type().is_socket() => fs::remove_file(&path)?,
            Ok(_) => return Err(io::Error::other("something that is no socket is in the way")),
            Err(_) => {}
        }
        UnixListener::bind(path)
    }

    /// Connects to whoever serves, if it is of an allowed user.
    pub(crate) async fn connect(&self, name: &str) -> io::Result<UnixStream> {
        let stream = UnixStream::connect(self.path.join(name)).await?;
        if self.admits(&stream) {
            return Ok(stream);
        }
        Err(io::Error::new(io::ErrorKind::PermissionDenied, "the socket is of another user"))
    }

    /// Whether the process at the other end is of an allowed user, by the kernel's word.
    pub(crate) fn admits(&self, stream: &UnixStream) -> bool {
        let own = geteuid().as_raw();
        stream.peer_cred().is_ok_and(|c| c.uid() == own || self.allowed.contains(&c.uid()))
    }
}

fn refused(path: &Path, why: &str) -> Error {
    let text = format!("the feed's directory {} {why}", path.display());
    Error::not_applied(ErrorKind::Config, text)
}
