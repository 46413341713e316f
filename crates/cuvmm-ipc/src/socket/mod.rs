//! Sockets with a name: [`Listener`] and [`connect`], for processes of which neither started the other.

mod address;
mod listener;
mod peers;
mod place;

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;

pub use listener::Listener;
pub use peers::{AllowedPeers, PeerIdentity};

use crate::error::Error;
use crate::wait::time_left;

/// Connects to who listens at `path`, and sees that it is somebody allowed.
///
/// Where more wait to be accepted than the listener has room for, this waits, too. Where nobody listens it fails at
/// once: [`Error::Os`] with ENOENT, or with ECONNREFUSED where a listener has died. Who listens is the process that
/// called `listen`, with the user and group that it had then.
///
/// Whom the socket's mode keeps out has [`Error::Os`] with EACCES here, and the listener sees nothing of it. Once other
/// users are allowed there, the mode lets all connect: this then succeeds, and who is denied at `accept` has
/// [`Error::Closed`] at the first exchange.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use cuvmm_ipc::{AllowedPeers, Listener, connect};
///
/// let deadline = Instant::now() + Duration::from_secs(10);
/// let listener = Listener::private(AllowedPeers::default())?;
/// let ours = connect(listener.path(), &AllowedPeers::default(), deadline)?;
/// let (theirs, peer) = listener.accept(deadline)?;
/// assert_eq!(peer.pid, std::process::id());
/// # Ok::<(), cuvmm_ipc::Error>(())
/// ```
///
/// # Errors
/// [`Error::PathTooLong`]; [`Error::Timeout`]; [`Error::PeerDenied`] for a listener that is not allowed;
/// [`Error::Os`].
pub fn connect<P: AsRef<Path>>(path: P, allowed: &AllowedPeers, deadline: Instant) -> Result<UnixStream, Error> {
    let operation = "connect to a socket";
    let path = path.as_ref();
    let address = address::of(path)?;
    let stream = UnixStream::from(address::socket(SocketFlags::CLOEXEC)?);
    loop {
        // A connect waits as long as a send would, and there is no other way to wait for room in the listener's queue.
        let time = time_left(deadline).unwrap_or(Duration::from_micros(1));
        stream.set_write_timeout(Some(time)).map_err(Error::os_at(operation, path))?;
        match rustix::net::connect(&stream, &address) {
            Ok(()) => break,
            Err(Errno::AGAIN | Errno::INTR) if time_left(deadline).is_none() => {
                return Err(Error::Timeout { operation });
            }
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => return Err(Error::os_at(operation, path)(errno)),
        }
    }
    stream.set_write_timeout(None).map_err(Error::os_at(operation, path))?;
    let (socket, _) = allowed.admit(stream.into())?;
    Ok(socket.into())
}
