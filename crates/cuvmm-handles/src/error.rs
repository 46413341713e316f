//! What an operation on handles can fail with.

use cuvmm_driver::sys::{CUdeviceptr, CUmemAllocationHandleType, CUresult};
use cuvmm_driver::{Call, Driver, StrandedKind};

/// What an operation on handles failed with.
///
/// What can be told beforehand is refused before the driver is asked: all but [`Error::Driver`],
/// [`Error::AddressUnavailable`], [`Error::Duplicate`] and [`Error::OddAnswer`].
///
/// ```
/// # use std::sync::Arc;
/// # use cuvmm_driver::sys::*;
/// # use cuvmm_handles::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let driver = simulator.driver()?;
/// # let location = driver.device(0)?.location();
/// let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
/// let much = Granularity::minimum(&driver, &properties)?.round_up(1 << 40)?;
/// let error = Allocation::create(&driver, much, &properties).unwrap_err();
/// assert_eq!((error.call(), error.code()), (Some(cuvmm_driver::Call::cuMemCreate), Some(CUresult::OUT_OF_MEMORY)));
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver refused a call, or values of two drivers met.
    #[error(transparent)]
    Driver(#[from] cuvmm_driver::Error),
    /// A size that can't be rounded up within the address space.
    #[error("{bytes} bytes at a granularity of {granularity} overflow the address space")]
    SizeOverflow {
        /// The size.
        bytes: usize,
        /// The granularity that it was to be rounded to.
        granularity: usize,
    },
    /// A size or an offset that must be a multiple of the granularity and isn't, or is zero where it can't be.
    #[error("{bytes} bytes are not a positive multiple of the granularity, {granularity}")]
    NotGranular {
        /// The size.
        bytes: usize,
        /// The granularity.
        granularity: usize,
    },
    /// An alignment that is no power of two.
    #[error("an alignment of {alignment} is no power of two")]
    Alignment {
        /// The alignment.
        alignment: usize,
    },
    /// A range that does not lie within its reservation.
    #[error("{size} bytes at offset {offset} do not lie within a reservation of {reserved}")]
    OutOfBounds {
        /// Where the range begins in the reservation.
        offset: usize,
        /// How long it is.
        size: usize,
        /// How long the reservation is.
        reserved: usize,
    },
    /// A range that overlaps one that is mapped, or about to be.
    #[error("{size} bytes at offset {offset} of the reservation are taken")]
    AlreadyMapped {
        /// Where the range begins in the reservation.
        offset: usize,
        /// How long it is.
        size: usize,
    },
    /// The addresses wanted are somebody else's.
    #[error("address {wanted} can't be had: the driver gave {got}")]
    AddressUnavailable {
        /// The address asked for.
        wanted: CUdeviceptr,
        /// The address that was given, and freed again.
        got: CUdeviceptr,
    },
    /// Memory that was not made for the kind of handle asked for.
    #[error("memory made for handle kinds {:#x} can't be exported as kind {:#x}", has.0, wanted.0)]
    NotExportable {
        /// The kinds that it was made for.
        has: CUmemAllocationHandleType,
        /// The kind asked for.
        wanted: CUmemAllocationHandleType,
    },
    /// Memory that another process exported: it can't be exported again from here.
    #[error("imported memory can't be exported again: forward the handle that it came by")]
    Imported,
    /// A file descriptor that could not be moved off number 0.
    #[error("failed to duplicate a file descriptor: errno {errno}")]
    Duplicate {
        /// The operating system's error number.
        errno: i32,
    },
    /// An answer that the driver's manual rules out.
    #[error("{call} answered {value}, which can't be")]
    OddAnswer {
        /// The call.
        call: Call,
        /// What it answered.
        value: usize,
    },
}

impl Error {
    /// The driver call concerned, where there is one.
    pub fn call(&self) -> Option<Call> {
        match self {
            Self::Driver(error) => error.call(),
            Self::OddAnswer { call, .. } => Some(*call),
            _ => None,
        }
    }

    /// The code that the driver answered, where it was asked.
    pub fn code(&self) -> Option<CUresult> {
        match self {
            Self::Driver(error) => error.code(),
            _ => None,
        }
    }
}

/// Counts and reports what cleaning up could not give back; keeps quiet when the driver has shut down, since the
/// process's end gives everything back.
pub(crate) fn strand(driver: &Driver, kind: StrandedKind, error: &cuvmm_driver::Error, bytes: usize) {
    if error.code() == Some(CUresult::DEINITIALIZED) {
        return;
    }
    driver.stranded().add(kind);
    tracing::error!(?kind, bytes, %error, "stranded");
}
