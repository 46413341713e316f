#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("cuvmm supports 64-bit Linux alone");

mod aside;
mod carried;
mod child;
mod descriptor;
mod error;
mod export;
mod file_kind;
mod handles;
mod identity;
mod import;
mod open_files;
#[cfg(doctest)]
mod refused;
#[cfg(feature = "serde")]
mod serialized;
mod socket;
mod transport;
mod wait;
mod watch;
pub mod wire;

pub use child::{inherited_socket, spawn_with_socket};
pub use descriptor::{BufferDescriptor, InvalidMetadata, Metadata};
pub use error::Error;
pub use export::{buffer_id, export, export_as};
pub use file_kind::FileKind;
pub use handles::HandleFd;
pub use identity::{BufferId, HostId, Location};
pub use import::{Importer, import, import_from};
pub use socket::{AllowedPeers, Listener, PeerIdentity, connect};
pub use transport::{Limits, receive, receive_buffer, send, send_buffer};

/// Descriptors may be sent between threads as well as between processes.
const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<BufferDescriptor>();
    any_thread::<Error>();
    any_thread::<Importer<'_>>();
};
