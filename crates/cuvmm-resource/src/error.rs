//! What the resource and its buffers can fail with.

use cuvmm_driver::sys::{CUdeviceptr, CUmemAllocationHandleType, CUmemLocation};
use cuvmm_driver::{CUresult, Call};

use crate::buffer::VirtualMemoryBuffer;
use crate::kind::{Access, HandleKind};
use crate::shortage::OutOfMemory;

/// What an operation of the resource or a buffer failed with.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let error = resource.allocate(1 << 40).unwrap_err();
/// assert!(matches!(&error, Error::OutOfMemory(shortage) if shortage.requested == 1 << 40));
/// assert_eq!(error.call(), Some(cuvmm_driver::Call::cuMemCreate));
/// assert_eq!(error.code(), Some(cuvmm_driver::CUresult::OUT_OF_MEMORY));
/// assert_eq!(
///     error.to_string(),
///     "cuMemCreate failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory, for 0x10000000000 bytes at a granularity of 0x200000"
/// );
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver refused a call, or values of two drivers met.
    #[error(transparent)]
    Driver(cuvmm_driver::Error),
    /// An operation on allocations, reservations or mappings failed.
    #[error(transparent)]
    Handles(cuvmm_handles::Error),
    /// There are not so many addresses left. It says nothing of memory.
    #[error("{error}, for {bytes:#x} bytes of addresses{}", aligned(*.alignment))]
    AddressSpaceExhausted {
        /// How many were asked for, rounded up.
        bytes: usize,
        /// What they were to be at a multiple of, in bytes; 0 for the granularity.
        alignment: usize,
        /// What the driver answered.
        error: cuvmm_driver::Error,
    },
    /// There is not so much memory left.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// Memory was mapped, and then somebody could not be given access to it.
    #[error("{error}, for {bytes:#x} bytes at {address}{}", to(*.location))]
    AccessRefused {
        /// Who, where that could be found out.
        location: Option<CUmemLocation>,
        /// Where the memory was mapped.
        address: CUdeviceptr,
        /// How many bytes.
        bytes: usize,
        /// What the driver answered.
        error: cuvmm_driver::Error,
    },
    /// The machine refuses memory of this handle kind, whatever its attributes promise: fabric handles take an IMEX
    /// channel, for one.
    #[error("memory of handle kind {kind:?} is refused here: {error}{}", lacking(*.kind, .error))]
    HandleKindRefused {
        /// The kind.
        kind: HandleKind,
        /// What trying it out failed with.
        error: cuvmm_driver::Error,
    },
    /// Memory of the host without a node of its own can't be shared; that of a node can.
    #[error("memory of the host can't have handle kind {kind:?}: name a NUMA node")]
    HandleKindOfHost {
        /// The kind that was asked for.
        kind: HandleKind,
    },
    /// Handle kinds that this library does not know: those of Windows, for one.
    #[error("handle kinds {kinds} are not supported")]
    UnknownHandleKind {
        /// The kinds.
        kinds: CUmemAllocationHandleType,
    },
    /// A device that does not reach the memory of another.
    #[error("device {from} does not reach the memory of device {to}")]
    PeerUnreachable {
        /// The device that was to be given access.
        from: i32,
        /// The device whose memory it is.
        to: i32,
    },
    /// A NUMA node that memory can't be asked of.
    #[error("NUMA node {node} can't be used: {reason}")]
    NumaNode {
        /// The node; -1 where the current one is not known.
        node: i32,
        /// Why.
        reason: &'static str,
    },
    /// A NUMA node that the driver gives no memory of.
    #[error("NUMA node {node} can't be used: {error}")]
    NumaNodeRefused {
        /// The node.
        node: i32,
        /// What the driver answered.
        error: cuvmm_driver::Error,
    },
    /// The device lacks something that the options ask for.
    #[error("device {ordinal} does not support {what}")]
    Unsupported {
        /// What.
        what: &'static str,
        /// The device.
        ordinal: i32,
    },
    /// An alignment that is no power of two.
    #[error("an alignment of {alignment} is no power of two")]
    Alignment {
        /// The alignment, in bytes.
        alignment: usize,
    },
    /// A hint that no address of the buffer could be.
    #[error("an address hint of {hint} is no multiple of {alignment:#x}")]
    AddressHint {
        /// The hint.
        hint: CUdeviceptr,
        /// What it must be a multiple of, in bytes.
        alignment: usize,
    },
    /// A bound on chunks that is less than the least chunk.
    #[error("chunks of at most {bound:#x} bytes can't be made at a granularity of {granularity:#x}")]
    MaxChunk {
        /// The bound, in bytes.
        bound: usize,
        /// The granularity, in bytes.
        granularity: usize,
    },
    /// A growth policy that adds nothing, or contradicts itself.
    #[error("a growth policy can't have {reason}")]
    GrowthPolicy {
        /// What is wrong.
        reason: &'static str,
    },
    /// Recycling that keeps nothing, or what others may have registered without being told.
    #[error("recycling can't have {reason}")]
    Recycling {
        /// What is wrong.
        reason: &'static str,
    },
    /// A budget for recycling that is less than the least chunk.
    #[error("recycling of at most {bytes:#x} bytes keeps nothing at a granularity of {granularity:#x}")]
    RecyclingBudget {
        /// The budget, in bytes.
        bytes: usize,
        /// The granularity, in bytes.
        granularity: usize,
    },
    /// Growing in place is not possible: the addresses behind the buffer can't be had.
    #[error("growing to {size:#x} bytes would move the buffer, whose addresses end at {capacity:#x}")]
    WouldMove {
        /// The size that it was to have, in bytes.
        size: usize,
        /// How many bytes its reserved addresses have room for.
        capacity: usize,
    },
    /// A chunk of another kind than the buffer that it was to be added to.
    #[error("memory with another {what} can't be added to the buffer")]
    ChunkMismatch {
        /// What differs.
        what: &'static str,
    },
    /// The resource's device may not write the memory.
    #[error("memory that its device may not write can't be zeroed")]
    NotWritable,
    /// The driver would do the copy or the fill by a device that was not granted the memory for it. Nothing was asked of
    /// the driver.
    #[error("the driver needs {} access to the memory for this, which was not granted", if *needed == Access::Read { "read" } else { "write" })]
    NotAccessible {
        /// What the device would have to be allowed: to read, or to read and write.
        needed: Access,
    },
    /// Bytes that do not lie within the buffer.
    #[error("{bytes} bytes at offset {offset} do not lie within a buffer of {size}")]
    OutOfBounds {
        /// Where they begin in the buffer.
        offset: usize,
        /// How many.
        bytes: usize,
        /// The buffer's size.
        size: usize,
    },
    /// A size that its chunks do not cover, or chunks with no size.
    #[error("a buffer of {size} bytes can't be made of chunks of {sum}")]
    Chunks {
        /// The size of the buffer.
        size: usize,
        /// What its chunks add up to.
        sum: usize,
    },
    /// An address at which no memory of the virtual memory calls is mapped: free, merely reserved, or ordinary memory.
    #[error("no virtual memory is mapped at {address}")]
    NotVmm {
        /// The address.
        address: CUdeviceptr,
    },
    /// A range that is not one whole reservation.
    #[error(
        "{size:#x} bytes at {address} are no reservation: there is one of {found_size:#x} bytes at {found_address}"
    )]
    NotOneReservation {
        /// Where the range begins.
        address: CUdeviceptr,
        /// Its size, in bytes.
        size: usize,
        /// Where the reservation begins that is there.
        found_address: CUdeviceptr,
        /// How many bytes that has.
        found_size: u64,
    },
    /// A mapping that lies partly within a range.
    #[error("the mapping of {size:#x} bytes at {address} reaches across an end of the range")]
    MappingAcross {
        /// Where the mapping begins.
        address: CUdeviceptr,
        /// How many bytes it has.
        size: u64,
    },
    /// A reservation in which memory is mapped that does not join what is mapped from its start on.
    #[error("memory is mapped at {address}, behind a hole")]
    MappedBehindHole {
        /// Where.
        address: CUdeviceptr,
    },
    /// Memory that does not lie where the resource's does.
    #[error("the memory at {address} is of {location}")]
    OtherLocation {
        /// Where it is mapped.
        address: CUdeviceptr,
        /// Where it lies, by the driver's word.
        location: CUmemLocation,
    },
    /// The stream is capturing a graph: nothing was queued on it or waited for. Where the capture began in the midst of
    /// a copy or a fill, that is in the graph or was done; it is to be done again.
    #[error("the stream is capturing")]
    StreamCapturing,
    /// The stream is not capturing a graph, or its capture was lost and can't end well any more.
    #[error("the stream is not capturing")]
    NotCapturing,
    /// The work that is waited for was not over by the deadline. Nothing was released.
    #[error("the work was not over by the deadline")]
    DeadlinePassed,
    /// Buffers were dropped or closed without waiting, and the work on them was not over by the deadline. They are let go of
    /// when it is.
    #[error("buffers that are gone still wait for work: {buffers}")]
    StillPending {
        /// How many.
        buffers: usize,
    },
    /// The calling thread is inside a host function of the driver's, where no CUDA call is allowed.
    #[error("called from a host function of the driver")]
    HostCallback,
    /// The process was forked from the one that started the driver. No call works in it, memory of the host is not mapped,
    /// and a lock may be held for ever: whatever can fail is refused before a call or a lock.
    #[error("called in a process that was forked from the one that started the driver")]
    Forked,
}

