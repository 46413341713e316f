//! The wire format, as functions from values to bytes and back: `docs/wire-format.md` in code.
//!
//! Nothing here touches a socket or a handle, and no bytes make it panic. The numbers are little-endian.

use std::fmt;

use cuvmm_driver::sys::{CUmemAllocationHandleType, CUmemFabricHandle, CUmemLocationType, CUuuid};

use crate::descriptor::{InvalidMetadata, Metadata};
use crate::identity::{BufferId, HostId, Location};

/// What each header begins with.
pub const MAGIC: [u8; 4] = *b"CUVM";
/// The version of the format.
pub const VERSION: u16 = 1;
/// The length of a header without the sizes of its chunks.
pub const PREAMBLE_LENGTH: usize = 96;
/// The most handles in one message: Linux passes no more with one (`SCM_MAX_FD`), and refuses one with more.
pub const MAX_HANDLES_PER_MESSAGE: usize = 253;
/// How many handles a sender may send before the receiver said how many it takes.
///
/// Few enough for a process with few open files, and enough that a small buffer costs one round trip.
pub const INITIAL_HANDLES: usize = 16;
/// The length of a reply.
pub const REPLY_LENGTH: usize = 8;
/// The length of the data that a message of handles has: of file descriptors, and of fabric handles before them.
pub const HANDLES_LENGTH: usize = 4;
/// The length of a fabric handle.
pub const FABRIC_HANDLE_LENGTH: usize = size_of::<CUmemFabricHandle>();

/// Where the fields of the header stand.
mod at {
    pub(super) const VERSION: usize = 4;
    pub(super) const RESERVED: usize = 6;
    pub(super) const LENGTH: usize = 8;
    pub(super) const HANDLE_KIND: usize = 12;
    pub(super) const LOCATION_TYPE: usize = 16;
    pub(super) const LOCATION_ID: usize = 20;
    pub(super) const UUID: usize = 24;
    pub(super) const FAMILY: usize = 40;
    pub(super) const GENERATION: usize = 56;
    pub(super) const HOST: usize = 64;
    pub(super) const SIZE: usize = 80;
    pub(super) const CHUNKS: usize = 88;
    pub(super) const RESERVED_END: usize = 92;
}

/// Bytes that are no message of this protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes end too early, or go on after the end.
    #[error("{found} bytes where {expected} are due")]
    Length {
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// It begins with something else.
    #[error("begins with {found:02x?} instead of {MAGIC:02x?}")]
    Magic {
        /// The first bytes.
        found: [u8; 4],
    },
    /// A version that is not spoken here.
    #[error("version {found} is not spoken here, version {VERSION} is")]
    Version {
        /// The sender's.
        found: u16,
    },
    /// Bytes that must be zero are not.
    #[error("the bytes at offset {offset} are not zero")]
    NotZero {
        /// Where they begin.
        offset: usize,
    },
    /// The header says another length than its chunks need.
    #[error("the header says {said} bytes, and {chunks} chunks need {needed}")]
    HeaderLength {
        /// What it says.
        said: u32,
        /// How many chunks it says.
        chunks: u32,
        /// What they need.
        needed: usize,
    },
    /// A kind of location that is not known here.
    #[error("location type {found} is not known")]
    LocationType {
        /// The number.
        found: u32,
    },
    /// The sizes do not fit each other.
    #[error(transparent)]
    Metadata(#[from] InvalidMetadata),
    /// A reply of a kind that is not known here.
    #[error("reply {found} is not known")]
    Reply {
        /// The number.
        found: u8,
    },
    /// A number of handles that no message can have.
    #[error("{found} handles in one message, at most {} are possible", MAX_HANDLES_PER_MESSAGE)]
    Handles {
        /// The number.
        found: u32,
    },
}

/// The header of those metadata.
///
/// ```
/// use cuvmm_ipc::{Metadata, wire};
///
/// let metadata = Metadata::new(vec![2 << 20, 4 << 20]);
/// let header = wire::encode(&metadata)?;
/// assert_eq!(header.len(), 96 + 2 * 8);
/// assert_eq!(wire::decode(&header), Ok(metadata));
/// # Ok::<(), cuvmm_ipc::InvalidMetadata>(())
/// ```
///
/// Any kind of handle can be said, though only POSIX file descriptors and fabric handles are taken in this version.
///
/// # Errors
/// [`InvalidMetadata`]: what does not fit together is not sent.
pub fn encode(metadata: &Metadata) -> Result<Vec<u8>, InvalidMetadata> {
    metadata.check()?;
    let length = PREAMBLE_LENGTH + 8 * metadata.sizes.len();
    let (location_type, location_id, uuid) = match metadata.location {
        None => (CUmemLocationType::INVALID, 0, [0; 16]),
        Some(Location::Device { uuid }) => (CUmemLocationType::DEVICE, 0, uuid.bytes),
        Some(Location::HostNuma { node }) => (CUmemLocationType::HOST_NUMA, node, [0; 16]),
    };
    let (family, generation) = metadata.id.map_or(([0; 16], 0), |id| (id.family(), id.generation()));
    let mut bytes = Vec::with_capacity(length);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 2]);
    bytes.extend(number(length).to_le_bytes());
    bytes.extend(metadata.handle_kind.0.to_le_bytes());
    bytes.extend(location_type.0.to_le_bytes());
    bytes.extend(location_id.to_le_bytes());
    bytes.extend(uuid);
    bytes.extend(family);
    bytes.extend(generation.to_le_bytes());
    bytes.extend(metadata.host.map_or([0; 16], |host| host.bytes()));
    bytes.extend((metadata.size as u64).to_le_bytes());
    bytes.extend(number(metadata.sizes.len()).to_le_bytes());
    bytes.extend([0; 4]);
    for &size in &metadata.sizes {
        bytes.extend((size as u64).to_le_bytes());
    }
    Ok(bytes)
}

