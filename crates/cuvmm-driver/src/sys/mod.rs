//! The driver's own vocabulary: its opaque values, numbers, structs and result codes, as C has them.
//!
//! Codes, kinds and flags are transparent newtypes with constants and never Rust enums: a driver may answer
//! values that are newer than this crate.
//!
//! # Safety
//! The only unsafe code here states that opaque driver values may cross threads.
#![allow(unsafe_code)]

mod codes;
mod structs;

pub use codes::CUresult;
pub use structs::*;

use std::ffi::c_void;

/// Declares opaque pointers of the driver.
macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub struct $name(pub *mut c_void);

        impl $name {
            /// The null value.
            pub const NULL: Self = Self(std::ptr::null_mut());

            /// Whether this is the null value.
            pub fn is_null(self) -> bool {
                self.0.is_null()
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::NULL
            }
        }

        // SAFETY: the value is a name that only the driver resolves; nothing here reads through it.
        unsafe impl Send for $name {}
        // SAFETY: as above; a shared reference gives no more than a copy of the name.
        unsafe impl Sync for $name {}
    )*};
}

opaque! {
    /// A context.
    CUcontext;
    /// A stream, or one of the default-stream tokens.
    CUstream;
    /// An event.
    CUevent;
    /// A graph.
    CUgraph;
    /// A node of a graph.
    CUgraphNode;
    /// An instantiated graph.
    CUgraphExec;
    /// A user object, whose destructor runs when the last graph lets go of it.
    CUuserObject;
    /// A loaded module.
    CUmodule;
    /// A function of a module.
    CUfunction;
}

impl CUstream {
    /// The legacy default stream, whichever default the caller was compiled for.
    pub const LEGACY: Self = Self(std::ptr::without_provenance_mut(1));
    /// The calling thread's default stream.
    pub const PER_THREAD: Self = Self(std::ptr::without_provenance_mut(2));

    /// Whether this names a default stream (0, legacy or per-thread) and no stream that somebody made.
    pub fn is_default_token(self) -> bool {
        self.is_null() || self == Self::LEGACY || self == Self::PER_THREAD
    }
}

