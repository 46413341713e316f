//! [`Recycling`]: which memory a resource keeps for its next buffers.

use std::time::Duration;

use cuvmm_handles::Granularity;

use crate::error::Error;

/// That a resource keeps the chunks of its buffers that are gone, and how many of them: a next buffer, or a grow, maps one
/// of them where it needs a chunk of exactly that size, rather than have memory made. To release memory is what costs, also
/// others: on a host of several GPUs each call that grants access takes longer for a while after.
///
/// What is kept is the resource's, and nobody else's to allocate, other libraries of the process included: up to the budget,
/// until it is too old, [trimmed](crate::VirtualMemoryResource::trim) or the resource is gone. Before an allocation of this
/// library fails for want of memory, also one by another resource of the process, all that is kept on that device is released.
///
/// # What is kept
/// A chunk that the resource made, once it is unmapped everywhere and nobody else has it. Memory that was imported, mapped by
/// others or taken over never is. Nor is
/// * a chunk of which an export was attempted, dma-bufs included: whoever has that would see what its next owner writes;
/// * a chunk that is [wrapped](crate::VirtualMemoryResource::wrap), for as long as that lasts;
/// * one larger than the budget, and one whose unmap failed.
///
/// Options that ask for a handle kind or RDMA, whether or not it can be had, are refused beside recycling unless that is
/// [`shareable`](Self::shareable): network cards and other libraries may have registered such memory.
///
/// What raw calls do is not seen, nor what is done through another [`Driver`](cuvmm_driver::Driver) of the same library. Memory
/// whose handle they export or retain ([`Mapping::allocation`](cuvmm_handles::Mapping::allocation) tells it), or which they
/// retain by its address, goes to its next owner all the same, and whoever has it then sees what that writes.
///
/// # What a recycled chunk holds
/// Whatever the resource's former buffer left there. Nothing is cleared, but by the operations that say zeroed, which clear
/// it as they do fresh memory. Its access is granted anew.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// let options = Options::new().recycling(Recycling::up_to(1 << 30));
/// let resource = VirtualMemoryResource::new(&device, options)?;
/// resource.allocate(64 << 20)?.close()?;
/// assert_eq!(resource.statistics().kept.now, 64 << 20);
/// let buffer = resource.allocate(64 << 20)?; // makes no memory
/// let statistics = resource.statistics();
/// assert_eq!((statistics.recycled, statistics.kept.now, statistics.physical.peak), (1, 0, 64 << 20));
/// # buffer.close()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct Recycling {
    /// The most that is kept, in bytes.
    pub bytes: usize,
    /// How long a chunk is kept at most; none for as long as there is room.
    #[cfg_attr(feature = "serde", serde(default))]
    pub age: Option<Duration>,
    /// Whether memory is kept, too, that can be shared.
    #[cfg_attr(feature = "serde", serde(default))]
    pub shareable: bool,
}

impl Recycling {
    /// No more than so many bytes. Where another chunk comes, the oldest go.
    pub const fn up_to(bytes: usize) -> Self {
        Self { bytes, age: None, shareable: false }
    }

    /// No chunk for longer than that: then the library's thread releases it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use cuvmm_resource::*;
    /// let recycling = Recycling::up_to(1 << 30).for_at_most(Duration::from_secs(60));
    /// assert_eq!(Options::new().recycling(recycling).recycling, Some(recycling));
    /// ```
    #[must_use]
    pub const fn for_at_most(self, age: Duration) -> Self {
        Self { age: Some(age), ..self }
    }

    /// Also memory that has a handle kind or RDMA, which is refused otherwise. Whoever registers such memory somewhere, with a
    /// network card or another library, then has to end that before the buffer goes: else the other side sees what the next
    /// owner writes, or writes there.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let device = Simulator::new(Machine::h200()).driver()?.device(0)?;
    /// let options = Options::new().handle_kind(HandleKind::PosixFd);
    /// let recycling = Recycling::up_to(1 << 30);
    /// let refused = VirtualMemoryResource::new(&device, options.clone().recycling(recycling));
    /// assert!(matches!(refused, Err(Error::Recycling { .. })));
    /// assert!(VirtualMemoryResource::new(&device, options.recycling(recycling.shareable()))?.is_recycling());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub const fn shareable(self) -> Self {
        Self { shareable: true, ..self }
    }

    /// Refuses numbers that mean nothing.
    pub(crate) fn check(self) -> Result<(), Error> {
        match self {
            Self { bytes: 0, .. } => Err(Error::Recycling { reason: "a budget of 0 bytes" }),
            Self { age: Some(Duration::ZERO), .. } => Err(Error::Recycling { reason: "an age of 0" }),
            _ => Ok(()),
        }
    }

    /// Refuses memory that somebody may have registered, where nobody said that they are told.
    pub(crate) fn require_shareable(self) -> Result<(), Error> {
        const REGISTERED: &str = "memory with a handle kind or RDMA, which others may have registered: Recycling::shareable \
                                  allows that";
        if self.shareable { Ok(()) } else { Err(Error::Recycling { reason: REGISTERED }) }
    }

    /// Refuses a budget that no chunk fits in.
    pub(crate) fn require_room(self, granularity: Granularity) -> Result<(), Error> {
        if self.bytes < granularity.bytes() {
            return Err(Error::RecyclingBudget { bytes: self.bytes, granularity: granularity.bytes() });
        }
        Ok(())
    }
}
