//! [`Statistics`]: what a resource has had of the driver, in numbers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use cuvmm_handles::{Level, Usage};

use crate::buffer::{Outcome, VirtualMemoryBuffer};
use crate::error::Error;
use crate::reaper;
use crate::watch::Ended;

/// What a resource has had of the driver, and what its buffers came to, at one moment. It pins nothing.
///
/// A number of bytes goes up after the driver made what it counts, and down after the driver said that it is undone. What
/// could not be undone stays in it, and counts as stranded. Each number is exact for itself; while other threads work, two
/// of them may be of different moments.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let cache = resource.allocate_with_capacity(2 << 20, 64 << 20)?.grow_into(8 << 20)?;
/// let statistics = resource.statistics();
/// assert_eq!((statistics.reserved.now, statistics.physical.now), (64 << 20, 8 << 20));
/// assert_eq!((statistics.buffers, statistics.allocations, statistics.grows_in_place), (1, 1, 1));
/// cache.close()?;
/// assert_eq!(resource.statistics().physical, Level { now: 0, peak: 8 << 20 });
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Statistics {
    /// Addresses that are reserved, in bytes.
    pub reserved: Level,
    /// Addresses that have memory, in bytes. Memory that is mapped twice, as while a buffer moves, counts twice.
    pub mapped: Level,
    /// Memory that this resource made and has not released, in bytes, also where another one's buffer grew by it, and what is
    /// kept. An exported handle may hold it longer.
    pub physical: Level,
    /// Memory of these bytes that is [kept](crate::Options::recycling) for the next buffers.
    pub kept: Level,
    /// Memory that was imported, in bytes. What is imported several times counts as often.
    pub imported: Level,
    /// Memory of others that was retained, in bytes. What is retained several times counts as often.
    pub retained: Level,
    /// Handles that were exported of its memory. Nobody tells when one is closed.
    pub exported_handles: usize,
    /// Reservations, memory and mappings that could not be given back, and buffers that had to be kept as a whole, with all
    /// that they map: one for each.
    pub stranded: usize,
    /// Buffers that there are now. Each alias is one.
    pub buffers: usize,
    /// Buffers that are gone, but for what they hold: it goes once their work is over.
    pub pending: usize,
    /// Shares of its buffers' memory that graphs have, one for each time that a graph was given one. Drivers tell some time
    /// after the last of what has it is gone; what was a graph's is pending then, in this order.
    pub in_graphs: usize,
    /// Buffers that were not made from another: allocated, imported or taken over.
    pub allocations: usize,
    /// Grows that found the memory there already.
    pub grows_covered: usize,
    /// Grows that kept the address.
    pub grows_in_place: usize,
    /// Grows that moved the buffer.
    pub grows_moved: usize,
    /// Grows that failed because they would have moved the buffer, and were not to.
    pub grows_refused: usize,
    /// Buffers that were made from a larger one.
    pub truncations: usize,
    /// Chunks that were kept, and became a next buffer's.
    pub recycled: usize,
    /// Chunks that were kept, and released.
    pub trimmed: usize,
}

/// What the handles do not count by themselves.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    buffers: AtomicUsize,
    pending: AtomicUsize,
    /// How often something of those has gone.
    given_back: AtomicUsize,
    in_graphs: AtomicUsize,
    /// Buffers that were kept as a whole.
    stranded: AtomicUsize,
    allocations: AtomicUsize,
    covered: AtomicUsize,
    in_place: AtomicUsize,
    moved: AtomicUsize,
    refused: AtomicUsize,
    truncations: AtomicUsize,
    /// Bytes that are kept, and the most that there have been.
    kept: AtomicUsize,
    kept_peak: AtomicUsize,
    recycled: AtomicUsize,
    trimmed: AtomicUsize,
}