/// Declares a number of the driver with its named values.
macro_rules! number {
    ($($(#[$doc:meta])* $name:ident($repr:ty) { $($(#[$vdoc:meta])* $value:ident = $number:expr,)* })*) => {$(
        $(#[$doc])*
        #[must_use]
        #[repr(transparent)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub $repr);

        impl $name {
            $($(#[$vdoc])* pub const $value: Self = Self($number);)*
        }
    )*};
}

number! {
    /// An address in the unified address space, usable by the devices (and, for host memory, the host) that
    /// were granted access.
    CUdeviceptr(u64) {}
    /// One reference to a physical allocation; meaningless in another process.
    CUmemGenericAllocationHandle(u64) {}
    /// A device, as the driver numbers them in this process.
    CUdevice(i32) {}
    /// A CUDA version as the driver writes it: 1000 × major + 10 × minor.
    CudaVersion(i32) {}

    /// What cuGetProcAddress says about a symbol besides its address.
    CUdriverProcAddressQueryResult(u32) {
        /// It was found.
        SUCCESS = 0,
        /// There is no such symbol.
        SYMBOL_NOT_FOUND = 1,
        /// It is newer than the version that was asked for.
        VERSION_NOT_SUFFICIENT = 2,
    }
    /// How an allocation's memory behaves.
    CUmemAllocationType(u32) {
        /// Pinned: it stays where it was made. The only type that the virtual memory calls accept.
        PINNED = 1,
    }
    /// The kinds of handle an allocation can be exported as: a bit mask.
    CUmemAllocationHandleType(u32) {
        /// It can't be exported.
        NONE = 0,
        /// A POSIX file descriptor.
        POSIX_FILE_DESCRIPTOR = 1,
        /// A Windows handle; not on Linux.
        WIN32 = 2,
        /// A Windows kernel-mode handle; not on Linux.
        WIN32_KMT = 4,
        /// A fabric handle, which needs an IMEX channel.
        FABRIC = 8,
    }
    /// Where memory lives, or who is granted access.
    CUmemLocationType(u32) {
        /// No location.
        INVALID = 0,
        /// A device; `id` is its ordinal.
        DEVICE = 1,
        /// Host memory; `id` is ignored.
        HOST = 2,
        /// Host memory of one NUMA node; `id` is the node.
        HOST_NUMA = 3,
        /// Host memory of the calling thread's node; the virtual memory calls refuse it.
        HOST_NUMA_CURRENT = 4,
    }
    /// The access that a location is granted to a mapping.
    CUmemAccess_flags(u32) {
        /// None.
        NONE = 0,
        /// Reads.
        READ = 1,
        /// Reads and writes.
        READWRITE = 3,
    }
    /// Which granularity is asked for.
    CUmemAllocationGranularity_flags(u32) {
        /// The least that works.
        MINIMUM = 0,
        /// What performs best.
        RECOMMENDED = 1,
    }
    /// The kind of handle to an address range.
    CUmemRangeHandleType(u32) {
        /// A dma-buf file descriptor.
        DMA_BUF_FD = 1,
    }
    /// A stream's capture state.
    CUstreamCaptureStatus(u32) {
        /// It isn't capturing.
        NONE = 0,
        /// It is.
        ACTIVE = 1,
        /// It is, and the capture is already lost.
        INVALIDATED = 2,
    }
    /// How much a capture forbids others.
    CUstreamCaptureMode(u32) {
        /// Unsafe calls of any thread are refused.
        GLOBAL = 0,
        /// Unsafe calls of the capturing thread are refused.
        THREAD_LOCAL = 1,
        /// Nothing is refused for the sake of a capture.
        RELAXED = 2,
    }
    /// How a stream relates to the legacy default stream.
    CUstream_flags(u32) {
        /// It waits for that stream's work, and that stream for its.
        DEFAULT = 0,
        /// It doesn't.
        NON_BLOCKING = 1,
    }
    /// What an event is for: a bit mask.
    CUevent_flags(u32) {
        /// Timing, spinning waits.
        DEFAULT = 0,
        /// A wait blocks instead of spinning.
        BLOCKING_SYNC = 1,
        /// No timing.
        DISABLE_TIMING = 2,
        /// It can be shared; needs DISABLE_TIMING.
        INTERPROCESS = 4,
    }
    /// How a user object behaves.
    CUuserObject_flags(u32) {
        /// Nobody can wait for its destructor; must be given.
        NO_DESTRUCTOR_SYNC = 1,
    }
    /// Whose references a graph is given.
    CUuserObjectRetain_flags(u32) {
        /// The caller's; otherwise the graph gets references of its own.
        MOVE = 1,
    }
    /// What a pointer points into, for copies.
    CUmemorytype(u32) {
        /// Host memory.
        HOST = 1,
        /// Device memory.
        DEVICE = 2,
        /// An array.
        ARRAY = 3,
        /// Any of the unified address space.
        UNIFIED = 4,
    }
    /// A property between two devices.
    CUdevice_P2PAttribute(u32) {
        /// A rank among the links.
        PERFORMANCE_RANK = 1,
        /// Whether one reaches the other's memory.
        ACCESS_SUPPORTED = 2,
        /// Whether atomics work over the link.
        NATIVE_ATOMIC_SUPPORTED = 3,
        /// Whether arrays can be reached.
        CUDA_ARRAY_ACCESS_SUPPORTED = 4,
    }
    /// Whose view of the remote writes is flushed.
    CUflushGPUDirectRDMAWritesTarget(u32) {
        /// The current context's.
        CURRENT_CTX = 0,
    }
    /// Who sees flushed writes.
    CUflushGPUDirectRDMAWritesScope(u32) {
        /// The owner.
        TO_OWNER = 100,
        /// All devices.
        TO_ALL_DEVICES = 200,
    }
    /// A fact about a device.
    CUdevice_attribute(u32) {
        /// Whether it shares physical memory with the host.
        INTEGRATED = 18,
        /// The compute mode.
        COMPUTE_MODE = 20,
        /// The PCI bus number.
        PCI_BUS_ID = 33,
        /// The PCI device number.
        PCI_DEVICE_ID = 34,
        /// Whether addresses are unified with the host's.
        UNIFIED_ADDRESSING = 41,
        /// The PCI domain number.
        PCI_DOMAIN_ID = 50,
        /// The major compute capability.
        COMPUTE_CAPABILITY_MAJOR = 75,
        /// The minor compute capability.
        COMPUTE_CAPABILITY_MINOR = 76,
        /// Whether the virtual memory calls are supported.
        VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
        /// Whether POSIX file descriptors can be exported.
        HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
        /// Whether Windows handles can be exported.
        HANDLE_TYPE_WIN32_HANDLE_SUPPORTED = 104,
        /// Whether Windows kernel-mode handles can be exported.
        HANDLE_TYPE_WIN32_KMT_HANDLE_SUPPORTED = 105,
        /// Whether compressible memory can be made.
        GENERIC_COMPRESSION_SUPPORTED = 107,
        /// Whether GPUDirect RDMA reaches this kind of memory.
        GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110,
        /// Whether GPUDirect RDMA is supported at all.
        GPU_DIRECT_RDMA_SUPPORTED = 116,
        /// Whether address ranges can be exported as dma-bufs.
        DMA_BUF_SUPPORTED = 124,
        /// Whether the device and driver know fabric handles; says nothing about an IMEX channel.
        HANDLE_TYPE_FABRIC_SUPPORTED = 128,
        /// The host NUMA node next to the device; -1 where the host has none.
        HOST_NUMA_ID = 134,
        /// Whether host memory of a NUMA node can be allocated.
        HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,
        /// Whether host memory can be allocated.
        HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145,
    }
    /// A fact about an address.
    CUpointer_attribute(u32) {
        /// The context that owns it.
        CONTEXT = 1,
        /// Host or device memory.
        MEMORY_TYPE = 2,
        /// The address as devices see it.
        DEVICE_POINTER = 3,
        /// The address as the host sees it.
        HOST_POINTER = 4,
        /// Whether synchronous operations on it always synchronize.
        SYNC_MEMOPS = 6,
        /// An id, unique per mapping.
        BUFFER_ID = 7,
        /// Whether it is managed memory.
        IS_MANAGED = 8,
        /// The device of the physical memory.
        DEVICE_ORDINAL = 9,
        /// Whether cuIpcGetMemHandle takes it.
        IS_LEGACY_CUDA_IPC_CAPABLE = 10,
        /// Where the reservation begins.
        RANGE_START_ADDR = 11,
        /// How long the reservation is.
        RANGE_SIZE = 12,
        /// Whether it is mapped.
        MAPPED = 13,
        /// The handle types that the allocation was made with.
        ALLOWED_HANDLE_TYPES = 14,
        /// Whether GPUDirect RDMA reaches it.
        IS_GPU_DIRECT_RDMA_CAPABLE = 15,
        /// The current device's access.
        ACCESS_FLAGS = 16,
        /// How long the one mapping around it is.
        MAPPING_SIZE = 18,
        /// Where the one mapping around it begins.
        MAPPING_BASE_ADDR = 19,
        /// An id of the physical allocation, equal in aliases.
        MEMORY_BLOCK_ID = 20,
    }
}

impl CUdeviceptr {
    /// The address `bytes` further on, or `None` past the end of the address space.
    pub fn checked_add(self, bytes: usize) -> Option<Self> {
        self.0.checked_add(u64::try_from(bytes).ok()?).map(Self)
    }
}

impl std::fmt::LowerHex for CUdeviceptr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Display for CUdeviceptr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

impl std::fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

impl CUpointer_attribute {
    /// Whether the answer is known to be a number or pointer of at most eight bytes.
    pub(crate) fn fits_a_number(self) -> bool {
        matches!(self.0, 1..=4 | 6..=16 | 18..=20)
    }
}

impl CUmemAllocationHandleType {
    /// Whether every kind in `kinds` is in `self` too.
    pub fn contains(self, kinds: Self) -> bool {
        self.0 & kinds.0 == kinds.0
    }
}

/// By the names of the constants, and what has none as a number.
///
/// ```
/// # use cuvmm_driver::sys::CUmemAllocationHandleType as Kinds;
/// assert_eq!(Kinds::NONE.to_string(), "NONE");
/// assert_eq!(Kinds(1 | 8 | 32).to_string(), "POSIX_FILE_DESCRIPTOR | FABRIC | 0x20");
/// ```
impl std::fmt::Display for CUmemAllocationHandleType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let named = [
            (Self::POSIX_FILE_DESCRIPTOR, "POSIX_FILE_DESCRIPTOR"),
            (Self::WIN32, "WIN32"),
            (Self::WIN32_KMT, "WIN32_KMT"),
            (Self::FABRIC, "FABRIC"),
        ];
        let (mut rest, mut separator) = (self.0, "");
        for (kind, name) in named.into_iter().filter(|&(kind, _)| self.contains(kind)) {
            write!(f, "{separator}{name}")?;
            (rest, separator) = (rest & !kind.0, " | ");
        }
        match rest {
            0 if self.0 == 0 => f.write_str("NONE"),
            0 => Ok(()),
            _ => write!(f, "{separator}{rest:#x}"),
        }
    }
}