/// The metadata of a whole header.
///
/// ```
/// use cuvmm_ipc::wire::{self, WireError};
///
/// assert_eq!(wire::decode(b"CUVM"), Err(WireError::Length { found: 4, expected: 96 }));
/// ```
///
/// # Errors
/// [`WireError`] for whatever is not exactly one header.
pub fn decode(bytes: &[u8]) -> Result<Metadata, WireError> {
    let Some((preamble, sizes)) = bytes.split_first_chunk() else {
        return Err(WireError::Length { found: bytes.len(), expected: PREAMBLE_LENGTH });
    };
    Preamble::decode(preamble)?.with_sizes(sizes)
}

/// The part of a header that has the same length in every message, read before anything is allocated for the rest.
///
/// ```
/// use cuvmm_ipc::wire::{self, Preamble};
///
/// let header = wire::encode(&cuvmm_ipc::Metadata::new(vec![2 << 20]))?;
/// let (preamble, rest) = header.split_first_chunk().ok_or("too short")?;
/// let preamble = Preamble::decode(preamble)?;
/// assert_eq!((preamble.chunks(), preamble.sizes_length()), (1, 8));
/// assert_eq!(preamble.with_sizes(rest)?.sizes, [2 << 20]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preamble {
    chunks: u32,
    /// Everything but the sizes of the chunks.
    metadata: Metadata,
}

impl Preamble {
    /// Reads it.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(bytes: &[u8; PREAMBLE_LENGTH]) -> Result<Self, WireError> {
        let magic = field(bytes, 0);
        if magic != MAGIC {
            return Err(WireError::Magic { found: magic });
        }
        let version = u16::from_le_bytes(field(bytes, at::VERSION));
        if version != VERSION {
            return Err(WireError::Version { found: version });
        }
        zero::<2>(bytes, at::RESERVED)?;
        zero::<4>(bytes, at::RESERVED_END)?;
        let said = u32::from_le_bytes(field(bytes, at::LENGTH));
        let chunks = u32::from_le_bytes(field(bytes, at::CHUNKS));
        let needed = PREAMBLE_LENGTH + 8 * chunks as usize;
        if said as usize != needed {
            return Err(WireError::HeaderLength { said, chunks, needed });
        }
        let location = match CUmemLocationType(u32::from_le_bytes(field(bytes, at::LOCATION_TYPE))) {
            CUmemLocationType::INVALID => None,
            CUmemLocationType::DEVICE => Some(Location::Device { uuid: CUuuid { bytes: field(bytes, at::UUID) } }),
            CUmemLocationType::HOST_NUMA => {
                Some(Location::HostNuma { node: i32::from_le_bytes(field(bytes, at::LOCATION_ID)) })
            }
            CUmemLocationType(found) => return Err(WireError::LocationType { found }),
        };
        if !matches!(location, Some(Location::HostNuma { .. })) {
            zero::<4>(bytes, at::LOCATION_ID)?;
        }
        if !matches!(location, Some(Location::Device { .. })) {
            zero::<16>(bytes, at::UUID)?;
        }
        let id = BufferId::new(field(bytes, at::FAMILY), u64::from_le_bytes(field(bytes, at::GENERATION)));
        if id.is_none() {
            zero::<8>(bytes, at::GENERATION)?;
        }
        let metadata = Metadata {
            handle_kind: CUmemAllocationHandleType(u32::from_le_bytes(field(bytes, at::HANDLE_KIND))),
            location,
            id,
            host: HostId::new(field(bytes, at::HOST)),
            size: usize::from_le_bytes(field(bytes, at::SIZE)),
            ..Metadata::new(Vec::new())
        };
        Ok(Self { chunks, metadata })
    }

    /// The kind of the handles.
    pub fn handle_kind(&self) -> CUmemAllocationHandleType {
        self.metadata.handle_kind
    }

    /// How many chunks follow.
    pub fn chunks(&self) -> usize {
        self.chunks as usize
    }

    /// How many bytes of sizes follow.
    pub fn sizes_length(&self) -> usize {
        8 * self.chunks()
    }

    /// The size of the buffer.
    pub fn size(&self) -> usize {
        self.metadata.size
    }

    /// Where the memory lives.
    pub fn location(&self) -> Option<Location> {
        self.metadata.location
    }

    /// The host on which the handles mean something.
    pub fn host(&self) -> Option<HostId> {
        self.metadata.host
    }

    /// The metadata, once the sizes have come too.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn with_sizes(self, bytes: &[u8]) -> Result<Metadata, WireError> {
        if bytes.len() != self.sizes_length() {
            let before = |length: usize| length.saturating_add(PREAMBLE_LENGTH);
            return Err(WireError::Length { found: before(bytes.len()), expected: before(self.sizes_length()) });
        }
        let (sizes, _) = bytes.as_chunks();
        let sizes = sizes.iter().map(|&bytes| usize::from_le_bytes(bytes)).collect();
        let metadata = Metadata { sizes, ..self.metadata };
        metadata.check()?;
        Ok(metadata)
    }
}

