//! The structs that calls take and fill.

use std::ffi::{c_char, c_void};

use super::{
    CUdeviceptr, CUdriverProcAddressQueryResult, CUmemAccess_flags, CUmemAllocationHandleType, CUmemAllocationType,
    CUmemLocationType, CUmemorytype, CUresult,
};

/// A host function: queued on a stream, or the destructor of a user object. It must make no CUDA call.
pub type CUhostFn = Option<unsafe extern "C" fn(user_data: *mut c_void)>;

/// A device's identity, the same in every process.
#[repr(C)]
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CUuuid {
    /// The sixteen bytes.
    pub bytes: [u8; 16],
}

/// A fabric handle: names memory on every machine of its fabric.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct CUmemFabricHandle {
    /// The bytes, which only the driver reads.
    pub data: [u8; 64],
}

/// A place where memory lives, or one that is granted access.
///
/// ```
/// use cuvmm_driver::sys::CUmemLocation;
///
/// let places = [CUmemLocation::device(3), CUmemLocation::host(), CUmemLocation::host_numa(1)];
/// assert_eq!(places.map(|place| place.to_string()), ["device 3", "the host", "NUMA node 1 of the host"]);
/// ```
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUmemLocation {
    /// The kind of place.
    pub location_type: CUmemLocationType,
    /// The device's ordinal or the NUMA node.
    pub id: i32,
}

/// The flags of an allocation.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUmemAllocationPropFlags {
    /// 1 asks for compressible memory.
    pub compression_type: u8,
    /// 1 asks that GPUDirect RDMA reaches it.
    pub gpu_direct_rdma_capable: u8,
    /// A bit mask of usages.
    pub usage: u16,
    /// Zero.
    pub reserved: [u8; 4],
}

/// What an allocation is to be, or is.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUmemAllocationProp {
    /// How the memory behaves.
    pub allocation_type: CUmemAllocationType,
    /// The kinds of handle that it can be exported as.
    pub requested_handle_types: CUmemAllocationHandleType,
    /// Where it lives.
    pub location: CUmemLocation,
    /// Windows security attributes; null on Linux.
    pub win32_handle_metadata: *mut c_void,
    /// Compression, RDMA and usage.
    pub alloc_flags: CUmemAllocationPropFlags,
}

// SAFETY: the only pointer is a Windows one that stays null or is passed on unread.
unsafe impl Send for CUmemAllocationProp {}
// SAFETY: as above.
unsafe impl Sync for CUmemAllocationProp {}

impl CUmemAllocationProp {
    /// Pinned memory at `location` that can be exported as `handle_types`; every other field zero.
    pub fn pinned(location: CUmemLocation, handle_types: CUmemAllocationHandleType) -> Self {
        Self {
            allocation_type: CUmemAllocationType::PINNED,
            requested_handle_types: handle_types,
            location,
            win32_handle_metadata: std::ptr::null_mut(),
            alloc_flags: CUmemAllocationPropFlags::default(),
        }
    }
}

/// The access of one location to a mapping.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct CUmemAccessDesc {
    /// Who.
    pub location: CUmemLocation,
    /// What they may do.
    pub flags: CUmemAccess_flags,
}

impl CUmemLocation {
    /// The device of that ordinal.
    pub const fn device(ordinal: i32) -> Self {
        Self { location_type: CUmemLocationType::DEVICE, id: ordinal }
    }

    /// The host.
    pub const fn host() -> Self {
        Self { location_type: CUmemLocationType::HOST, id: 0 }
    }

    /// The host memory of a NUMA node.
    pub const fn host_numa(node: i32) -> Self {
        Self { location_type: CUmemLocationType::HOST_NUMA, id: node }
    }
}

/// The parameters of a memset node.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CUDA_MEMSET_NODE_PARAMS {
    /// Where it writes.
    pub dst: CUdeviceptr,
    /// Bytes from row to row; used where `height` is above 1.
    pub pitch: usize,
    /// The value to set.
    pub value: u32,
    /// Bytes of an element: 1, 2 or 4.
    pub element_size: u32,
    /// Elements of a row.
    pub width: usize,
    /// Rows.
    pub height: usize,
}

