//! Waiting for a socket, until a deadline.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::error::Error;

/// None once the deadline has passed.
pub(crate) fn time_left(deadline: Instant) -> Option<Duration> {
    deadline.checked_duration_since(Instant::now()).filter(|left| !left.is_zero())
}

/// What the socket is ready for; nothing once `time` is over, or where a signal came in between.
pub(crate) fn until_ready(socket: BorrowedFd<'_>, events: PollFlags, time: Duration) -> Result<PollFlags, Error> {
    // poll counts milliseconds: up, so that it never spins through the last one.
    let milliseconds = time.as_micros().div_ceil(1000);
    let timeout = i32::try_from(milliseconds).ok().and_then(|time| PollTimeout::try_from(time).ok());
    let mut sockets = [PollFd::new(socket, events)];
    match poll(&mut sockets, timeout.unwrap_or(PollTimeout::MAX)) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(Error::os("wait for a socket")(errno)),
    }
    let [socket] = sockets;
    Ok(socket.revents().unwrap_or(PollFlags::empty()))
}
