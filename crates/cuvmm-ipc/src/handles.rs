//! [`Handles`]: open files from a peer, until it is known what they are.

use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use cuvmm_driver::OfProcess;
use rustix::io::fcntl_getfd;
use rustix::net::sockopt::set_socket_linger;

use crate::aside::Threads;
use crate::error::Error;
use crate::file_kind::FileKind;
use crate::open_files;

/// Who closes files that may take long.
static CLOSING: OfProcess<Threads> = OfProcess::new();

/// How long the caller waits for files to be closed: as a rule all are when it goes on.
const PATIENCE: Duration = Duration::from_millis(50);

/// An open file that a descriptor is to have as a handle, in whichever way its owner gives it.
///
/// ```
/// use std::os::fd::{AsFd, OwnedFd};
/// use std::sync::Arc;
///
/// use cuvmm_ipc::{BufferDescriptor, HandleFd};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let file = || std::fs::File::open("/dev/null").map(OwnedFd::from);
/// let (mine, shared) = (file()?, Arc::new(file()?));
/// let handles = [HandleFd::from(mine.as_fd()), HandleFd::from(Arc::clone(&shared)), HandleFd::from(file()?)];
/// let descriptor = BufferDescriptor::from_fds(handles, &[2 << 20; 3], None)?;
/// drop(mine); // the descriptor has a duplicate
/// drop(shared); // and a share
/// assert_eq!(descriptor.fds().len(), 3);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub enum HandleFd<'f> {
    /// Taken: the descriptor closes it.
    Owned(OwnedFd),
    /// Shared: its last holder closes it.
    Shared(Arc<OwnedFd>),
    /// Duplicated, closed on exec: it stays its owner's.
    Borrowed(BorrowedFd<'f>),
}

impl From<OwnedFd> for HandleFd<'_> {
    fn from(file: OwnedFd) -> Self {
        Self::Owned(file)
    }
}

impl From<Arc<OwnedFd>> for HandleFd<'_> {
    fn from(file: Arc<OwnedFd>) -> Self {
        Self::Shared(file)
    }
}

impl<'f> From<BorrowedFd<'f>> for HandleFd<'f> {
    fn from(file: BorrowedFd<'f>) -> Self {
        Self::Borrowed(file)
    }
}

impl HandleFd<'_> {
    /// The file, if its number is one of an open file. It need not be: numbers come from other languages, too.
    fn open(self) -> Result<Arc<OwnedFd>, Error> {
        let asked = fcntl_getfd(match &self {
            Self::Owned(file) => file.as_fd(),
            Self::Shared(file) => file.as_fd(),
            Self::Borrowed(file) => *file,
        });
        match (asked, self) {
            (Ok(_), Self::Owned(file)) => Ok(Arc::new(file)),
            (Ok(_), Self::Shared(file)) => Ok(file),
            (Ok(_), Self::Borrowed(file)) => duplicate(file).map(Arc::new),
            (Err(error), bad) => {
                // Nothing is to be closed here; by now the number may be somebody's.
                let last = match bad {
                    Self::Owned(file) => Some(file),
                    Self::Shared(file) => Arc::into_inner(file),
                    Self::Borrowed(_) => None,
                };
                let _ = last.map(OwnedFd::into_raw_fd);
                Err(Error::os("use a handle")(error))
            }
        }
    }
}

/// A second descriptor of the same file, closed on exec.
pub(crate) fn duplicate(file: BorrowedFd<'_>) -> Result<OwnedFd, Error> {
    file.try_clone_to_owned().map_err(Error::os("duplicate a handle"))
}

/// Closes a connection that is refused: what the peer sent with it that nobody has read goes with it, and may take as
/// long as handles may.
pub(crate) fn close_unread(connection: OwnedFd) {
    drop(Handles::from_iter([connection]));
}

/// Files that came as handles and may be anything: also such that closing one takes as long as a peer likes. A socket
/// with unsent data waits for its linger time, a file of a user's own file system for that user's answer. A file in memory
/// takes as long as its pages are many, and each of some device nodes (`/dev/net/tun`) some milliseconds.
///
/// So what can't be a handle to memory is closed by another thread, and so is the rest once it has taken long: nobody is
/// held up by what somebody sent. There are few such threads. A peer that keeps all of them waiting keeps what comes
/// behind it open, as it could by sending more.
#[derive(Debug, Default)]
pub(crate) struct Handles(Vec<Arc<OwnedFd>>);

