//! Address space: ranges that are reserved with the kernel, so that no address is anybody else's and the host
//! faults where it touches device memory.
//!
//! # Safety
//! Only ranges that the kernel gave to a [`Range`] are ever mapped over or unmapped.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, MremapFlags, ProtFlags};

use crate::memory::View;

/// The most addresses that the simulators of a process take together: of the 128 TiB that it has, the rest is for what
/// is not theirs.
const MOST_TAKEN: u64 = 112 << 40;

static TAKEN: AtomicU64 = AtomicU64::new(0);

/// A share of the process's addresses, wherever they are, until this is dropped.
#[derive(Debug)]
pub(crate) struct Taken(u64);

impl Taken {
    pub(crate) fn of(bytes: u64) -> Result<Self, NoRange> {
        let with = |taken: u64| taken.checked_add(bytes).filter(|&taken| taken <= MOST_TAKEN);
        let taken = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with);
        taken.map(|_| Self(bytes)).map_err(|_| NoRange::Exhausted)
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        TAKEN.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// Addresses that are reserved, untouchable, until this is dropped.
#[derive(Debug)]
pub(crate) struct Range {
    start: u64,
    bytes: u64,
    _taken: Taken,
}

/// Why there is no range.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoRange {
    /// Some of it is taken.
    Taken,
    /// There is not so much.
    Exhausted,
}

impl Range {
    /// Reserves exactly these addresses.
    pub(crate) fn at(start: u64, bytes: u64) -> Result<Self, NoRange> {
        let taken = Taken::of(bytes)?;
        match reserve(start, bytes, MapFlags::FIXED_NOREPLACE) {
            Ok(given) if given == start => Ok(Self { start, bytes, _taken: taken }),
            Ok(given) => {
                // A kernel without MAP_FIXED_NOREPLACE takes the address as a wish.
                give_back(given, bytes);
                Err(NoRange::Taken)
            }
            Err(Errno::NOMEM) => Err(NoRange::Exhausted),
            Err(_) => Err(NoRange::Taken),
        }
    }

    /// Reserves addresses that the kernel chooses, aligned.
    pub(crate) fn anywhere(bytes: u64, alignment: u64) -> Result<Self, NoRange> {
        let (taken, _over) = (Taken::of(bytes)?, Taken::of(alignment)?);
        let over = bytes.checked_add(alignment).ok_or(NoRange::Exhausted)?;
        let given = reserve(0, over, MapFlags::empty()).map_err(|_| NoRange::Exhausted)?;
        let start = align_up(given, alignment).ok_or(NoRange::Exhausted)?;
        let before = start - given;
        let after = alignment - before;
        // What was reserved too much.
        give_back(given, before);
        give_back(start + bytes, after);
        Ok(Self { start, bytes, _taken: taken })
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        give_back(self.start, self.bytes);
    }
}

/// Gives addresses back that the kernel gave to us.
fn give_back(start: u64, bytes: u64) {
    if bytes > 0 {
        // SAFETY: the kernel gave this range to us, and with it goes all that was mapped into it; nothing of this
        // process holds references into it.
        let _ = unsafe { rustix::mm::munmap(pointer(start), bytes as usize) };
    }
}

fn reserve(start: u64, bytes: u64, extra: MapFlags) -> rustix::io::Result<u64> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | extra;
    // SAFETY: an anonymous mapping without access; FIXED_NOREPLACE, if given, replaces nothing.
    let given = unsafe { rustix::mm::mmap_anonymous(pointer(start), bytes as usize, ProtFlags::empty(), flags) }?;
    Ok(given.addr() as u64)
}

fn pointer(address: u64) -> *mut c_void {
    std::ptr::with_exposed_provenance_mut(address as usize)
}

/// The next multiple of `alignment`, a power of two.
pub(crate) fn align_up(address: u64, alignment: u64) -> Option<u64> {
    Some(address.checked_add(alignment - 1)? & !(alignment - 1))
}

/// What the host may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostAccess {
    None,
    Read,
    ReadWrite,
}

/// Lets the host reach `view` at `start`, which lies within ranges of ours.
pub(crate) fn attach(start: u64, view: &View, access: HostAccess) -> rustix::io::Result<()> {
    let (old, bytes) = (view.pointer().cast::<c_void>(), view.bytes());
    // SAFETY: an old size of 0 leaves a shared mapping as it is and maps its pages a second time, here over a range
    // that is ours and that nobody holds references into.
    unsafe { rustix::mm::mremap_fixed(old, 0, bytes, MremapFlags::MAYMOVE, pointer(start)) }?;
    let flags = match access {
        HostAccess::None => MprotectFlags::empty(),
        HostAccess::Read => MprotectFlags::READ,
        HostAccess::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
    };
    // SAFETY: the range was mapped just now; no reference of ours points into it.
    unsafe { rustix::mm::mprotect(pointer(start), bytes, flags) }
}

/// Makes `bytes` at `start`, which lie within ranges of ours, untouchable again.
pub(crate) fn detach(start: u64, bytes: usize) -> rustix::io::Result<()> {
    reserve(start, bytes as u64, MapFlags::FIXED).map(|_| ())
}
