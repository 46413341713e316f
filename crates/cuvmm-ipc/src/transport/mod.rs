//! Sending and receiving descriptors over a Unix stream socket: `SCM_RIGHTS`, as `docs/wire-format.md` has it.

mod channel;
mod incoming;
mod outgoing;

use std::os::fd::AsFd;
use std::time::Instant;

pub(crate) use channel::require_unix_stream;

use channel::Channel;
use incoming::Incoming;
use outgoing::Outgoing;

use cuvmm_driver::sys::CUmemAllocationHandleType;
use cuvmm_resource::{HandleKind, Release, VirtualMemoryBuffer, VirtualMemoryResource};

use crate::carried::{Carried, Each};
use crate::descriptor::{BufferDescriptor, Metadata};
use crate::error::Error;
use crate::export::Export;
use crate::import::Importer;
use crate::open_files;
use crate::watch;
use crate::wire::MAX_HANDLES_PER_MESSAGE;

/// How much a receiver takes from a peer, which may say anything: looked at before anything is allocated for it.
///
/// ```
/// use cuvmm_ipc::Limits;
///
/// let limits = Limits { max_bytes: 8 << 30, ..Limits::default() };
/// assert_eq!(limits.max_handles, 16_384);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(default, deny_unknown_fields))]
pub struct Limits {
    /// The most chunks. Each is an open file of this process for as long as the descriptor lives.
    pub max_handles: usize,
    /// The most memory: the sum of the chunks, in bytes.
    pub max_bytes: usize,
}

impl Default for Limits {
    /// 16,384 chunks and 1 TiB.
    fn default() -> Self {
        Self { max_handles: 1 << 14, max_bytes: 1 << 40 }
    }
}

/// Sends a descriptor over a connected Unix stream socket, and returns when the receiver has said that it has all.
///
/// The descriptor stays the caller's, and files that are its handles may be closed as soon as this returns: the receiver
/// has its own. Fabric handles hold nothing there, and are good as long as the memory is kept here: only a receiver
/// that calls [`receive_buffer`] has imported when this returns.
///
/// The socket may be blocking or not, and stays as it is, but for `SO_OOBINLINE`, which is on from now. Nobody else may
/// use it meanwhile. After an error it is in the middle of a message, and of no further use: close it.
///
/// ```
/// # use std::os::unix::net::UnixStream;
/// # use std::time::{Duration, Instant};
/// # use cuvmm_ipc::Limits;
/// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
/// # let (ours, theirs) = UnixStream::pair()?;
/// # let receiver = std::thread::spawn(move || {
/// #     cuvmm_ipc::receive(theirs, &Limits::default(), Instant::now() + Duration::from_secs(10))
/// # });
/// let descriptor = cuvmm_ipc::export(&resource.allocate(2 << 20)?)?;
/// cuvmm_ipc::send(&ours, &descriptor, Instant::now() + Duration::from_secs(10))?;
/// # assert_eq!(receiver.join().map_err(|_| "panicked")??.id(), descriptor.id());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Refused`] with the receiver's reason, [`Error::Timeout`] and [`Error::Closed`] for a receiver that is
/// silent or gone, [`Error::NotUnixStream`], [`Error::PassesPidfds`], [`Error::Os`] for what the system refused.
pub fn send<S: AsFd>(socket: S, descriptor: &BufferDescriptor, deadline: Instant) -> Result<(), Error> {
    let channel = Channel::new(socket.as_fd(), deadline)?;
    let mut outgoing = Outgoing::begin(channel, descriptor.metadata())?;
    while let Some(due) = outgoing.due()? {
        outgoing.send(&descriptor.handles().batch(due))?;
    }
    outgoing.finish()
}

