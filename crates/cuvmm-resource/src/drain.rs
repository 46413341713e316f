//! What a resource's buffers left behind when they went, and waiting for its end.

use std::time::Instant;

use crate::error::Error;
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

    /// Waits as [`drain`](Self::drain) does, and lets go of this resource, as dropping it does without waiting: for the end of
    /// a program, or before memory is counted. Its buffers, and other clones of it, live on.
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
    /// As [`drain`](Self::drain). The resource is gone all the same, and what is pending goes later: to ask again, clone it
    /// before.
    pub fn close(self, deadline: Instant) -> Result<(), Error> {
        self.drain(deadline)
    }
}
