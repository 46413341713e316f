//! Making a buffer smaller.

use crate::buffer::{Outcome, VirtualMemoryBuffer};
use crate::error::{Error, ResizeError};
use crate::watch::{Ended, TARGET, watch};

impl VirtualMemoryBuffer {
    /// A buffer of the first `new_size` bytes, rounded up to the granularity, over as few of the same chunks as hold
    /// them. This one stays open, and keeps the rest: that goes when it closes. Not larger than this one; no driver call
    /// is made.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let buffer = resource.allocate(2 << 20)?.grow_into(6 << 20)?;
    /// let head = buffer.truncate(2 << 20)?;
    /// assert_eq!((head.address(), head.size(), head.chunks().len()), (buffer.address(), 2 << 20, 1));
    /// buffer.close()?;
    /// assert_eq!(simulator.physical_bytes(0), 2 << 20);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Handles`] for a size that overflows, [`Error::Forked`].
    pub fn truncate(&self, new_size: usize) -> Result<Self, Error> {
        self.resource().require_own_process()?;
        watch("truncate", self.truncate_span(new_size), || {
            let ended = self.shorter(new_size);
            self.count_truncation(&ended);
            ended
        })
    }

    fn truncate_span(&self, new_size: usize) -> tracing::Span {
        let size = self.size();
        tracing::debug_span!(target: TARGET, "truncate", address = %self.address(), size, requested = new_size)
    }

    fn count_truncation(&self, ended: &impl Ended) {
        if ended.buffer().is_some() {
            self.resource().counts().add_truncation();
        }
    }

    fn shorter(&self, new_size: usize) -> Result<Self, Error> {
        let size = self.resource().granularity().round_up(new_size)?.bytes().min(self.size());
        Ok(self.resized(self.range().prefix(size), size, Outcome::Covered))
    }

    /// As [`truncate`](Self::truncate), in place of this buffer: the chunks that are no longer needed are given back at
    /// once, where no alias has them. This waits for them as closing does, or leaves them to go later
    /// ([`OnDrop::Defer`](crate::OnDrop::Defer)). The addresses stay reserved as far as the last chunk's reservation goes, so
    /// that the buffer grows again in place; one that is cut to nothing keeps those of its first chunk.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let cache = resource.allocate_with_capacity(2 << 20, 1 << 30)?.grow_into(512 << 20)?;
    /// let (address, cache) = (cache.address(), cache.truncate_into(2 << 20)?);
    /// assert_eq!(simulator.physical_bytes(0), 2 << 20);
    /// let cache = cache.grow_into(1 << 30)?;
    /// assert_eq!((cache.address(), cache.outcome()), (address, Some(Outcome::InPlace)));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ResizeError`], with this buffer as it was where nothing was given back; with the smaller one where giving back
    /// what was cut off failed.
    pub fn truncate_into(self, new_size: usize) -> Result<Self, ResizeError> {
        if let Err(error) = self.resource().require_own_process() {
            return Err(ResizeError { error, buffer: Box::new(self), resized: false });
        }
        watch("truncate", self.truncate_span(new_size), || {
            let ended = match self.shorter(new_size) {
                Ok(shorter) if shorter.range().end() < self.range().end() => self.replace_by(shorter),
                Ok(shorter) => {
                    self.hand_over_to(&shorter);
                    Ok(shorter)
                }
                Err(error) => Err(ResizeError { error, buffer: Box::new(self), resized: false }),
            };
            let buffer = ended.as_ref().unwrap_or_else(|error| &error.buffer);
            buffer.count_truncation(&ended);
            ended
        })
    }
}
