#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod allocation;
mod context;
mod error;
mod mapping;
#[cfg(doctest)]
mod refused;
mod reservation;
mod size;
#[cfg(not(cuvmm_shuttle))]
mod sync;
// The models are written with it.
#[cfg(cuvmm_shuttle)]
#[doc(hidden)]
pub mod sync;
mod taken;
mod usage;

pub use allocation::{Allocation, Origin, is_vmm};
pub use context::PrimaryContext;
pub use error::Error;
pub use mapping::Mapping;
pub use reservation::{Reservation, Room};
pub use size::{GranularSize, Granularity};
pub use usage::{Level, Usage};

/// Values of this crate may be used and dropped on any thread: the driver's calls have no thread affinity.
const _: () = {
    const fn any_thread<T: Send + Sync>() {}
    any_thread::<Allocation>();
    any_thread::<Reservation>();
    any_thread::<Room>();
    any_thread::<Mapping>();
    any_thread::<Usage>();
    any_thread::<PrimaryContext>();
};
