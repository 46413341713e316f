//! A socket that a child process is started with: [`spawn_with_socket`], [`inherited_socket`].
//!
//! # Safety
//! A number of an open file is taken for a file of ours once a process, where the caller says that nobody else has it.
//! Between fork and exec one system call is made.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;
use rustix::io::{FdFlags, fcntl_dupfd_cloexec, fcntl_getfd, fcntl_setfd};

use crate::error::Error;
use crate::transport::require_unix_stream;

/// Names the number of the socket, to the child.
const VARIABLE: &str = "CUVMM_SOCKET";
/// Those below are the standard streams, which a command may put something else at.
const FIRST_NUMBER: RawFd = 3;

/// Starts a program that has one end of a socket pair, and returns the other.
///
/// The child finds its end by the number in the variable `CUVMM_SOCKET`: [`inherited_socket`] takes it, and a program
/// in another language opens the number. It is inherited by this child alone, whatever other threads start meanwhile.
/// This process keeps no copy of it: when the child has ended, and whom it handed the socket on to, an exchange fails
/// with [`Error::Closed`] at once.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut command = std::process::Command::new("sh");
/// command.args(["-c", "test -S /proc/self/fd/$CUVMM_SOCKET"]);
/// let (mut child, _socket) = cuvmm_ipc::spawn_with_socket(command)?;
/// assert!(child.wait()?.success());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Os`]. No process is left then.
pub fn spawn_with_socket(mut command: Command) -> Result<(Child, UnixStream), Error> {
    let pair = "make a socket pair";
    let (ours, theirs) = UnixStream::pair().map_err(Error::os(pair))?;
    // Also in a program that was started without standard streams.
    let theirs = fcntl_dupfd_cloexec(theirs, FIRST_NUMBER).map_err(Error::os(pair))?;
    command.env(VARIABLE, theirs.as_raw_fd().to_string());
    let keep_open = move || {
        fcntl_setfd(&theirs, FdFlags::empty())?;
        Ok(())
    };
    // SAFETY: between fork and exec it makes one system call by its number; it allocates nothing and takes no lock. The
    // file that it names is its own, and open as long as the command is there.
    unsafe { command.pre_exec(keep_open) };
    let child = command.spawn().map_err(Error::os_at("start a program", command.get_program().as_ref()))?;
    // And with the command, the copy of the child's end.
    drop(command);
    Ok((child, ours))
}

/// Takes the socket that this process was started with by [`spawn_with_socket`], once.
///
/// It is closed on exec from now on: children of this process don't get it. The variable stays, since to remove it is
/// not safe beside other threads; to those children it names no socket.
///
/// ```
/// use cuvmm_ipc::{Error, inherited_socket};
///
/// // SAFETY: the first thing of `main`.
/// match unsafe { inherited_socket() } {
///     Ok(socket) => println!("started by another process: {socket:?}"),
///     Err(Error::NotInherited { reason }) => println!("started by hand: {reason}"),
///     Err(error) => return Err(error),
/// }
/// # Ok::<(), Error>(())
/// ```
///
/// # Safety
/// Nobody else in this process closes the file of the number in `CUVMM_SOCKET` while this looks at it, and if it is a Unix
/// socket that is kept open on exec, nobody else owns it. Both hold where the variable is unset or comes from
/// [`spawn_with_socket`], and this is called before anything else opens files or takes them over by their numbers.
///
/// # Errors
/// [`Error::NotInherited`] where there is no such variable or no such file, or it was taken; [`Error::NotUnixStream`]
/// or [`Error::Os`] for another file, which stays as it is; [`Error::PassesPidfds`].
pub unsafe fn inherited_socket() -> Result<UnixStream, Error> {
    static IS_TAKEN: AtomicBool = AtomicBool::new(false);
    let missing = |reason| Error::NotInherited { reason };
    let value = std::env::var_os(VARIABLE).ok_or(missing("CUVMM_SOCKET is not set"))?;
    let number: RawFd = value.to_str().and_then(|text| text.parse().ok()).unwrap_or(-1);
    if number < 0 {
        return Err(missing("CUVMM_SOCKET is no number of a file"));
    }
    // SAFETY: takes no pointer, and answers EBADF for a number that is not open.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(missing("the file that CUVMM_SOCKET names is not open"));
    }
    // SAFETY: it is open, and so not -1, and stays open by the caller's promise that nobody else closes it meanwhile.
    let file = unsafe { BorrowedFd::borrow_raw(number) };
    // A number that was meant for this process's parent may be that of another file here, and most of those are not
    // inherited. So is the one that was taken before.
    if fcntl_getfd(file).map_err(Error::os("ask whether a file is inherited"))?.contains(FdFlags::CLOEXEC) {
        return Err(missing("the file that CUVMM_SOCKET names was not inherited, or was taken"));
    }
    require_unix_stream(file)?;
    fcntl_setfd(file, FdFlags::CLOEXEC).map_err(Error::os("keep a file from being inherited"))?;
    if IS_TAKEN.swap(true, Ordering::Relaxed) {
        return Err(missing("it was taken"));
    }
    // SAFETY: it is open, a socket, which needs no more than to be closed, nobody else's by the caller's promise, and
    // this is the only time that it is taken.
    let file = unsafe { OwnedFd::from_raw_fd(number) };
    Ok(file.into())
}
