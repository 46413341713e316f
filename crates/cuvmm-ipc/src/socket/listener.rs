//! [`Listener`]: a socket with a name, at which clients arrive.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Instant;

use nix::poll::PollFlags;
use rustix::fs::fchmod;
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags, accept_with, bind, listen};

use super::address;
use super::peers::{AllowedPeers, PeerIdentity};
use super::place::{Lock, Place};
use crate::error::Error;
use crate::identity::random_bits;
use crate::wait::{time_left, until_ready};

/// How many connections may wait to be accepted. Others wait in [`connect`](super::connect()).
const BACKLOG: i32 = 128;

/// A socket with a path, at which those who are allowed connect.
///
/// Unless others are allowed, no other user can connect at any time, also not while it is made: the socket has its mode
/// before it has its path. That keeps strangers from the queue. Who came is asked of the kernel and held against the
/// [`AllowedPeers`] at each [`accept`](Self::accept), which is the check that counts.
///
/// Dropped, it removes its socket, and what else it made. One that was killed leaves them, and the next to bind the path
/// replaces them.
///
/// Connections are handed out one by one, and each is a plain stream for [`send_buffer`](crate::send_buffer) and the
/// others. Serve each by a thread of its own, and a client that is slow or says nothing holds up only its own.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use cuvmm_ipc::{AllowedPeers, Limits, Listener, connect, receive_buffer, send_buffer};
/// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
///
/// let buffer = resource.allocate(4 << 20)?;
/// let deadline = Instant::now() + Duration::from_secs(10);
/// let listener = Listener::private(AllowedPeers::default())?;
/// std::thread::scope(|scope| {
///     // In place of three processes.
///     let clients = [(); 3].map(|()| {
///         scope.spawn(|| {
///             let socket = connect(listener.path(), &AllowedPeers::default(), deadline)?;
///             receive_buffer(&socket, &resource, &Limits::default(), deadline)
///         })
///     });
///     for _ in &clients {
///         let (socket, _) = listener.accept(deadline)?;
///         let buffer = &buffer;
///         scope.spawn(move || send_buffer(&socket, buffer, deadline));
///     }
///     for client in clients {
///         assert_eq!(client.join().map_err(|_| "panicked")??.size(), 4 << 20);
///     }
///     Ok(())
/// })
/// # }
/// ```
pub struct Listener {
    // The fields are dropped in this order: the file while the socket holds it, so that no other can have its number, and
    // what keeps others from the path at last.
    file: Place,
    socket: OwnedFd,
    allowed: AllowedPeers,
    _around: Around,
}

/// What keeps others from the path.
enum Around {
    Locked { _lock: Lock },
    Private { _directory: Place },
}

impl Listener {
    /// Listens at `path`, for those peers.
    ///
    /// A socket that nobody listens at any more is replaced; one that somebody does, or any other file, never. Beside it
    /// stands `PATH.lock` as long as the listener lives: of several that bind the path at once, one gets it.
    ///
    /// A relative path is taken from the current directory, and is the whole path from then on. The directory must be
    /// there, and all peers must be allowed to enter it. Where other users or groups are among them, the socket's
    /// file has the mode 0666 (0660 for the own group), and who connects is told apart at [`accept`](Self::accept).
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use cuvmm_ipc::{AllowedPeers, Error, Listener};
    ///
    /// let path = std::env::temp_dir().join(format!("cuvmm-weights-{}", std::process::id()));
    /// let listener = Listener::bind(&path, AllowedPeers::default())?;
    /// let second = Listener::bind(&path, AllowedPeers::default());
    /// assert!(matches!(second, Err(Error::AddressInUse { .. })));
    /// drop(listener);
    /// assert!(!path.exists());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::PathTooLong`], before anything is done; [`Error::AddressInUse`]; [`Error::Os`]. Nothing is left behind.
    pub fn bind<P: AsRef<Path>>(path: P, allowed: AllowedPeers) -> Result<Self, Error> {
        let path = path.as_ref();
        let path = std::path::absolute(path).map_err(Error::os_at("name a socket", path))?;
        let address = address::of(&path)?;
        let lock = Lock::of(&path)?;
        remove_stale(&path, &address)?;
        Self::listen(path, &address, allowed, Around::Locked { _lock: lock })
    }

