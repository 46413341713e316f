//! Growing a buffer: covered, in place, or moved.

use cuvmm_handles::{Granularity, Mapping, Room};

use crate::buffer::{Outcome, VirtualMemoryBuffer};
use crate::error::{Error, ResizeError};
use crate::memory::{Memory, Want};
use crate::range::Range;
use crate::resource::VirtualMemoryResource;
use crate::settle::Unsettled;
use crate::sync::Arc;
use crate::watch::{TARGET, watch};

/// How a buffer is to grow.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let driver = Simulator::new(Machine::h200_pair()).driver()?;
/// # let device = driver.device(0)?;
/// let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let buffer = resource.allocate(2 << 20)?;
/// // The chunk that is added is zero, and another device may read it.
/// let readable = Options::new().peer(&driver.device(1)?, Access::Read);
/// let readable = VirtualMemoryResource::new(&device, readable)?;
/// let grown = buffer.grow_with(4 << 20, &GrowOptions::new().zeroed().chunk_of(&readable))?;
/// let grants: Vec<usize> = grown.chunks().iter().map(|chunk| chunk.access.len()).collect();
/// assert_eq!(grants, [1, 2]);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct GrowOptions {
    in_place: bool,
    zeroed: bool,
    chunk_of: Option<VirtualMemoryResource>,
}

impl GrowOptions {
    /// As [`VirtualMemoryBuffer::grow`] does.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeping the address, or not at all.
    #[must_use]
    pub fn in_place(self) -> Self {
        Self { in_place: true, ..self }
    }

    /// With the memory that is added zero. What was there before is not touched, and nor is what a covered grow merely
    /// shows.
    #[must_use]
    pub fn zeroed(self) -> Self {
        Self { zeroed: true, ..self }
    }

