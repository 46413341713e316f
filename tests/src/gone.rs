//! Whether nothing remains of mappings and reservations, asked of the driver itself.
//!
//! # Safety
//! What a successful reserve call wrote is read while that call is seen. References that are retained to find out
//! whether there is a mapping are given back at once. Only addresses that nobody should have any more are freed.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuvmm::driver::sys::{CUdeviceptr, CUmemLocation};
use cuvmm::{CUresult, Call, Driver, VirtualMemoryBuffer};
use cuvmm_driver::{Failure, Hook, Invocation};

use crate::backend::Backend;
use crate::memory::{G, ROOM};

/// How long addresses may be somebody else's meanwhile: the simulators of a process share them.
const PATIENCE: Duration = Duration::from_secs(10);

/// Reservations and mappings, each an address and a size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges {
    /// Reservations, each the pair that is given back.
    pub reservations: BTreeSet<(u64, usize)>,
    /// Mappings.
    pub mappings: BTreeSet<(u64, usize)>,
}

impl Ranges {
    /// Those of a buffer, which are to be gone once it is.
    pub fn of(buffer: &VirtualMemoryBuffer) -> Self {
        let mappings = buffer.mappings();
        let reserved = mappings.iter().map(|mapping| mapping.room().reservation());
        Self {
            reservations: reserved.map(|reserved| (reserved.address().0, reserved.size())).collect(),
            mappings: mappings.iter().map(|mapping| (mapping.address().0, mapping.size())).collect(),
        }
    }

    /// Those that `other` has not.
    pub fn without(self, other: &Self) -> Self {
        Self { reservations: &self.reservations - &other.reservations, mappings: &self.mappings - &other.mappings }
    }
}

/// Something that should be gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remains {
    /// The driver gives a reference to what is mapped there, or says who may access it.
    Mapping(u64, usize),
    /// The addresses can't be had.
    Reservation(u64, usize),
}

impl fmt::Display for Remains {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mapping(address, size) => write!(f, "a mapping of {size:#x} bytes at {address:#x}"),
            Self::Reservation(address, size) => write!(f, "a reservation of {size:#x} bytes at {address:#x}"),
        }
    }
}

/// A hook next to the driver that keeps the ranges of all successful calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trail {
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    /// Reservations by their pair, and whether the driver was not yet told to free them.
    reservations: BTreeMap<(u64, usize), bool>,
    mappings: BTreeSet<(u64, usize)>,
}

impl Hook for Trail {
    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        if !result.is_success() {
            return None;
        }
        let pair = |address: u64| (address, invocation.arguments[1] as usize);
        let first = invocation.arguments[0];
        let mut seen = self.seen.lock().unwrap();
        match invocation.call {
            Call::cuMemAddressReserve => {
                let output = std::ptr::with_exposed_provenance::<CUdeviceptr>(first as usize);
                // SAFETY: the call succeeded, and so its first argument points to the address that it wrote.
                let address = unsafe { output.read() };
                seen.reservations.insert(pair(address.0), true);
            }
            Call::cuMemAddressFree => drop(seen.reservations.insert(pair(first), false)),
            Call::cuMemMap => drop(seen.mappings.insert(pair(first))),
            _ => {}
        }
        None
    }
}

impl Backend {
    /// Demands that nothing remains of those ranges: no mapping, and no reservation.
    #[track_caller]
    pub fn require_gone(&self, ranges: &Ranges) {
        let remains: Vec<String> = self.remains(ranges).iter().map(ToString::to_string).collect();
        assert_eq!(remains, [""; 0], "what should be gone");
    }

    /// Demands that nothing remains of any range that was used so far, which are then forgotten.
    #[track_caller]
    pub fn require_all_gone(&self) {
        let used = self.used();
        self.require_gone(&used);
        *self.trail.seen.lock().unwrap() = Seen::default();
    }

    /// All ranges that successful calls made so far, at their own addresses, also those of what is gone.
    pub fn used(&self) -> Ranges {
        let seen = self.trail.seen.lock().unwrap();
        Ranges { reservations: seen.reservations.keys().copied().collect(), mappings: seen.mappings.clone() }
    }