/// The parameters of a host-function node.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CUDA_HOST_NODE_PARAMS {
    /// The function.
    pub host_fn: CUhostFn,
    /// What it is given.
    pub user_data: *mut c_void,
}

/// The parameters of a memcpy node.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "the fields are the driver's, named source and destination alike")]
pub struct CUDA_MEMCPY3D {
    pub src_x_in_bytes: usize,
    pub src_y: usize,
    pub src_z: usize,
    pub src_lod: usize,
    pub src_memory_type: CUmemorytype,
    pub src_host: *const c_void,
    pub src_device: CUdeviceptr,
    pub src_array: *mut c_void,
    pub reserved0: *mut c_void,
    pub src_pitch: usize,
    pub src_height: usize,
    pub dst_x_in_bytes: usize,
    pub dst_y: usize,
    pub dst_z: usize,
    pub dst_lod: usize,
    pub dst_memory_type: CUmemorytype,
    pub dst_host: *mut c_void,
    pub dst_device: CUdeviceptr,
    pub dst_array: *mut c_void,
    pub reserved1: *mut c_void,
    pub dst_pitch: usize,
    pub dst_height: usize,
    pub width_in_bytes: usize,
    pub height: usize,
    pub depth: usize,
}

impl CUDA_MEMCPY3D {
    /// A copy of that many bytes from one address to another; everything that only arrays and pitched memory need is 0.
    ///
    /// ```
    /// use cuvmm_driver::sys::{CUDA_MEMCPY3D, CUdeviceptr};
    ///
    /// let copy = CUDA_MEMCPY3D::linear(CUdeviceptr(0x4000), CUdeviceptr(0x2000), 256);
    /// assert_eq!((copy.dst_device.0, copy.src_device.0), (0x4000, 0x2000));
    /// assert_eq!((copy.width_in_bytes, copy.height, copy.depth), (256, 1, 1));
    /// ```
    pub const fn linear(to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Self {
        Self {
            src_x_in_bytes: 0,
            src_y: 0,
            src_z: 0,
            src_lod: 0,
            src_memory_type: CUmemorytype::DEVICE,
            src_host: std::ptr::null(),
            src_device: from,
            src_array: std::ptr::null_mut(),
            reserved0: std::ptr::null_mut(),
            src_pitch: 0,
            src_height: 0,
            dst_x_in_bytes: 0,
            dst_y: 0,
            dst_z: 0,
            dst_lod: 0,
            dst_memory_type: CUmemorytype::DEVICE,
            dst_host: std::ptr::null_mut(),
            dst_device: to,
            dst_array: std::ptr::null_mut(),
            reserved1: std::ptr::null_mut(),
            dst_pitch: 0,
            dst_height: 0,
            width_in_bytes: bytes,
            height: 1,
            depth: 1,
        }
    }
}

/// The resolver of CUDA 12.0 and later.
pub(crate) type GetProcAddress =
    unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64, *mut CUdriverProcAddressQueryResult) -> CUresult;
/// The resolver of CUDA 11.3 to 11.8.
pub(crate) type GetProcAddress11030 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, i32, u64) -> CUresult;

impl Default for CUmemFabricHandle {
    fn default() -> Self {
        Self { data: [0; 64] }
    }
}

impl std::fmt::Debug for CUmemFabricHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CUmemFabricHandle").finish_non_exhaustive()
    }
}

impl std::fmt::Display for CUmemLocation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.location_type {
            CUmemLocationType::DEVICE => write!(f, "device {}", self.id),
            CUmemLocationType::HOST => f.write_str("the host"),
            CUmemLocationType::HOST_NUMA => write!(f, "NUMA node {} of the host", self.id),
            CUmemLocationType(other) => write!(f, "location {} of type {other}", self.id),
        }
    }
}

impl std::fmt::Display for CUuuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GPU")?;
        for (index, byte) in self.bytes.iter().enumerate() {
            let dash = if matches!(index, 0 | 4 | 6 | 8 | 10) { "-" } else { "" };
            write!(f, "{dash}{byte:02x}")?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for CUuuid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}