    /// With the memory that is added made by this resource, whose options so hold for it alone: its access, its peers,
    /// RDMA and compression, the bound on a chunk, what is done when memory is short. It must be memory of the same
    /// device and location that is shared in the same way.
    #[must_use]
    pub fn chunk_of(self, resource: &VirtualMemoryResource) -> Self {
        Self { chunk_of: Some(resource.clone()), ..self }
    }
}

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
    /// Where the resource has a [growth policy](crate::GrowthPolicy), more may be added than is asked for.
    ///
    /// Growing an imported buffer adds memory of this process's own. Its exporter, and others that imported it, never see
    /// that; nor does an import grow when its exporter's buffer does, which then has to be sent again.
    ///
    /// # Errors
    /// As [`allocate`](VirtualMemoryResource::allocate); [`Error::Handles`] where the memory ends at no multiple of the
    /// granularity of what is added, as imported memory may. Whatever the reservation behind this buffer fails with means
    /// to move. This buffer is untouched by any failure, and nothing is left behind.
    pub fn grow(&self, new_size: usize) -> Result<Self, Error> {
        self.grow_with(new_size, &GrowOptions::new())
    }

    /// As [`grow`](Self::grow), and fails rather than move: for addresses that graphs or kernels keep.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Hints, Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200().hints(Hints::Elsewhere));
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let buffer = resource.allocate_with_capacity(2 << 20, 64 << 20)?;
    /// let buffer = buffer.grow_in_place(64 << 20)?;
    /// assert!(matches!(buffer.grow_in_place(128 << 20), Err(Error::WouldMove { .. })));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`grow`](Self::grow); [`Error::WouldMove`].
    pub fn grow_in_place(&self, new_size: usize) -> Result<Self, Error> {
        self.grow_with(new_size, &GrowOptions::new().in_place())
    }

    /// As [`grow`](Self::grow), with options.
    ///
    /// # Errors
    /// As [`grow`](Self::grow). Before any call [`Error::ChunkMismatch`], and [`Error::NotWritable`] where zeros are
    /// wanted and can't be written; [`Error::WouldMove`] where it must not.
    ///
    /// [`Error::Handles`] also where the memory that is there ends at no multiple of the granularity of what is to be
    /// added: memory that was imported or mapped by others may, and any where `chunk_of` has a coarser one.
    pub fn grow_with(&self, new_size: usize, options: &GrowOptions) -> Result<Self, Error> {
        self.resource().require_own_process()?;
        watch("grow", self.grow_span(new_size, options), || {
            let ended = self.larger(new_size, options);
            self.resource().counts().add_grow(&ended);
            ended
        })
    }

    fn grow_span(&self, new_size: usize, options: &GrowOptions) -> tracing::Span {
        tracing::debug_span!(
            target: TARGET,
            "grow",
            address = %self.address(),
            size = self.size(),
            requested = new_size,
            in_place = options.in_place,
            zeroed = options.zeroed,
        )
    }

    fn larger(&self, new_size: usize, options: &GrowOptions) -> Result<Self, Error> {
        let mut added = self.resource().memory();
        if let Some(other) = &options.chunk_of {
            added.require_alike(other.memory())?;
            added = other.memory();
        }
        if options.zeroed {
            added.require_writable()?;
        }
        let end = self.range().end();
        if new_size <= self.size() {
            return Ok(self.covered(self.size()));
        }
        let granularity = self.resource().granularity().max(added.granularity);
        let size = granularity.round_up(new_size)?.bytes();
        if new_size <= end {
            return Ok(self.covered(size.min(end)));
        }
        granularity.exact(end)?;
        let needed = size - end;
        let wish = self.wish(needed, granularity);
        // First with what the policy wishes for, then with what is needed.
        let attempt = |extend: fn(&Self, usize, usize, &Memory, Want) -> Result<Self, Error>| {
            if wish > needed {
                match extend(self, size, wish, added, Want::Wish) {
                    Err(error) if error.is_for_want_of_room() => {}
                    result => return result,
                }
            }
            extend(self, size, needed, added, Want::Need)
        };
        let mut grown = attempt(Self::in_place);
        if !options.in_place && matches!(grown, Err(Error::WouldMove { .. })) {
            grown = attempt(Self::moved);
        }
        if options.zeroed { grown?.zeroed_from(end) } else { grown }
    }

    /// As [`grow`](Self::grow), in place of this buffer, which is gone after. Where the address stays, nothing is
    /// waited for; where it moves, this waits as closing does before the old addresses go, or leaves them to go later
    /// ([`OnDrop::Defer`](crate::OnDrop::Defer)).
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
    /// [`ResizeError`], with this buffer as it was; with the grown one where only giving back the old addresses failed.
    pub fn grow_into(self, new_size: usize) -> Result<Self, ResizeError> {
        self.grow_into_with(new_size, &GrowOptions::new())
    }

    /// As [`grow_into`](Self::grow_into), with options.
    ///
    /// # Errors
    /// As [`grow_into`](Self::grow_into) and [`grow_with`](Self::grow_with).
    pub fn grow_into_with(self, new_size: usize, options: &GrowOptions) -> Result<Self, ResizeError> {
        if let Err(error) = self.resource().require_own_process() {
            return Err(ResizeError { error, buffer: Box::new(self), resized: false });
        }
        watch("grow", self.grow_span(new_size, options), || {
            let ended = match self.larger(new_size, options) {
                Ok(grown) if grown.outcome() == Some(Outcome::Moved) => self.replace_by(grown),
                Ok(grown) => {
                    self.hand_over_to(&grown);
                    Ok(grown)
                }
                Err(error) => Err(ResizeError { error, buffer: Box::new(self), resized: false }),
            };
            let buffer = ended.as_ref().unwrap_or_else(|error| &error.buffer);
            buffer.resource().counts().add_grow(&ended);
            ended
        })
    }

    /// Waits as closing does, and lets go of this buffer for the other; or leaves both to the reaper.
    pub(crate) fn replace_by(mut self, other: Self) -> Result<Self, ResizeError> {
        if self.is_deferred() {
            self.retire();
            return Ok(other);
        }
        let mut resized = false;
        let released = watch("release", self.release_span(), || {
            if let Err(Unsettled::Refused(error) | Unsettled::Failed(error)) = self.settle(None) {
                return Err(error);
            }
            resized = true;
            self.let_go()
        });
        match released {
            Ok(()) => Ok(other),
            Err(error) if resized => Err(ResizeError { error, buffer: Box::new(other), resized }),
            Err(error) => {
                other.discard();
                Err(ResizeError { error, buffer: Box::new(self), resized })
            }
        }
    }

    fn covered(&self, size: usize) -> Self {
        self.resized(self.range().clone(), size, Outcome::Covered)
    }

    /// How much the policy adds where `needed` bytes are: no more than there is room for behind, where those have room.
    fn wish(&self, needed: usize, granularity: Granularity) -> usize {
        let wish = self.resource().options().growth.wish(self.range().end(), needed, granularity);
        if wish == needed {
            return wish;
        }
        match self.room_behind() {
            Some((_, _, behind)) if behind >= needed => wish.min(behind / granularity.bytes() * granularity.bytes()),
            _ => wish,
        }
    }

    /// This buffer with `extra` bytes more at the addresses behind it.
    fn in_place(&self, size: usize, extra: usize, added: &Memory, want: Want) -> Result<Self, Error> {
        let would_move = || Error::WouldMove { size, capacity: self.capacity() };
        let (room, behind) = self.rooms_behind(extra, added).ok_or_else(would_move)?;
        let range = added.extend(self.range().clone(), room, behind, size, want)?;
        Ok(self.resized(range, size, Outcome::InPlace))
    }

    /// Room for `extra` bytes at the addresses behind this buffer's range: in its reservation first, then in a
    /// reservation behind that. None where somebody else has them, or they can't be had for any other reason.
    fn rooms_behind(&self, extra: usize, added: &Memory) -> Option<(Room, Option<Room>)> {
        let (reservation, offset, behind) = self.room_behind()?;
        let here = extra.min(behind);
        let next = |bytes| {
            let end = reservation.address().checked_add(reservation.size())?;
            Arc::new(self.resource().reserve_at(end, bytes).ok()?).take(0, bytes).ok()
        };
        let (first, second) = match (here, extra - here) {
            (0, behind) => (next(behind)?, None),
            (here, 0) => (reservation.take(offset, here).ok()?, None),
            (here, behind) => {
                let first = reservation.take(offset, here).ok()?;
                (first, Some(next(behind)?))
            }
        };
        let mask = added.granularity.bytes() as u64 - 1;
        let is_aligned = |room: &Room| room.address().0 & mask == 0;
        (is_aligned(&first) && second.as_ref().is_none_or(is_aligned)).then_some((first, second))
    }

    /// Everything mapped again elsewhere, with `extra` bytes more.
    fn moved(&self, size: usize, extra: usize, added: &Memory, want: Want) -> Result<Self, Error> {
        let end = self.range().end();
        let granularity = self.resource().granularity().max(added.granularity);
        let total = granularity.exact(end)?.checked_add(granularity.exact(extra)?)?.bytes();
        let mappings = self.range().kept_mappings();
        // Those that are there may be of a coarser one, made by another resource.
        let coarsest =
            mappings.iter().map(|(mapping, _)| mapping.allocation().granularity()).fold(granularity, Ord::max);
        let reservation = Arc::new(self.resource().reserve_anywhere(coarsest, total)?);
        // Nobody else knows of it, so all is taken at once.
        let mut rest = reservation.take(0, total)?;
        let mut range = Range::default();
        for (mapping, kept) in mappings {
            let (room, behind) = rest.split(mapping.size())?;
            rest = behind;
            let (allocation, access) = (Arc::clone(mapping.allocation()), Arc::clone(mapping.access()));
            range = range.with(Mapping::map_in(room, allocation, access)?, kept.cloned());
        }
        Ok(self.resized(added.extend(range, rest, None, size, want)?, size, Outcome::Moved))
    }
}
