#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("cuvmm supports 64-bit Linux alone");

mod calls;
mod capabilities;
mod device;
mod driver;
mod error;
mod hook;
mod list;
mod process;
mod raw;
mod retained;
mod stranded;
#[allow(non_camel_case_types, reason = "the driver's own names")]
pub mod sys;
mod table;

pub use calls::{CaptureInfo, MemoryInfo};
pub use capabilities::{HandleFile, Probe};
pub use device::{ComputeCapability, Device};
pub use driver::Driver;
pub use error::Error;
pub use hook::{Failure, Hook, Hooked, Invocation};
pub use process::{OfProcess, process_id};
pub use raw::{Call, Parameter, RawDriver, Symbol};
pub use retained::{Retained, RetainedReference};
pub use stranded::{Stranded, StrandedKind};
pub use sys::{CUresult, CudaVersion};
pub use table::{LoadError, MissingSymbol, Served, Table, entry_point};

/// Values of this crate may be used and dropped on any thread: the driver's calls have no thread affinity.
const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<Driver>();
    any_thread::<Device>();
    any_thread::<Table>();
    any_thread::<sys::CUmemAllocationProp>();
    any_thread::<sys::CUstream>();
};
