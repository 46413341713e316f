#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod error;

pub use cuvmm_driver::sys::CUdeviceptr;
pub use cuvmm_driver::{CUresult, Call, CudaVersion, Device, Driver, LoadError};
pub use cuvmm_ipc::{BufferDescriptor, Limits};
pub use cuvmm_resource::{
    Access, Chunk, CloseError, DeallocateError, GranularityKind, GrowOptions, GrowthPolicy, HandleKind, Level,
    Location, OnDrop, Options, OutOfMemory, Outcome, Recycling, Release, Request, ResizeError, Statistics, StreamOwner,
    StreamRef, VirtualMemoryBuffer, VirtualMemoryResource,
};
pub use error::Error;

/// The driver table and its typed calls: everything of `cuvmm-driver`.
pub mod driver {
    pub use cuvmm_driver::*;
}

/// Allocations, reservations and mappings: everything of `cuvmm-handles`.
pub mod handles {
    pub use cuvmm_handles::*;
}

/// The resource and its buffers: everything of `cuvmm-resource`.
pub mod resource {
    pub use cuvmm_resource::*;
}

/// Sharing between processes: everything of `cuvmm-ipc`.
pub mod ipc {
    pub use cuvmm_ipc::*;
}
