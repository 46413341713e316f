#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod buffer;
mod capture;
mod error;
mod grow;
mod options;
mod range;
mod release;
mod resource;
mod stream;
mod sync;
mod transfer;

pub use buffer::{Chunk, Outcome, VirtualMemoryBuffer};
pub use error::{CloseError, Error, GrowError};
pub use options::{HandleKind, Options};
pub use release::Release;
pub use resource::VirtualMemoryResource;
pub use stream::{StreamOwner, StreamRef};

/// Values of this crate may be used and dropped on any thread: nothing depends on the caller's current context.
const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<VirtualMemoryResource>();
    any_thread::<VirtualMemoryBuffer>();
    any_thread::<StreamRef>();
};
