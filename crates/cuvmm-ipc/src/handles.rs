//! [`Handles`]: open files from a peer, until it is known what they are.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

use crate::file_kind::FileKind;

/// How long the caller waits for files to be closed that may take long: most don't, and are closed when it goes on.
const PATIENCE: Duration = Duration::from_millis(50);

/// Files that came as handles and may be anything: also such that closing one takes as long as a peer likes. A socket
/// with unsent data waits for its linger time, a file of a user's own file system for that user's answer.
///
/// So what can't be a handle to memory is closed by another thread: nobody is held up by what somebody sent.
#[derive(Debug, Default)]
pub(crate) struct Handles(Vec<OwnedFd>);

impl Handles {
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn as_fds(&self) -> impl ExactSizeIterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }

    /// The files, for who knows what they are.
    pub(crate) fn into_files(mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.0)
    }
}

impl From<Vec<OwnedFd>> for Handles {
    fn from(files: Vec<OwnedFd>) -> Self {
        Self(files)
    }
}

impl Extend<OwnedFd> for Handles {
    fn extend<I: IntoIterator<Item = OwnedFd>>(&mut self, files: I) {
        self.0.extend(files);
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        let others: Vec<_> = self.0.drain(..).filter(|file| !FileKind::closes_at_once(file.as_fd())).collect();
        if others.is_empty() {
            return;
        }
        for file in &others {
            // Nobody here waits for what it has not sent. What is no socket has no such option.
            let _ = set_socket_linger(file, None);
        }
        let (closing, closed) = mpsc::channel::<()>();
        let close = move || {
            drop(others);
            drop(closing);
        };
        match thread::Builder::new().name("cuvmm-close".to_owned()).spawn(close) {
            // Ends with the thread, or before it.
            Ok(_) => drop(closed.recv_timeout(PATIENCE)),
            // They were closed here then.
            Err(error) => tracing::warn!(%error, "no thread to close a peer's files"),
        }
    }
}