/// The data of a message with that many handles, whole for file descriptors; 0 handles say that the sender gives up.
///
/// ```
/// use cuvmm_ipc::wire::{decode_handles, encode_handles};
///
/// assert_eq!(decode_handles(&encode_handles(253)), Ok(253));
/// assert!(decode_handles(&encode_handles(254)).is_err());
/// ```
pub fn encode_handles(handles: usize) -> [u8; HANDLES_LENGTH] {
    number(handles).to_le_bytes()
}

/// How many handles a message of that data has.
///
/// # Errors
/// [`WireError::Handles`] above [`MAX_HANDLES_PER_MESSAGE`].
pub fn decode_handles(bytes: &[u8; HANDLES_LENGTH]) -> Result<usize, WireError> {
    let found = u32::from_le_bytes(*bytes);
    let handles = found as usize;
    if handles > MAX_HANDLES_PER_MESSAGE { Err(WireError::Handles { found }) } else { Ok(handles) }
}

/// A message of those fabric handles: how many, and their bytes. [`MAX_HANDLES_PER_MESSAGE`] is the most that is taken.
///
/// ```
/// use cuvmm_driver::sys::CUmemFabricHandle;
/// use cuvmm_ipc::wire::{WireError, decode_fabric_handles, encode_fabric_handles};
///
/// let handles = [1, 2].map(|byte| CUmemFabricHandle { data: [byte; 64] });
/// let message = encode_fabric_handles(&handles);
/// assert_eq!(message.len(), 4 + 2 * 64);
/// assert_eq!(decode_fabric_handles(&message), Ok(handles.to_vec()));
/// assert_eq!(decode_fabric_handles(&message[..100]), Err(WireError::Length { found: 100, expected: 132 }));
/// ```
pub fn encode_fabric_handles(handles: &[CUmemFabricHandle]) -> Vec<u8> {
    let mut bytes = encode_handles(handles.len()).to_vec();
    handles.iter().for_each(|handle| bytes.extend(handle.data));
    bytes
}

/// The fabric handles of a whole message.
///
/// # Errors
/// [`WireError::Handles`] above [`MAX_HANDLES_PER_MESSAGE`], [`WireError::Length`].
pub fn decode_fabric_handles(bytes: &[u8]) -> Result<Vec<CUmemFabricHandle>, WireError> {
    let Some((count, rest)) = bytes.split_first_chunk() else {
        return Err(WireError::Length { found: bytes.len(), expected: HANDLES_LENGTH });
    };
    let expected = HANDLES_LENGTH + FABRIC_HANDLE_LENGTH * decode_handles(count)?;
    if bytes.len() != expected {
        return Err(WireError::Length { found: bytes.len(), expected });
    }
    let (handles, _) = rest.as_chunks();
    Ok(handles.iter().map(|&data| CUmemFabricHandle { data }).collect())
}

