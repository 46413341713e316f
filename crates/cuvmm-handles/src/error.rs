//! What an operation on handles can fail with.

use cuvmm_driver::Call;
use cuvmm_driver::sys::{CUdeviceptr, CUmemAllocationHandleType, CUmemLocation, CUresult};

/// What an operation on handles failed with.
///
/// What can be told beforehand is refused before the driver is asked: all but [`Error::Driver`], the four that have
/// one inside, [`Error::AddressUnavailable`], [`Error::Duplicate`] and [`Error::UnexpectedAnswer`].
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
    /// The driver refused any other call, values of two drivers met, or the process was forked from the one that started
    /// the driver ([`Forked`](cuvmm_driver::Error::Forked)).
    #[error(transparent)]
    Driver(#[from] cuvmm_driver::Error),
    /// Addresses could not be reserved.
    #[error("{error}, for {bytes:#x} bytes of addresses{}", aligned(*.alignment))]
    Reserve {
        /// How many.
        bytes: usize,
        /// What they were to be at a multiple of, in bytes; 0 for the granularity.
        alignment: usize,
        /// Where they were wished for; 0 for anywhere.
        hint: CUdeviceptr,
        /// What the driver answered: 2 where so many can't be had, which says nothing of memory.
        error: cuvmm_driver::Error,
    },
    /// Memory could not be made.
    #[error("{error}, for {bytes:#x} bytes")]
    Create {
        /// How many, rounded up.
        bytes: usize,
        /// What the driver answered: 2 where there is not so much memory.
        error: cuvmm_driver::Error,
    },
    /// Memory could not be mapped.
    #[error("{error}, for {bytes:#x} bytes at {address}")]
    Map {
        /// Where.
        address: CUdeviceptr,
        /// How many.
        bytes: usize,
        /// What the driver answered.
        error: cuvmm_driver::Error,
    },
    /// Access to mapped memory could not be granted.
    #[error("{error}, for {bytes:#x} bytes at {address}{}", to(*location))]
    Grant {
        /// Where.
        address: CUdeviceptr,
        /// How many.
        bytes: usize,
        /// Who can't have it: the first that was refused it alone, too. None where each could have had it alone.
        location: Option<CUmemLocation>,
        /// What the driver answered.
        error: cuvmm_driver::Error,
    },
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
    #[error("memory made for handle kinds {has} can't be exported as kind {wanted}")]
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
    #[error("{call} answered {value}, which its manual rules out")]
    UnexpectedAnswer {
        /// The call.
        call: Call,
        /// What it answered.
        value: usize,
    },
}

/// Who was refused, for a message.
fn to(location: Option<CUmemLocation>) -> String {
    location.map_or_else(String::new, |location| format!(", to {location}"))
}

/// What the addresses were to be multiples of, for a message.
fn aligned(alignment: usize) -> String {
    if alignment == 0 { String::new() } else { format!(" at a multiple of {alignment:#x}") }
}

impl Error {
    /// What a call failed with, told with its numbers; of a forked child, where none is made, there is nothing to tell but that.
    #[cold]
    pub(crate) fn of_call(error: cuvmm_driver::Error, tell: impl FnOnce(cuvmm_driver::Error) -> Self) -> Self {
        if error == cuvmm_driver::Error::Forked { Self::Driver(error) } else { tell(error) }
    }

    /// The driver's own error, where it is one.
    pub fn driver(&self) -> Option<&cuvmm_driver::Error> {
        match self {
            Self::Driver(error)
            | Self::Reserve { error, .. }
            | Self::Create { error, .. }
            | Self::Map { error, .. }
            | Self::Grant { error, .. } => Some(error),
            _ => None,
        }
    }

    /// The driver call concerned, where there is one.
    pub fn call(&self) -> Option<Call> {
        match self {
            Self::UnexpectedAnswer { call, .. } => Some(*call),
            _ => self.driver()?.call(),
        }
    }

    /// The code that the driver answered, where it was asked.
    pub fn code(&self) -> Option<CUresult> {
        self.driver()?.code()
    }
}