    /// Listens at a path of its own making, in a directory that no other user may enter: under `$XDG_RUNTIME_DIR`, or
    /// where that can't be written to, under the directory for temporary files. Tell it to the clients.
    ///
    /// Other users don't get there, also where they are allowed.
    ///
    /// # Errors
    /// [`Error::PathTooLong`], [`Error::Os`]. Nothing is left behind.
    pub fn private(allowed: AllowedPeers) -> Result<Self, Error> {
        let [random, _] = random_bits().map_err(Error::os("read random bits"))?;
        let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
        let temporary = std::env::temp_dir();
        let temporary = std::path::absolute(&temporary).map_err(Error::os_at("name a directory", &temporary))?;
        let in_runtime = runtime.and_then(|parent| private_path(&parent, random).ok());
        let (directory, address) = in_runtime.map_or_else(|| private_path(&temporary, random), Ok)?;
        let path = directory.path().join(SOCKET);
        Self::listen(path, &address, allowed, Around::Private { _directory: directory })
    }

    fn listen(path: PathBuf, address: &SocketAddrUnix, allowed: AllowedPeers, around: Around) -> Result<Self, Error> {
        let socket = address::socket(SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)?;
        // The file gets the mode of the socket, less the umask, at the instant in which it is made.
        let mode = allowed.mode();
        fchmod(&socket, mode).map_err(Error::os_at("set the mode of a socket", &path))?;
        match bind(&socket, address) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => return Err(Error::AddressInUse { path }),
            Err(errno) => return Err(Error::os_at("bind a socket", &path)(errno)),
        }
        let file = Place::socket(path)?;
        file.set_mode(mode)?;
        listen(&socket, BACKLOG).map_err(Error::os_at("listen", file.path()))?;
        Ok(Self { file, socket, allowed, _around: around })
    }

    /// The path to connect to.
    pub fn path(&self) -> &Path {
        self.file.path()
    }

    /// Waits until somebody connects who is allowed, or is not: then it says so, and goes on listening.
    ///
    /// The stream is blocking, and closed on exec. Several threads may wait at once.
    ///
    /// # Errors
    /// [`Error::PeerDenied`] for one that is not allowed, whose connection is closed: accept the next.
    /// [`Error::Timeout`]. [`Error::Os`], as where this process has too many open files: whoever came still waits, and
    /// may be accepted when there are fewer.
    pub fn accept(&self, deadline: Instant) -> Result<(UnixStream, PeerIdentity), Error> {
        let operation = "accept a connection";
        loop {
            match accept_with(&self.socket, SocketFlags::CLOEXEC) {
                Ok(socket) => {
                    let (socket, peer) = self.allowed.admit(socket)?;
                    return Ok((socket.into(), peer));
                }
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => {
                    let time = time_left(deadline).ok_or(Error::Timeout { operation })?;
                    until_ready(self.socket.as_fd(), PollFlags::POLLIN, time)?;
                }
                Err(errno) => return Err(Error::os_at(operation, self.path())(errno)),
            }
        }
    }
}

/// For whoever waits for several things at once: readable when somebody has connected.
impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl std::fmt::Debug for Listener {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Listener").field("path", &self.path()).field("allowed", &self.allowed).finish_non_exhaustive()
    }
}

/// The name of a socket in a directory of its own.
const SOCKET: &str = "socket";

/// Makes the directory of a private socket.
fn private_path(parent: &Path, random: u64) -> Result<(Place, SocketAddrUnix), Error> {
    let directory = parent.join(format!("cuvmm-{random:016x}"));
    let address = address::of(&directory.join(SOCKET))?;
    Ok((Place::private_directory(directory)?, address))
}

/// Removes a socket that nobody listens at. Called with the path's lock.
fn remove_stale(path: &Path, address: &SocketAddrUnix) -> Result<(), Error> {
    let operation = "look for a socket";
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() && address::is_stale(address)? => {
            fs::remove_file(path).map_err(Error::os_at("remove a stale socket", path))
        }
        Ok(_) => Err(Error::AddressInUse { path: path.to_owned() }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::os_at(operation, path)(error)),
    }
}