impl Error {
    /// The driver's own error, where it is one.
    pub fn driver(&self) -> Option<&cuvmm_driver::Error> {
        match self {
            Self::Driver(error)
            | Self::AddressSpaceExhausted { error, .. }
            | Self::OutOfMemory(OutOfMemory { error, .. })
            | Self::AccessRefused { error, .. }
            | Self::HandleKindRefused { error, .. }
            | Self::NumaNodeRefused { error, .. } => Some(error),
            Self::Handles(error) => error.driver(),
            _ => None,
        }
    }

    /// Whether less of the same could have been had. A driver needs memory to grant access, too.
    pub(crate) fn is_for_want_of_room(&self) -> bool {
        use cuvmm_handles::Error::SizeOverflow;
        match self {
            Self::AccessRefused { error, .. } => error.code() == Some(CUresult::OUT_OF_MEMORY),
            Self::WouldMove { .. }
            | Self::OutOfMemory(_)
            | Self::AddressSpaceExhausted { .. }
            | Self::Handles(SizeOverflow { .. }) => true,
            _ => false,
        }
    }

    /// The driver call concerned, where there is one.
    pub fn call(&self) -> Option<Call> {
        match self {
            Self::Handles(error) => error.call(),
            _ => self.driver()?.call(),
        }
    }