    /// What remains of those ranges by the driver's own word.
    ///
    /// A mapping is there where a reference to it can be retained, or its access be asked. A reservation is there where
    /// the same addresses can't be had by a hint, which is all that tells of who has them: where the driver did free
    /// them, they may be another simulator's of this process for a while. What is too small for a hint to be followed
    /// can't be wished for; it is there where it can be freed, and is gone then.
    pub fn remains(&self, ranges: &Ranges) -> Vec<Remains> {
        let mapped = ranges.mappings.iter().filter(|(address, size)| self.is_mapped(*address, *size));
        let mut remains: Vec<Remains> = mapped.map(|&(address, size)| Remains::Mapping(address, size)).collect();
        let deadline = Instant::now() + PATIENCE;
        for &(address, size) in &ranges.reservations {
            if size < ROOM {
                if self.free_what_is_there(address, size) {
                    remains.push(Remains::Reservation(address, size));
                }
                continue;
            }
            while !can_be_had(&self.driver, address, size) {
                let is_ours = self.trail.seen.lock().unwrap().reservations.get(&(address, size)) == Some(&true);
                if is_ours || Instant::now() > deadline {
                    remains.push(Remains::Reservation(address, size));
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
        remains
    }

    /// What remains of all ranges that were used, where nobody has any: of each reservation it is asked by freeing it,
    /// which no other's addresses get in the way of.
    pub(crate) fn remains_of_all(&self) -> Vec<Remains> {
        let used = self.used();
        let mapped = used.mappings.iter().filter(|(address, size)| self.is_mapped(*address, *size));
        let mapped = mapped.map(|&(address, size)| Remains::Mapping(address, size));
        let reserved = used.reservations.iter().filter(|(address, size)| self.free_what_is_there(*address, *size));
        mapped.chain(reserved.map(|&(address, size)| Remains::Reservation(address, size))).collect()
    }

    fn is_mapped(&self, address: u64, size: usize) -> bool {
        let ends = [address, address + size as u64 - G as u64];
        ends.into_iter().any(|address| {
            is_retained(&self.driver, address) || has_access(&self.driver, self.device.location(), address)
        })
    }

    /// Whether there is a reservation of exactly that pair, which is freed then.
    fn free_what_is_there(&self, address: u64, size: usize) -> bool {
        // SAFETY: whose the pair was has let go of it, or lost it: there is nobody else to use the addresses.
        let freed = unsafe { self.driver.mem_address_free(CUdeviceptr(address), size) };
        refused_or(freed.map(|()| true))
    }
}

/// Whether a reference can be had to what is mapped there.
fn is_retained(driver: &Driver, address: u64) -> bool {
    // SAFETY: the reference is given back below, and nothing is done with it.
    let retained = unsafe { driver.mem_retain_allocation_handle(CUdeviceptr(address)) };
    refused_or(retained.map(|handle| {
        // SAFETY: the reference was retained just now.
        unsafe { driver.mem_release(handle) }.expect("a reference to release");
        true
    }))
}

fn has_access(driver: &Driver, location: CUmemLocation, address: u64) -> bool {
    refused_or(driver.mem_get_access(location, CUdeviceptr(address)).map(|_| true))
}

/// Whether a reserve hinted there is granted there, and freed again.
fn can_be_had(driver: &Driver, address: u64, size: usize) -> bool {
    let Ok(given) = driver.mem_address_reserve(size, 0, CUdeviceptr(address)) else { return false };
    // SAFETY: it was reserved just now, and nothing is mapped there.
    unsafe { driver.mem_address_free(given, size) }.expect("addresses to free");
    given.0 == address
}

/// False where the driver refused with 1, which says that there is nothing. Any other code says nothing.
#[track_caller]
fn refused_or(answer: Result<bool, cuvmm::driver::Error>) -> bool {
    answer.unwrap_or_else(|error| {
        assert_eq!(error.code(), Some(CUresult::INVALID_VALUE), "{error}");
        false
    })
}
