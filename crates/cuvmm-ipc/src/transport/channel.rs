//! [`Channel`]: bytes and handles over a Unix stream socket, until a deadline.
//!
//! Messages go through rustix both ways. Receiving: its ancillary buffer hands every handle over as an `OwnedFd`, also
//! where the kernel had to leave some out; nix 0.32 answers ENOBUFS then, and those that arrived leak. Sending: it
//! takes `BorrowedFd`s, where nix takes numbers. The rest (poll) goes through nix.
//!
//! The socket's own flags stay as they are, but for one: each call says for itself that it must not block
//! (`MSG_DONTWAIT`), that a peer that is gone raises no signal (`MSG_NOSIGNAL`), and that what arrives is closed on exec
//! (`MSG_CMSG_CLOEXEC`). What a peer sends out of band is to come in line (`SO_OOBINLINE`): the kernel would pass it
//! over, and close what came with it in the midst of our call, however long that takes.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::libc;
use nix::poll::PollFlags;
use nix::sys::socket::GetSockOpt;
use nix::sys::socket::sockopt::GetBool;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketType, recvmsg, sendmsg, sockopt,
};

use crate::error::Error;
use crate::handles::Handles;
use crate::open_files;
use crate::wait::{time_left, until_ready};
use crate::wire::MAX_HANDLES_PER_MESSAGE;

/// Room for as many handles as one message can have.
const RIGHTS_SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_HANDLES_PER_MESSAGE));
/// Room for those, and for what the socket's owner may have asked to get with each message (credentials and the
/// like), which the kernel writes first.
const RECEIVE_SPACE: usize = RIGHTS_SPACE + 1024;
/// The waits for others to receive what is in flight: the first, and the longest.
const IN_FLIGHT_WAIT: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

const SO_PASSPIDFD: libc::c_int = 76;

/// Whether each message comes with a descriptor of the process that sent it (Linux 6.5).
#[derive(Clone, Copy)]
struct PassPidfd;

nix::getsockopt_impl!(PassPidfd, libc::SOL_SOCKET, SO_PASSPIDFD, bool, GetBool);

/// One end of a connection, and the time until which it is used.
#[derive(Clone, Copy)]
pub(super) struct Channel<'s> {
    socket: BorrowedFd<'s>,
    deadline: Instant,
}

impl<'s> Channel<'s> {
    /// Over that socket.
    ///
    /// # Errors
    /// [`Error::NotUnixStream`]; [`Error::PassesPidfds`]; [`Error::Os`] for what is no socket.
    pub(super) fn new(socket: BorrowedFd<'s>, deadline: Instant) -> Result<Self, Error> {
        require_unix_stream(socket)?;
        sockopt::set_socket_oobinline(socket, true).map_err(Error::os("take what is out of band in line"))?;
        Ok(Self { socket, deadline })
    }