/// Receives a descriptor from a connected Unix stream socket.
///
/// The peer is not trusted: what it announces is held against `limits` before anything is allocated, and whatever is
/// wrong, every handle that arrived is closed. A peer on another host, which a relay may have put there, is refused
/// before any handle is received. What the handles *are* is looked at when they are imported. A sender that fails our
/// checks is told the reason. A file that can't be a handle to memory, and may take its time to close, is closed by
/// another thread, so that no peer holds this up beyond the deadline. What the peer left in the socket unread goes when
/// the socket is closed, by whoever closes it; what no open file was left for, the kernel closes at once, and takes the
/// time that it takes.
///
/// The handles are closed on exec. The socket may be blocking or not, and stays as it is, but for `SO_OOBINLINE`, which
/// is on from now. Nobody else may use it meanwhile. After an error it is in the middle of a message, and of no further
/// use: close it, which also closes the handles that were on their way.
///
/// ```
/// # use std::os::unix::net::UnixStream;
/// # use std::time::{Duration, Instant};
/// # use cuvmm_ipc::{BufferDescriptor, Limits, Metadata};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (ours, theirs) = UnixStream::pair()?;
/// # let sender = std::thread::spawn(move || {
/// #     let handle = theirs.try_clone().map(std::os::fd::OwnedFd::from);
/// #     let sent = BufferDescriptor::new(Metadata::new(vec![2 << 20]), handle)?;
/// #     cuvmm_ipc::send(theirs, &sent, Instant::now() + Duration::from_secs(10))
/// # });
/// let limits = Limits { max_bytes: 1 << 30, ..Limits::default() };
/// let descriptor = cuvmm_ipc::receive(&ours, &limits, Instant::now() + Duration::from_secs(10))?;
/// assert_eq!(descriptor.size(), 2 << 20);
/// # sender.join().map_err(|_| "panicked")??;
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Timeout`] and [`Error::Closed`] for a sender that is silent or gone, [`Error::Abandoned`] for one that
/// gave up; [`Error::Wire`] and [`Error::UnexpectedHandles`] for what is no message of the protocol;
/// [`Error::WrongHost`], [`Error::TooManyHandles`], [`Error::TooManyBytes`]; [`Error::OpenFiles`] where this process has
/// too many open files, and [`Error::TruncatedHandles`] where handles were kept back for another reason;
/// [`Error::NotUnixStream`], [`Error::PassesPidfds`], [`Error::Os`].
pub fn receive<S: AsFd>(socket: S, limits: &Limits, deadline: Instant) -> Result<BufferDescriptor, Error> {
    let channel = Channel::new(socket.as_fd(), deadline)?;
    let receive = || {
        let mut incoming = Incoming::begin(channel, limits)?;
        let needed = incoming.metadata().sizes.len();
        let kind = incoming.metadata().handle_kind;
        if kind != CUmemAllocationHandleType::FABRIC {
            open_files::require(needed)?;
        }
        let mut handles = Carried::none_of(kind);
        loop {
            let batch = incoming.next(MAX_HANDLES_PER_MESSAGE).map_err(|error| match error {
                Error::OpenFiles { limit, .. } => Error::OpenFiles { limit, needed },
                error => error,
            })?;
            if batch.len() == 0 {
                return BufferDescriptor::with_handles(incoming.accept()?, handles);
            }
            handles.append(batch);
        }
    };
    receive().inspect_err(|error| incoming::refuse(channel, error))
}

/// How many handles [`receive_buffer`] has open at once, beyond those that come unasked.
const OPEN_AT_ONCE: usize = 32;

/// Exports a buffer and sends it, and returns when the receiver has said that it has all.
///
/// As [`export`](crate::export()) and [`send`] together, but batch by batch: each handle is closed as soon as it is
/// sent, so that the largest buffer needs few open files.
///
/// # Errors
/// As [`export`](crate::export()) and [`send`]. The receiver of a buffer that could not be exported whole is told.
pub fn send_buffer<S: AsFd>(socket: S, buffer: &VirtualMemoryBuffer, deadline: Instant) -> Result<(), Error> {
    watch::export(buffer, || {
        send_exported(Channel::new(socket.as_fd(), deadline)?, &Export::of(buffer, HandleKind::PosixFdAndFabric)?)
    })
}

fn send_exported(channel: Channel<'_>, export: &Export<'_>) -> Result<(), Error> {
    let mut outgoing = Outgoing::begin(channel, &export.metadata()?)?;
    while let Some(due) = outgoing.due()? {
        let handles = match export.handles(due) {
            Ok(handles) => handles,
            Err(error) => {
                outgoing.abandon();
                return Err(error);
            }
        };
        outgoing.send(&handles.batch(0..handles.len()))?;
        // Made here, files are known to close at once.
        drop(handles.into_each());
    }
    outgoing.finish()
}

/// Receives a descriptor and imports it, chunk by chunk as the handles arrive.
///
/// As [`receive`] and [`import`](crate::import()) together, but each handle is closed as soon as its chunk is imported,
/// so that the largest buffer needs few open files. What is wrong with the descriptor is found before any handle is
/// received, and the sender is told whether the buffer was *imported*. [`Importer::receive`] says how it is imported.
///
/// # Errors
/// As [`receive`] and [`import`](crate::import()). Nothing is left behind.
pub fn receive_buffer<S: AsFd>(
    socket: S,
    resource: &VirtualMemoryResource,
    limits: &Limits,
    deadline: Instant,
) -> Result<VirtualMemoryBuffer, Error> {
    Importer::new(resource).receive(socket, limits, deadline)
}

impl Importer<'_> {
    /// Receives a descriptor and imports it, as [`receive_buffer`] does.
    ///
    /// # Errors
    /// As [`receive_buffer`].
    pub fn receive<S: AsFd>(
        &self,
        socket: S,
        limits: &Limits,
        deadline: Instant,
    ) -> Result<VirtualMemoryBuffer, Error> {
        self.receive_with_metadata(socket, limits, deadline).map(|(buffer, _)| buffer)
    }

    /// As [`receive`](Self::receive), and gives what the sender said of the buffer, too: by its [`BufferId`] an importer
    /// knows a buffer again that has grown since.
    ///
    /// ```
    /// # use std::os::unix::net::UnixStream;
    /// # use std::time::{Duration, Instant};
    /// # use cuvmm_ipc::{Importer, Limits, buffer_id, send_buffer};
    /// # use cuvmm_resource::{HandleKind, Options, VirtualMemoryResource};
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Simulator::new(Machine::default()).driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new().handle_kind(HandleKind::PosixFd))?;
    /// # let (ours, theirs) = UnixStream::pair()?;
    /// # let deadline = Instant::now() + Duration::from_secs(10);
    /// # let shared = resource.allocate(2 << 20)?;
    /// # std::thread::scope(|scope| {
    /// # scope.spawn(|| send_buffer(theirs, &shared, deadline));
    /// let (buffer, told) = Importer::new(&resource).receive_with_metadata(&ours, &Limits::default(), deadline)?;
    /// assert_eq!(told.size, buffer.size());
    /// assert_eq!(told.id, Some(buffer_id(&shared)?), "the exporter's");
    /// # Ok(())
    /// # })
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`receive_buffer`].
    ///
    /// [`BufferId`]: crate::BufferId
    pub fn receive_with_metadata<S: AsFd>(
        &self,
        socket: S,
        limits: &Limits,
        deadline: Instant,
    ) -> Result<(VirtualMemoryBuffer, Metadata), Error> {
        let receive = || {
            let channel = Channel::new(socket.as_fd(), deadline)?;
            self.receive_from(channel, limits).inspect_err(|error| incoming::refuse(channel, error))
        };
        watch::import_with(watch::import_span(self.resource(), None)?, receive, |(buffer, _)| buffer)
    }

    fn receive_from(&self, channel: Channel<'_>, limits: &Limits) -> Result<(VirtualMemoryBuffer, Metadata), Error> {
        let mut incoming = Incoming::begin(channel, limits)?;
        let metadata = incoming.metadata().clone();
        let admitted = self.admit(&metadata)?;
        let mut handles = Each::default();
        let buffer = admitted.map(&metadata, |chunk| {
            if let Some(handle) = handles.next() {
                return Ok(Some(handle));
            }
            let batch = incoming.next(OPEN_AT_ONCE)?;
            admitted.check_files(batch.as_fds().enumerate().map(|(nth, fd)| (chunk + nth, fd)))?;
            handles = batch.into_each();
            Ok(handles.next())
        })?;
        incoming.accept().inspect_err(|_| {
            // Nobody has had it, so there is no work on it that its drop is to wait for.
            let _ = buffer.set_release(Release::Caller);
        })?;
        Ok((buffer, metadata))
    }
}