impl Counts {
    pub(crate) fn statistics(&self, usage: &Usage) -> Statistics {
        let read = |count: &AtomicUsize| count.load(Ordering::Relaxed);
        // Read before what is pending.
        let in_graphs = self.in_graphs.load(Ordering::Acquire);
        Statistics {
            reserved: usage.reserved(),
            mapped: usage.mapped(),
            physical: usage.created(),
            kept: self.kept_level(),
            imported: usage.imported(),
            retained: usage.retained(),
            exported_handles: usage.exported(),
            stranded: usage.stranded() + read(&self.stranded),
            buffers: read(&self.buffers),
            pending: self.pending(),
            in_graphs,
            allocations: read(&self.allocations),
            grows_covered: read(&self.covered),
            grows_in_place: read(&self.in_place),
            grows_moved: read(&self.moved),
            grows_refused: read(&self.refused),
            truncations: read(&self.truncations),
            recycled: read(&self.recycled),
            trimmed: read(&self.trimmed),
        }
    }

    pub(crate) fn add_buffer(&self) {
        add_one(&self.buffers);
    }

    pub(crate) fn remove_buffer(&self) {
        self.buffers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Buffers that are gone, but for what they hold.
    pub(crate) fn pending(&self) -> usize {
        self.pending.load(Ordering::Acquire)
    }

    pub(crate) fn add_pending(&self) {
        add_one(&self.pending);
    }

    /// What they held was let go of before, or is stranded: whoever reads the number sees that.
    pub(crate) fn remove_pending(&self, buffers: usize) {
        if buffers > 0 {
            self.add_given_back();
            self.pending.fetch_sub(buffers, Ordering::Release);
        }
    }

    /// Something of what is pending was let go of before.
    pub(crate) fn add_given_back(&self) {
        self.given_back.fetch_add(1, Ordering::Release);
    }

    /// How often something was let go of that was pending: a number that only goes up.
    pub(crate) fn given_back(&self) -> usize {
        self.given_back.load(Ordering::Acquire)
    }

    /// Waits, where something is pending, until something of that goes. Whether it did, before the deadline.
    pub(crate) fn gives_back_more(&self, than: usize, deadline: Instant) -> bool {
        let is_more = || self.given_back() != than;
        // In this order: what is not pending any more has been counted.
        let are_coming = self.pending() > 0;
        (is_more() || are_coming && reaper::wait_until(deadline, is_more)) && Instant::now() < deadline
    }

    pub(crate) fn add_in_graph(&self) {
        add_one(&self.in_graphs);
    }

    /// What is pending by then is seen by whoever reads the number.
    pub(crate) fn remove_in_graph(&self) {
        self.in_graphs.fetch_sub(1, Ordering::Release);
    }

    pub(crate) fn add_stranded(&self) {
        add_one(&self.stranded);
    }

    pub(crate) fn add_allocation(&self) {
        add_one(&self.allocations);
    }

    pub(crate) fn add_truncation(&self) {
        add_one(&self.truncations);
    }

    /// How many bytes are kept.
    pub(crate) fn kept(&self) -> usize {
        self.kept.load(Ordering::Relaxed)
    }

    fn kept_level(&self) -> Level {
        // In this order, so that what was read first is within what is read last.
        let now = self.kept();
        Level { now, peak: self.kept_peak.load(Ordering::Relaxed).max(now) }
    }

    /// Under the lock of what is kept, which is why nothing is lost.
    pub(crate) fn set_kept(&self, bytes: usize) {
        self.kept.store(bytes, Ordering::Relaxed);
        self.kept_peak.fetch_max(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add_recycled(&self) {
        add_one(&self.recycled);
    }

    pub(crate) fn add_trimmed(&self, chunks: usize) {
        self.trimmed.fetch_add(chunks, Ordering::Relaxed);
    }

    /// Counts a grow, by how it ended.
    pub(crate) fn add_grow(&self, ended: &impl Ended) {
        match (ended.buffer().and_then(VirtualMemoryBuffer::outcome), ended.error()) {
            (Some(Outcome::Covered), _) => add_one(&self.covered),
            (Some(Outcome::InPlace), _) => add_one(&self.in_place),
            (Some(Outcome::Moved), _) => add_one(&self.moved),
            (None, Some(Error::WouldMove { .. })) => add_one(&self.refused),
            (None, _) => {}
        }
    }
}

fn add_one(count: &AtomicUsize) {
    count.fetch_add(1, Ordering::Relaxed);
}
