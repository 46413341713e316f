//! What a listener has in the file system: [`Place`], [`Lock`].

use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::libc::{O_NOFOLLOW, O_NONBLOCK};
use rustix::fs::{FlockOperation, Mode, OFlags, chmod, flock, open};
use rustix::io::Errno;

use crate::error::Error;

/// A file or an empty directory that is removed on drop, if it is still the same, and by the process that made it: not
/// by one that was forked from that.
pub(super) struct Place {
    path: PathBuf,
    metadata: Metadata,
    process: u32,
}

impl Place {
    /// Takes over the socket at `path`, which this process has made.
    ///
    /// # Errors
    /// [`Error::AddressInUse`] where by now something else is there, which who may write to the directory can see to: it is
    /// neither opened to others nor removed. [`Error::Os`].
    pub(super) fn socket(path: PathBuf) -> Result<Self, Error> {
        let metadata = fs::symlink_metadata(&path).map_err(Error::os_at("look at a socket", &path))?;
        if !metadata.file_type().is_socket() {
            return Err(Error::AddressInUse { path });
        }
        Ok(Self::new(path, metadata))
    }

    /// Makes a directory that nobody else may enter.
    pub(super) fn private_directory(path: PathBuf) -> Result<Self, Error> {
        let operation = "make a directory";
        fs::DirBuilder::new().mode(0o700).create(&path).map_err(Error::os_at(operation, &path))?;
        let metadata = fs::symlink_metadata(&path).map_err(Error::os_at(operation, &path))?;
        Ok(Self::new(path, metadata))
    }

    fn new(path: PathBuf, metadata: Metadata) -> Self {
        Self { path, metadata, process: cuvmm_driver::process_id() }
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Gives it that mode, if a umask has taken some of it. Whatever else came to its path is left alone.
    pub(super) fn set_mode(&self, mode: Mode) -> Result<(), Error> {
        if self.metadata.mode() & 0o7777 == mode.as_raw_mode() {
            return Ok(());
        }
        let operation = "change the mode of a socket";
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(open(&self.path, flags, Mode::empty()).map_err(Error::os_at(operation, &self.path))?);
        if !self.is(&file.metadata().map_err(Error::os_at(operation, &self.path))?) {
            return Err(Error::AddressInUse { path: self.path.clone() });
        }
        // A file that is open as a place alone takes no mode but by this name.
        chmod(format!("/proc/self/fd/{}", file.as_raw_fd()), mode).map_err(Error::os_at(operation, &self.path))
    }

    /// Whether it is still what its path names.
    fn is_there(&self) -> io::Result<bool> {
        match fs::symlink_metadata(&self.path) {
            Ok(found) => Ok(self.is(&found)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn is(&self, other: &Metadata) -> bool {
        (self.metadata.dev(), self.metadata.ino()) == (other.dev(), other.ino())
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.process != cuvmm_driver::process_id() {
            return;
        }
        // Between the look and the removal only those could come that do not take the lock.
        let removed = self.is_there().and_then(|is_there| match is_there {
            true if self.metadata.is_dir() => fs::remove_dir(&self.path),
            true => fs::remove_file(&self.path),
            false => Ok(()),
        });
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "not removed");
        }
    }
}

/// The right to be at a path: an empty file beside it that is locked (`flock`) as long as this lives.
///
/// A socket file says not whether somebody is about to listen there, or about to remove it. So whoever would replace a
/// stale one, or remove its own, has this first, and no two ever take each other's socket away. The kernel unlocks it when
/// its holder dies, however that happens.
pub(super) struct Lock {
    /// Goes before the lock does: who waits for nothing but the lock must not get one that nobody else can see.
    _place: Place,
    _file: File,
}

impl Lock {
    /// Takes the lock of a socket's path.
    ///
    /// # Errors
    /// [`Error::AddressInUse`] where somebody has it, or where the lock's path is that of another file; [`Error::Os`].
    pub(super) fn of(socket: &Path) -> Result<Self, Error> {
        let mut name = OsString::from(socket);
        name.push(".lock");
        let path = PathBuf::from(name);
        let operation = "lock the path of a socket";
        loop {
            // Nothing is written to it, and nothing waits, whatever is there.
            let flags = O_NOFOLLOW | O_NONBLOCK;
            let opened =
                OpenOptions::new().read(true).write(true).create(true).mode(0o600).custom_flags(flags).open(&path);
            let file = opened.map_err(Error::os_at(operation, socket))?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::INTR) => continue,
                Err(Errno::WOULDBLOCK) => return Err(Error::AddressInUse { path: socket.to_owned() }),
                Err(errno) => return Err(Error::os_at(operation, socket)(errno)),
            }
            let metadata = file.metadata().map_err(Error::os_at(operation, socket))?;
            if !metadata.is_file() || metadata.len() > 0 {
                return Err(Error::AddressInUse { path });
            }
            let place = Place::new(path.clone(), metadata);
            if place.is_there().map_err(Error::os_at(operation, socket))? {
                return Ok(Self { _place: place, _file: file });
            }
            // Who had it before has removed it, and others may be locking the one that came after it.
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn what_is_no_socket_is_not_taken_for_the_own_one() {
        let path = std::env::temp_dir().join(format!("cuvmm-ipc-place-{}", std::process::id()));
        fs::write(&path, "somebody's").unwrap();
        let taken = Place::socket(path.clone());
        assert!(matches!(taken, Err(Error::AddressInUse { path: found }) if found == path));
        assert_eq!(fs::read_to_string(&path).unwrap(), "somebody's");
        fs::remove_file(&path).unwrap();
    }

    /// That of a socket is looked for besides, so only here does it show what the lock alone is worth.
    #[test]
    fn a_lock_that_is_removed_at_each_end_is_never_held_twice() {
        let socket = std::env::temp_dir().join(format!("cuvmm-ipc-lock-{}", std::process::id()));
        let (holders, turns) = (AtomicUsize::new(0), AtomicUsize::new(0));
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while turns.load(Ordering::Relaxed) < 300 {
                        match Lock::of(&socket) {
                            Ok(lock) => {
                                let others = holders.fetch_add(1, Ordering::SeqCst);
                                thread::yield_now();
                                holders.fetch_sub(1, Ordering::SeqCst);
                                drop(lock);
                                turns.fetch_add(1, Ordering::Relaxed);
                                assert_eq!(others, 0);
                            }
                            Err(Error::AddressInUse { path }) => assert_eq!(path, socket),
                            Err(error) => panic!("{error}"),
                        }
                    }
                });
            }
        });
        assert!(!socket.with_extension("lock").exists());
    }
}
