//! What a resource's buffers left behind when they went, and waiting for its end.

use std::time::Instant;

use crate::error::Error;
use crate::kept::Reason;
use crate::reaper;
use crate::resource::VirtualMemoryResource;

impl VirtualMemoryResource {
    /// How many of its buffers are gone, but for what they hold: those that were dropped or closed without waiting, and those
    /// whose memory a graph gave back. Each goes once the work that it waits for is over. What a graph still has is not among
    /// them: [`Statistics::in_graphs`](crate::Statistics::in_graphs). Makes no call.
    pub fn pending(&self) -> usize {
        self.counts().pending()
    }

    /// Waits until none is [pending](Self::pending) any more. Other threads may drop buffers meanwhile: those are waited for
    /// too; what graphs still have is not. It makes no call itself. Where the driver has shut down, nothing stays pending: it
    /// gave back everything.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// let resource = VirtualMemoryResource::new(&device, Options::new().on_drop(OnDrop::Defer))?;
    /// for _ in 0..10 {
    ///     drop(resource.allocate(2 << 20)?);
    /// }
    /// resource.drain(Instant::now() + Duration::from_secs(10))?;
    /// assert_eq!(simulator.physical_bytes(0), 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::StillPending`] at the deadline, and at once where the process exits; [`Error::Forked`]. What failed by then
    /// was counted and reported as after a drop.
    pub fn drain(&self, deadline: Instant) -> Result<(), Error> {
        self.require_own_process()?;
        let is_drained = || self.pending() == 0;
        if is_drained() || reaper::wait_until(deadline, is_drained) {
            return Ok(());
        }
        match self.pending() {
            // Just now.
            0 => Ok(()),
            buffers => Err(Error::StillPending { buffers }),
        }
    }

    /// Releases the oldest of what it [keeps](crate::Options::recycling) for its next buffers, until no more than so many bytes
    /// are left, and tells how many were released. Makes no call where it keeps no more than that.
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
    /// assert_eq!(simulator.physical_bytes(0), 64 << 20);
    /// assert_eq!(resource.trim(0)?, 64 << 20);
    /// assert_eq!(simulator.physical_bytes(0), 0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Forked`], [`Error::HostCallback`], before any call; the first that the driver answers to a release: the others
    /// are made all the same, and what could not be released is stranded.
    #[doc(alias = "cuMemRelease")]
    pub fn trim(&self, to_bytes: usize) -> Result<usize, Error> {
        self.require_own_process()?;
        let Some(kept) = self.memory().kept.as_ref().filter(|_| self.counts().kept() > to_bytes) else { return Ok(0) };
        if self.device().driver().is_in_host_function()? {
            return Err(Error::HostCallback);
        }
        let (bytes, released) = kept.trim(to_bytes, Reason::Trim);
        released?;
        Ok(bytes)
    }

    /// Waits as [`drain`](Self::drain) does, releases what is [kept](crate::Options::recycling), and lets go of this resource,
    /// as dropping it does without waiting: for the end of a program, or before memory is counted. Its buffers, and other
    /// clones of it, live on.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// let resource = VirtualMemoryResource::new(&device, Options::new().on_drop(OnDrop::Defer))?;
    /// drop(resource.allocate(2 << 20)?);
    /// resource.close(Instant::now() + Duration::from_secs(10))?;
    /// assert!(simulator.live().is_empty());
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`drain`](Self::drain), and as [`trim`](Self::trim). The resource is gone all the same, and what is pending goes
    /// later: to ask again, clone it before.
    pub fn close(self, deadline: Instant) -> Result<(), Error> {
        let drained = self.drain(deadline);
        let trimmed = self.trim(0);
        drained.and(trimmed.map(drop))
    }
}