impl Handles {
    /// Takes the files over, or none: what was taken or duplicated is closed then.
    pub(crate) fn take<'f>(files: impl IntoIterator<Item: Into<HandleFd<'f>>>) -> Result<Self, Error> {
        let mut handles = Self::default();
        let mut failed = None;
        let mut needed = 0;
        for file in files {
            needed += 1;
            match file.into() {
                HandleFd::Borrowed(_) if failed.is_some() => {}
                // Also after a failure: what is owned but not open must not be closed.
                file => match file.open() {
                    Ok(file) => handles.0.push(file),
                    Err(error) => failed = failed.or(Some(open_files::explain(error, needed))),
                },
            }
        }
        match failed {
            None => Ok(handles),
            Some(Error::OpenFiles { limit, .. }) => Err(Error::OpenFiles { limit, needed }),
            Some(error) => Err(error),
        }
    }

    /// Duplicates of all.
    pub(crate) fn try_clone(&self) -> Result<Self, Error> {
        let duplicate = |file| duplicate(file).map_err(|error| open_files::explain(error, self.len()));
        self.as_fds().map(duplicate).collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn as_files(&self) -> &[Arc<OwnedFd>] {
        &self.0
    }

    pub(crate) fn as_fds(&self) -> impl ExactSizeIterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }

    /// Moves all of `others` behind these.
    pub(crate) fn append(&mut self, others: &mut Self) {
        self.0.append(&mut others.0);
    }

    /// The files, for who knows what they are.
    pub(crate) fn into_files(mut self) -> Vec<Arc<OwnedFd>> {
        std::mem::take(&mut self.0)
    }

    /// The files, for who wants to own them: what others share is duplicated.
    pub(crate) fn into_owned(mut self) -> Result<Vec<OwnedFd>, Error> {
        let needed = self.len();
        for file in &mut self.0 {
            if Arc::get_mut(file).is_none() {
                let own = duplicate(file.as_fd()).map_err(|error| open_files::explain(error, needed))?;
                *file = Arc::new(own);
            }
        }
        Ok(self.into_files().into_iter().filter_map(Arc::into_inner).collect())
    }
}

impl FromIterator<OwnedFd> for Handles {
    fn from_iter<I: IntoIterator<Item = OwnedFd>>(files: I) -> Self {
        Self(files.into_iter().map(Arc::new).collect())
    }
}

impl Extend<OwnedFd> for Handles {
    fn extend<I: IntoIterator<Item = OwnedFd>>(&mut self, files: I) {
        self.0.extend(files.into_iter().map(Arc::new));
    }
}

impl Drop for Handles {
    fn drop(&mut self) {
        let begin = Instant::now();
        let last = self.0.drain(..).filter_map(Arc::into_inner);
        // Those that take a moment each take long together.
        let is_for_here = |file: &OwnedFd| begin.elapsed() < PATIENCE && FileKind::closes_at_once(file.as_fd());
        let others: Vec<_> = last.filter(|file| !is_for_here(file)).collect();
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
        Threads::leave(&CLOSING, close);
        // Ends when they are closed.
        let _ = closed.recv_timeout(PATIENCE.saturating_sub(begin.elapsed()));
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};

    use super::*;

    #[test]
    fn what_takes_long_to_close_is_told_apart() {
        let in_memory = |mebibytes: u64| {
            let file = memfd_create("cuvmm-ipc-test", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&file, 64 << 30).unwrap();
            fallocate(&file, FallocateFlags::empty(), 0, mebibytes << 20).unwrap();
            file
        };
        let open = |path| OwnedFd::from(std::fs::File::open(path).unwrap());
        let check = |file: OwnedFd, expect, what| assert_eq!(FileKind::closes_at_once(file.as_fd()), expect, "{what}");
        check(in_memory(1), true, "little memory");
        check(in_memory(17), false, "much memory");
        check(open("/dev/null"), true, "a device node");
        check(open("/"), false, "a directory");
        check(TcpListener::bind("127.0.0.1:0").unwrap().into(), false, "a socket");
    }
}
