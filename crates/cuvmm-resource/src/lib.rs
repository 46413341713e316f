#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod buffer;
mod capture;
mod chunk;
mod close;
mod drain;
mod error;
mod fence;
mod foreign;
mod graph;
mod grow;
mod growth;
mod host;
mod kept;
mod kind;
mod memory;
mod numa;
mod obtain;
mod options;
mod range;
mod reaper;
mod recycling;
#[cfg(doctest)]
mod refused;
mod release;
mod resource;
mod retired;
#[cfg(feature = "serde")]
mod serialized;
mod settle;
mod shortage;
mod statistics;
mod stream;
mod sync;
mod transfer;
mod truncate;
mod watch;

pub use buffer::{Outcome, VirtualMemoryBuffer};
pub use chunk::Chunk;
pub use cuvmm_handles::Level;
pub use error::{CloseError, DeallocateError, Error, ResizeError};
pub use grow::GrowOptions;
pub use growth::GrowthPolicy;
pub use kind::{Access, GranularityKind, HandleKind, Location, Request};
pub use options::Options;
pub use recycling::Recycling;
pub use release::{OnDrop, Release};
pub use resource::VirtualMemoryResource;
pub use shortage::OutOfMemory;
pub use statistics::Statistics;
pub use stream::{StreamOwner, StreamRef};

/// Values of this crate may be used and dropped on any thread: nothing depends on the caller's current context.
const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<VirtualMemoryResource>();
    any_thread::<VirtualMemoryBuffer>();
    any_thread::<StreamRef>();
};
