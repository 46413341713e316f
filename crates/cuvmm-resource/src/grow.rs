//! Growing a buffer: covered, in place, or moved.

use cuvmm_handles::{Mapping, Room};

use crate::buffer::{Outcome, VirtualMemoryBuffer};
use crate::error::{Error, GrowError};
use crate::range::Range;
use crate::release::Unsettled;
use crate::sync::Arc;

impl VirtualMemoryBuffer {
    /// A buffer of at least `new_size` bytes, rounded up to the granularity, over the same memory and more behind
    /// it. This one stays open: both name the same bytes, and the added memory goes with the last that maps it.
    ///
    /// * [`Covered`](Outcome::Covered): this one, or the memory it is a prefix of, is large enough. The result is a
    ///   full alias, not smaller than this one, and no driver call is made.
    /// * [`InPlace`](Outcome::InPlace): the addresses behind could be had, out of the capacity or by a reservation
    ///   there. Kernels may be using the memory meanwhile.
    /// * [`Moved`](Outcome::Moved): they could not. Every chunk is mapped again elsewhere with its own access; the
    ///   old addresses stay as long as this buffer.
    ///
    /// What the added bytes hold is undefined.
    ///
    /// ```
    /// # use cuvmm_resource::{Options, Outcome, VirtualMemoryResource};
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::default());
    /// # let resource = VirtualMemoryResource::new(&simulator.driver()?.device(0)?, Options::new())?;
    /// let small = resource.allocate_with_capacity(2 << 20, 1 << 30)?;
    /// small.copy_from_host(0, b"kept")?;
    /// let large = small.grow(64 << 20)?;
    /// assert_eq!(large.outcome(), Some(Outcome::InPlace));
    /// assert_eq!(large.address(), small.address());
    ///
    /// let mut bytes = [0; 4];
    /// large.copy_to_host(0, &mut bytes)?;
    /// assert_eq!(&bytes, b"kept");
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Handles`] for a size that overflows; what the driver answers to anything but the reservation behind
    /// this buffer, whose failure means to move. This buffer is untouched by any failure, and nothing is left
    /// behind.
    pub fn grow(&self, new_size: usize) -> Result<Self, Error> {
        let range = self.range();
        if new_size <= self.size() {
            return Ok(self.covered(self.size()));
        }
        let size = self.resource().granularity().round_up(new_size)?.bytes();
        if size <= range.end() {
            return Ok(self.covered(size));
        }
        match self.rooms_behind(size - range.end()) {
            Some(rooms) => {
                let mut longer = range.clone();
                for room in rooms {
                    longer = longer.with(self.resource().create_in(room)?);
                }
                Ok(self.grown(longer, size, Outcome::InPlace))
            }
            None => self.moved(size),
        }
    }

    /// As [`grow`](Self::grow), in place of this buffer, which is gone after. Where the address stays, nothing is
    /// waited for; where it moves, this waits as closing does before the old addresses go.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let mut buffer = resource.allocate(2 << 20)?;
    /// for size in [64 << 20, 256 << 20, 1 << 30] {
    ///     buffer = buffer.grow_into(size)?;
    /// }
    /// assert_eq!(buffer.chunks().iter().map(|chunk| chunk.size).sum::<usize>(), 1 << 30);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`GrowError`], with this buffer as it was; with the grown one where only giving back the old addresses failed.
    pub fn grow_into(mut self, new_size: usize) -> Result<Self, GrowError> {
        let fail = |error, buffer| GrowError { error, buffer: Box::new(buffer), grown: false };
        let mut grown = match self.grow(new_size) {
            Ok(grown) => grown,
            Err(error) => return Err(fail(error, self)),
        };
        if grown.outcome() != Some(Outcome::Moved) {
            self.hand_over_to(&grown);
            return Ok(grown);
        }
        if let Err(Unsettled::Refused(error) | Unsettled::Failed(error)) = self.settle(None) {
            // No work can have been started on addresses that nobody was told of.
            let discarded = grown.let_go();
            if let Err(second) = discarded {
                tracing::error!(%second, "failed to discard a grown buffer");
            }
            return Err(fail(error, self));
        }
        match self.let_go() {
            Ok(()) => Ok(grown),
            Err(error) => Err(GrowError { error, buffer: Box::new(grown), grown: true }),
        }
    }

    fn covered(&self, size: usize) -> Self {
        self.grown(self.range().clone(), size, Outcome::Covered)
    }

    /// Room for `extra` bytes at the addresses behind this buffer's range: in its reservation first, then in a
    /// reservation behind that. None where somebody else has them, or they can't be had for any other reason.
    fn rooms_behind(&self, extra: usize) -> Option<Vec<Room>> {
        let (reservation, offset, behind) = self.room_behind()?;
        let here = extra.min(behind);
        let mut rooms = Vec::with_capacity(2);
        if here > 0 {
            rooms.push(reservation.take(offset, here).ok()?);
        }
        let behind = extra - here;
        if behind > 0 {
            let end = reservation.address().checked_add(reservation.size())?;
            let next = Arc::new(self.resource().reserve_at(end, behind).ok()?);
            rooms.push(next.take(0, behind).ok()?);
        }
        Some(rooms)
    }

    /// Everything mapped again in a range of `size` bytes elsewhere.
    fn moved(&self, size: usize) -> Result<Self, Error> {
        let reservation = Arc::new(self.resource().reserve(size)?);
        let mut range = Range::default();
        for mapping in self.range().mappings() {
            let (allocation, access) = (Arc::clone(mapping.allocation()), Arc::clone(mapping.access()));
            let mapping = Mapping::map(&reservation, range.end(), allocation, access)?;
            range = range.with(mapping);
        }
        let room = reservation.take(range.end(), size - range.end())?;
        let range = range.with(self.resource().create_in(room)?);
        Ok(self.grown(range, size, Outcome::Moved))
    }
}