/// What a receiver answers.
///
/// ```
/// use cuvmm_ipc::wire::{Refusal, Reply};
///
/// let reply = Reply::Refused { reason: Refusal::DRIVER, detail: 801 };
/// assert_eq!(Reply::decode(&reply.encode()), Ok(reply));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// It takes that many more handles now, from 1 to [`MAX_HANDLES_PER_MESSAGE`].
    More {
        /// How many.
        handles: u16,
    },
    /// It has all, and keeps it.
    Accepted,
    /// It wants nothing more of this, and kept nothing.
    Refused {
        /// Why.
        reason: Refusal,
        /// A number that says more; 0 where none does.
        detail: u32,
    },
}

impl Reply {
    /// Its bytes.
    pub fn encode(self) -> [u8; REPLY_LENGTH] {
        let (kind, value, detail) = match self {
            Self::More { handles } => (1, handles, 0),
            Self::Accepted => (2, 0, 0),
            Self::Refused { reason, detail } => (3, reason.0, detail),
        };
        let [value_low, value_high] = value.to_le_bytes();
        let [a, b, c, d] = detail.to_le_bytes();
        [kind, 0, value_low, value_high, a, b, c, d]
    }

    /// Reads it.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(bytes: &[u8; REPLY_LENGTH]) -> Result<Self, WireError> {
        let value = u16::from_le_bytes(field(bytes, 2));
        let detail = u32::from_le_bytes(field(bytes, 4));
        zero::<1>(bytes, 1)?;
        match field(bytes, 0) {
            [1] => {
                zero::<4>(bytes, 4)?;
                let possible = (1..=MAX_HANDLES_PER_MESSAGE).contains(&usize::from(value));
                if possible {
                    Ok(Self::More { handles: value })
                } else {
                    Err(WireError::Handles { found: value.into() })
                }
            }
            [2] => {
                zero::<2>(bytes, 2)?;
                zero::<4>(bytes, 4)?;
                Ok(Self::Accepted)
            }
            [3] => Ok(Self::Refused { reason: Refusal(value), detail }),
            [found] => Err(WireError::Reply { found }),
        }
    }
}

/// Why a receiver refuses. Receivers newer than this crate may have reasons of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Refusal(pub u16);

impl Refusal {
    /// What came is no message of the protocol, or its sizes do not fit each other.
    pub const MALFORMED: Self = Self(1);
    /// The receiver does not speak the sender's version.
    pub const VERSION: Self = Self(2);
    /// The sender is on another host.
    pub const HOST: Self = Self(3);
    /// The receiver has no use for this kind of handle.
    pub const HANDLE_KIND: Self = Self(4);
    /// The memory is not where the receiver needs it, or on a device that the receiver does not see.
    pub const LOCATION: Self = Self(5);
    /// More chunks than the receiver takes.
    pub const TOO_MANY_HANDLES: Self = Self(6);
    /// More memory than the receiver takes.
    pub const TOO_MANY_BYTES: Self = Self(7);
    /// The handles are not as many as was said, or are no handles to memory.
    pub const HANDLES: Self = Self(8);
    /// The receiver has too many open files.
    pub const OPEN_FILES: Self = Self(9);
    /// The receiver's driver refused; the detail is its code.
    pub const DRIVER: Self = Self(10);
    /// Something else; the detail is an errno, or 0.
    pub const OTHER: Self = Self(11);
    /// A chunk of a size that the receiver's memory doesn't come in.
    pub const CHUNK_SIZE: Self = Self(12);
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::MALFORMED => "malformed message",
            Self::VERSION => "version not spoken",
            Self::HOST => "another host",
            Self::HANDLE_KIND => "kind of handle not taken",
            Self::LOCATION => "location not reachable",
            Self::TOO_MANY_HANDLES => "too many handles",
            Self::TOO_MANY_BYTES => "too much memory",
            Self::HANDLES => "wrong handles",
            Self::OPEN_FILES => "too many open files",
            Self::DRIVER => "driver failed",
            Self::OTHER => "other failure",
            Self::CHUNK_SIZE => "size of a chunk not taken",
            Self(number) => return write!(f, "reason {number}"),
        })
    }
}

/// The `N` bytes at `offset`, zeros where `bytes` ends before: offsets are constants within a length that the
/// caller's type has.
fn field<const N: usize>(bytes: &[u8], offset: usize) -> [u8; N] {
    bytes.get(offset..).and_then(|rest| rest.first_chunk()).copied().unwrap_or([0; N])
}

fn zero<const N: usize>(bytes: &[u8], offset: usize) -> Result<(), WireError> {
    if field(bytes, offset) == [0; N] { Ok(()) } else { Err(WireError::NotZero { offset }) }
}

/// Numbers here are bounded by [`Metadata::MAX_CHUNKS`].
fn number(value: usize) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
