//! What the suites of this crate share: handles that can be told apart, and a count of open files.
#![allow(dead_code, reason = "each suite uses its part of it")]

use std::collections::BTreeMap;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cuvmm_ipc::{BufferDescriptor, Metadata};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::stat::fstat;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Long enough for whatever ends by itself.
pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// A file in memory, which stands for a handle where nothing looks at what a handle is.
pub(crate) fn memory_file() -> OwnedFd {
    memfd_create(c"cuvmm-ipc-test", MFdFlags::MFD_CLOEXEC).unwrap()
}

pub(crate) fn memory_files(count: usize) -> Vec<OwnedFd> {
    (0..count).map(|_| memory_file()).collect()
}

/// As many open files as this process may have: many machines start one with 1,024.
pub(crate) fn raise_open_files() {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    setrlimit(Resource::RLIMIT_NOFILE, hard, hard).unwrap();
}

/// Tells files apart, through whichever descriptor.
pub(crate) fn inode(fd: impl AsFd) -> u64 {
    fstat(fd).unwrap().st_ino
}

pub(crate) fn inodes(descriptor: &BufferDescriptor) -> Vec<u64> {
    descriptor.fds().map(inode).collect()
}

/// A descriptor of so many chunks of different sizes, the last of which the buffer covers in part.
pub(crate) fn descriptor(chunks: usize) -> BufferDescriptor {
    let mut metadata = Metadata::new((0..chunks).map(|chunk| 4096 * (chunk + 1)).collect());
    metadata.size -= if chunks > 0 { 1024 } else { 0 };
    BufferDescriptor::new(metadata, memory_files(chunks)).unwrap()
}

pub(crate) fn pair() -> (UnixStream, UnixStream) {
    UnixStream::pair().unwrap()
}

/// Sends as a peer of any kind may.
pub(crate) fn send_raw(socket: &UnixStream, bytes: &[u8], handles: &[BorrowedFd<'_>]) -> rustix::io::Result<()> {
    send_raw_with(socket, bytes, handles, SendFlags::empty())
}

pub(crate) fn send_raw_with(
    socket: &UnixStream,
    bytes: &[u8],
    handles: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> rustix::io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(handles.is_empty() || control.push(SendAncillaryMessage::ScmRights(handles)));
    let sent = sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags)?;
    assert_eq!(sent, bytes.len());
    Ok(())
}

/// Sees that no file stays open. While one lives, no other does: they would count each other's.
pub(crate) struct OpenFiles {
    before: BTreeMap<String, String>,
    _alone: MutexGuard<'static, ()>,
}

impl OpenFiles {
    pub(crate) fn watch() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        Self { before: Self::list(), _alone: alone }
    }

    /// Fails where others are open than at the beginning.
    pub(crate) fn assert_unchanged(self) {
        assert_eq!(Self::list(), self.before, "open files");
    }

    pub(crate) fn count() -> usize {
        Self::list().len()
    }

    fn list() -> BTreeMap<String, String> {
        let own = format!("/proc/{}/fd", std::process::id());
        std::fs::read_dir("/proc/self/fd")
            .unwrap()
            .filter_map(|entry| {
                let entry = entry.unwrap();
                let target = std::fs::read_link(entry.path()).ok()?.to_string_lossy().into_owned();
                // The listing itself.
                (target != own).then(|| (entry.file_name().to_string_lossy().into_owned(), target))
            })
            .collect()
    }
}