    /// Sends all of `bytes`, with `handles` (at most [`MAX_HANDLES_PER_MESSAGE`]) at their first byte. A peer that says
    /// something while it takes nothing ends it, with [`Error::UnexpectedReply`]: what it says is not read here.
    pub(super) fn send(&self, bytes: &[u8], handles: &[BorrowedFd<'_>], operation: &'static str) -> Result<(), Error> {
        let mut left = bytes;
        // The kernel hands the handles over with the first byte that it takes.
        let mut handles = handles;
        let mut in_flight_wait = IN_FLIGHT_WAIT.0;
        while !left.is_empty() {
            let ready = match self.send_once(left, handles) {
                Ok(sent) => {
                    left = left.get(sent..).unwrap_or_default();
                    handles = &[];
                    continue;
                }
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => self.wait(PollFlags::POLLOUT | PollFlags::POLLIN, operation)?,
                // Too many handles of this user are on their way; nothing tells when they arrive.
                Err(errno @ Errno::ETOOMANYREFS) => {
                    let time_left = time_left(self.deadline).ok_or_else(|| Error::os(operation)(errno))?;
                    let wait = in_flight_wait.min(time_left);
                    in_flight_wait = IN_FLIGHT_WAIT.1.min(in_flight_wait * 2);
                    until_ready(self.socket, PollFlags::POLLIN, wait)?
                }
                Err(errno) => return Err(failed(errno, operation)),
            };
            // A peer that is gone is heard of by the next attempt.
            if ready == PollFlags::POLLIN {
                return Err(Error::UnexpectedReply);
            }
        }
        Ok(())
    }

    /// Sends all of `bytes`, whatever the peer says meanwhile.
    pub(super) fn reply(&self, bytes: &[u8], operation: &'static str) -> Result<(), Error> {
        let mut left = bytes;
        while !left.is_empty() {
            match self.send_once(left, &[]) {
                Ok(sent) => left = left.get(sent..).unwrap_or_default(),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => drop(self.wait(PollFlags::POLLOUT, operation)?),
                Err(errno) => return Err(failed(errno, operation)),
            }
        }
        Ok(())
    }

    /// Sends `bytes` if that needs no waiting and the peer is there; otherwise nothing comes of it.
    pub(super) fn send_if_possible(&self, bytes: &[u8]) {
        if let Err(errno) = self.send_once(bytes, &[]) {
            tracing::debug!(%errno, "a last word was not sent");
        }
    }

    fn send_once(&self, bytes: &[u8], handles: &[BorrowedFd<'_>]) -> Result<usize, Errno> {
        let mut space = [MaybeUninit::uninit(); RIGHTS_SPACE];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !handles.is_empty() && !control.push(SendAncillaryMessage::ScmRights(handles)) {
            // What the kernel would answer.
            return Err(Errno::EINVAL);
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        sendmsg(self.socket, &[IoSlice::new(bytes)], &mut control, flags).map_err(errno)
    }

    /// Receives exactly as many bytes as `bytes` has room for, and appends the handles that come with them to
    /// `handles`. More than `most` handles end it at once.
    ///
    /// Whatever fails, every handle that arrived is in `handles`.
    pub(super) fn receive(
        &self,
        bytes: &mut [u8],
        handles: &mut Handles,
        most: usize,
        operation: &'static str,
    ) -> Result<(), Error> {
        let mut left = bytes;
        while !left.is_empty() {
            let mut space = [MaybeUninit::uninit(); RECEIVE_SPACE];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            let message = recvmsg(self.socket, &mut [IoSliceMut::new(left)], &mut control, flags).map_err(errno);
            for ancillary in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = ancillary {
                    handles.extend(rights);
                }
            }
            match message {
                Ok(message) if message.flags.contains(ReturnFlags::CTRUNC) => {
                    return Err(if open_files::is_reached() {
                        Error::OpenFiles { limit: open_files::soft_limit(), needed: most }
                    } else {
                        Error::TruncatedHandles { announced: most, received: handles.len() }
                    });
                }
                Ok(_) if handles.len() > most => {
                    return Err(Error::UnexpectedHandles { announced: most, received: handles.len() });
                }
                Ok(message) if message.bytes == 0 => return Err(Error::Closed { operation }),
                Ok(message) => {
                    left = left.get_mut(message.bytes..).unwrap_or_default();
                    // However often the peer sends a byte more.
                    if !left.is_empty() && time_left(self.deadline).is_none() {
                        return Err(Error::Timeout { operation });
                    }
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => drop(self.wait(PollFlags::POLLIN, operation)?),
                Err(errno) => return Err(failed(errno, operation)),
            }
        }
        Ok(())
    }

    /// Receives exactly those bytes, with which no handles may come.
    pub(super) fn receive_bytes(&self, bytes: &mut [u8], operation: &'static str) -> Result<(), Error> {
        self.receive(bytes, &mut Handles::default(), 0, operation)
    }

    /// The same channel, for what is there already.
    pub(super) fn without_waiting(self) -> Self {
        Self { deadline: Instant::now(), ..self }
    }

    /// Waits until the socket is ready, or has failed: then the call that waits says how.
    fn wait(&self, events: PollFlags, operation: &'static str) -> Result<PollFlags, Error> {
        until_ready(self.socket, events, time_left(self.deadline).ok_or(Error::Timeout { operation })?)
    }
}

/// # Errors
/// [`Error::NotUnixStream`]; [`Error::PassesPidfds`]; [`Error::Os`] for what is no socket.
pub(crate) fn require_unix_stream(socket: BorrowedFd<'_>) -> Result<(), Error> {
    let asked = Error::os("ask what kind of socket this is");
    let asked_again = Error::os("ask which family the socket is of");
    let kind = sockopt::socket_type(socket).map_err(asked)?;
    let family = sockopt::socket_domain(socket).map_err(asked_again)?;
    if kind != SocketType::STREAM || family != AddressFamily::UNIX {
        return Err(Error::NotUnixStream);
    }
    // rustix leaves out what it does not know, and such a descriptor would stay open. Older kernels have none.
    if PassPidfd.get(&socket) == Ok(true) {
        return Err(Error::PassesPidfds);
    }
    Ok(())
}

/// What a failed call says: that the peer is gone, or that the system refuses.
fn failed(errno: Errno, operation: &'static str) -> Error {
    match errno {
        Errno::EPIPE | Errno::ECONNRESET => Error::Closed { operation },
        errno => Error::os(operation)(errno),
    }
}

/// rustix has the number as a type of its own.
fn errno(error: rustix::io::Errno) -> Errno {
    Errno::from_raw(error.raw_os_error())
}
