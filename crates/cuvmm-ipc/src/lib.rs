#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("cuvmm supports 64-bit Linux alone");

mod descriptor;
mod error;
mod identity;
mod transport;
pub mod wire;

pub use descriptor::{BufferDescriptor, InvalidMetadata, Metadata};
pub use error::Error;
pub use identity::{BufferId, HostId, Location};
pub use transport::{Limits, receive, send};