    /// The code that the driver answered, where it was asked.
    pub fn code(&self) -> Option<CUresult> {
        self.driver()?.code()
    }
}

impl From<cuvmm_driver::Error> for Error {
    #[cold]
    fn from(error: cuvmm_driver::Error) -> Self {
        if error == cuvmm_driver::Error::Forked { Self::Forked } else { Self::Driver(error) }
    }
}

impl From<cuvmm_handles::Error> for Error {
    #[cold]
    fn from(error: cuvmm_handles::Error) -> Self {
        use cuvmm_handles::Error as Handles;
        match error {
            Handles::Driver(cuvmm_driver::Error::Forked) => Self::Forked,
            Handles::Reserve { bytes, alignment, error, .. } if error.code() == Some(CUresult::OUT_OF_MEMORY) => {
                Self::AddressSpaceExhausted { bytes, alignment, error }
            }
            Handles::Grant { address, bytes, location, error } => {
                Self::AccessRefused { location, address, bytes, error }
            }
            error => Self::Handles(error),
        }
    }
}

/// What the addresses were to be multiples of, for a message.
fn aligned(alignment: usize) -> String {
    if alignment == 0 { String::new() } else { format!(" at a multiple of {alignment:#x}") }
}

/// What such a refusal comes of, for a message.
fn lacking(kind: HandleKind, error: &cuvmm_driver::Error) -> &'static str {
    let is_channel = kind.has_fabric() && error.code() == Some(CUresult::NOT_PERMITTED);
    if is_channel { ", as without an IMEX channel" } else { "" }
}

/// Who was refused, for a message.
fn to(location: Option<CUmemLocation>) -> String {
    location.map_or_else(String::new, |location| format!(", to {location}"))
}

/// Why a buffer was not closed, or not cleanly. The message says what became of the buffer; why is its
/// [source](std::error::Error::source), and [`error`](Self::error).
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let stranger = Simulator::new(Machine::h200());
/// let stream = StreamRef::create(&stranger.driver()?.device(0)?)?;
/// let error = resource.allocate(2 << 20)?.close_on(&stream).unwrap_err();
/// assert_eq!(error.error(), &Error::Driver(cuvmm_driver::Error::DifferentDrivers));
/// let buffer = error.into_buffer().ok_or("closed all the same")?;
/// buffer.close()?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{}", if buffer.is_some() { "the buffer was not closed" } else { "the buffer was closed with an error" })]
pub struct CloseError {
    #[source]
    pub(crate) error: Error,
    pub(crate) buffer: Option<Box<VirtualMemoryBuffer>>,
}

impl CloseError {
    /// What went wrong first.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// The buffer, where nothing was released; none where it is closed all the same.
    pub fn into_buffer(self) -> Option<VirtualMemoryBuffer> {
        self.buffer.map(|buffer| *buffer)
    }

    /// The error and the buffer.
    pub fn into_parts(self) -> (Error, Option<VirtualMemoryBuffer>) {
        (self.error, self.buffer.map(|buffer| *buffer))
    }
}

/// Why a range that was made elsewhere was not deallocated, or not cleanly. The message says what became of the range; why
/// is its [source](std::error::Error::source), and [`error`](Self::error).
///
/// ```
/// # use cuvmm_driver::sys::CUdeviceptr;
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let address = CUdeviceptr(1 << 40);
/// // SAFETY: nothing is there, so nothing is given away.
/// let error = unsafe { resource.deallocate(address, 2 << 20, Release::Caller) }.unwrap_err();
/// assert_eq!((error.error(), error.is_deallocated()), (&Error::NotVmm { address }, false));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}", if *deallocated { "the range was deallocated with an error" } else { "the range was not deallocated" })]
pub struct DeallocateError {
    #[source]
    pub(crate) error: Error,
    pub(crate) deallocated: bool,
}

impl DeallocateError {
    /// What went wrong first.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// Whether the range is gone all the same, but for what is stranded of it. Where not, nothing was released: it is
    /// the caller's as before.
    pub fn is_deallocated(&self) -> bool {
        self.deallocated
    }

    /// The error.
    pub fn into_error(self) -> Error {
        self.error
    }
}

/// Why a buffer was not made larger or smaller, or not cleanly. The message says what became of the buffer; why is its
/// [source](std::error::Error::source), and [`error`](Self::error).
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let buffer = resource.allocate(2 << 20)?;
/// let error = buffer.grow_into(1 << 40).unwrap_err();
/// assert_eq!(error.error().code(), Some(cuvmm_driver::CUresult::OUT_OF_MEMORY));
/// assert_eq!(error.into_buffer().size(), 2 << 20);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, thiserror::Error)]
#[error("{}", if *resized { "the buffer was resized, and what it left was not given back" } else { "the buffer was not resized" })]
pub struct ResizeError {
    #[source]
    pub(crate) error: Error,
    pub(crate) buffer: Box<VirtualMemoryBuffer>,
    pub(crate) resized: bool,
}

impl ResizeError {
    /// What went wrong first.
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// Whether the buffer inside is the resized one, and only giving back what the old one left failed: the addresses
    /// of one that moved, the memory that was cut off.
    pub fn is_resized(&self) -> bool {
        self.resized
    }

    /// The buffer: as it was, or the resized one where [`is_resized`](Self::is_resized) says so.
    pub fn into_buffer(self) -> VirtualMemoryBuffer {
        *self.buffer
    }

    /// The error and the buffer.
    pub fn into_parts(self) -> (Error, VirtualMemoryBuffer) {
        (self.error, *self.buffer)
    }
}
