//! The end of a buffer: closed, or dropped.

use std::cell::Cell;
use std::time::{Duration, Instant};

use cuvmm_driver::CUresult;

use crate::buffer::VirtualMemoryBuffer;
use crate::error::{CloseError, Error};
use crate::range::Range;
use crate::reaper;
use crate::release::{OnDrop, Order};
use crate::resource::VirtualMemoryResource;
use crate::retired::Retired;
use crate::settle::{PATIENCE, Unsettled};
use crate::stream::StreamRef;
use crate::sync::PoisonError;
use crate::watch::{TARGET, watch};

thread_local! {
    /// When a drop on this thread last waited in vain.
    static IN_VAIN: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// How long a drop on this thread waits now. Of many in a row that wait for the same work, or for this thread, the first does
/// for all: no more than half of the thread's time goes into waits that are in vain.
fn patience() -> Duration {
    IN_VAIN.get().map_or(PATIENCE, |ended| ended.elapsed().min(PATIENCE))
}

impl VirtualMemoryBuffer {
    /// Waits for its release stream and its fences, then lets go of its memory: what no alias shares is unmapped and
    /// freed. What goes wrong is told here, and counted and reported by a drop.
    ///
    /// ```
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// match buffer.close() {
    ///     Ok(()) => println!("closed"),
    ///     Err(error) => match error.into_buffer() {
    ///         Some(buffer) => println!("not now: try {buffer:?} again once the capture is over"),
    ///         None => println!("closed, with something stranded"),
    ///     },
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`CloseError`], with the buffer where nothing was released: [`Error::StreamCapturing`],
    /// [`Error::HostCallback`], and where work could not be waited for and may still be running. Otherwise, as after
    /// an error of the work itself (700 and its like), it is closed: what a failed call would have undone, and what
    /// needed it, is stranded.
    pub fn close(self) -> Result<(), CloseError> {
        self.close_after(None)
    }

    /// As [`close`](Self::close), waiting for `stream` instead of its release stream.
    ///
    /// # Errors
    /// As [`close`](Self::close); the buffer comes back for a stream of another driver too.
    pub fn close_on(self, stream: &StreamRef) -> Result<(), CloseError> {
        match self.driver().require_same(stream.driver()) {
            Ok(()) => self.close_after(Some(stream)),
            Err(error) => Err(CloseError { error: error.into(), buffer: Some(Box::new(self)) }),
        }
    }

    /// As [`close`](Self::close), if what it waits for is over by the deadline. One that has passed lets it ask for a
    /// moment, some 50 us: on a stream that has nothing to do it takes as long to know that.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// let buffer = resource.allocate(2 << 20)?;
    /// let later = match buffer.close_within(Instant::now() + Duration::from_millis(50)) {
    ///     Ok(()) => None,
    ///     Err(error) if *error.error() == Error::DeadlinePassed => error.into_buffer(),
    ///     Err(error) => return Err(error.into()),
    /// };
    /// assert!(later.is_none()); // nothing was queued
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`close`](Self::close); [`Error::DeadlinePassed`], with the buffer. Where the error is dropped, so is the buffer,
    /// which then waits as any drop does: [`close_deferred`](Self::close_deferred) ends it without.
    pub fn close_within(mut self, deadline: Instant) -> Result<(), CloseError> {
        watch("release", self.release_span(), || {
            let settled = self.settle_by(deadline);
            self.close_settled(settled)
        })
    }

    /// Closes it without waiting, and without any call of the driver: what it holds is let go of by a thread of this
    /// library's, once what it waits for is over. What goes wrong then is counted and reported, as by a drop.
    ///
    /// It counts as [`pending`](VirtualMemoryResource::pending) until then.
    ///
    /// ```
    /// # use std::time::{Duration, Instant};
    /// # use cuvmm_resource::*;
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let simulator = Simulator::new(Machine::h200());
    /// # let device = simulator.driver()?.device(0)?;
    /// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
    /// resource.allocate(2 << 20)?.close_deferred();
    /// resource.drain(Instant::now() + Duration::from_secs(10))?;
    /// assert_eq!((resource.pending(), simulator.physical_bytes(0)), (0, 0));
    /// # Ok(())
    /// # }
    /// ```
    pub fn close_deferred(mut self) {
        if !self.driver().is_forked() {
            self.retire();
        }
    }

    fn close_after(mut self, instead: Option<&StreamRef>) -> Result<(), CloseError> {
        watch("release", self.release_span(), || {
            let settled = self.settle(instead);
            self.close_settled(settled)
        })
    }

    /// Lets go of the memory, unless that was refused.
    fn close_settled(mut self, settled: Result<(), Unsettled>) -> Result<(), CloseError> {
        let settled = match settled {
            Err(Unsettled::Refused(error)) => return Err(CloseError { error, buffer: Some(Box::new(self)) }),
            Err(Unsettled::Failed(error)) => Err(error),
            Ok(()) => Ok(()),
        };
        settled.and(self.let_go()).map_err(|error| CloseError { error, buffer: None })
    }

    /// Around the wait for what is to be waited for, and the end of what nobody shares.
    pub(crate) fn release_span(&self) -> tracing::Span {
        let (size, chunks) = (self.size, self.range.count());
        tracing::debug_span!(target: TARGET, "release", address = %self.address(), size, chunks)
    }

    /// Whether there is anything to let go of.
    fn has_something(&self) -> bool {
        !self.range.is_empty() || self.reserved.is_some()
    }

    /// Waits for all that it is to wait for. Nothing to protect, nothing to wait for.
    pub(crate) fn settle(&mut self, instead: Option<&StreamRef>) -> Result<(), Unsettled> {
        match self.order_to_settle()? {
            Some((order, resource)) => resource.settle(order, instead),
            None => Ok(()),
        }
    }

    /// As [`settle`](Self::settle), and refused when the deadline passes.
    fn settle_by(&mut self, deadline: Instant) -> Result<(), Unsettled> {
        match self.order_to_settle()? {
            Some((order, resource)) => order.settle_by(deadline, resource.device().driver(), resource.by_default()),
            None => Ok(()),
        }
    }

    fn order_to_settle(&mut self) -> Result<Option<(&mut Order, &VirtualMemoryResource)>, Unsettled> {
        if !self.has_something() {
            return Ok(None);
        }
        self.resource.require_own_process().map_err(Unsettled::Refused)?;
        let order = self.order.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !self.range.is_empty() || !order.has_no_fence() {
            return Ok(Some((order, &self.resource)));
        }
        match self.resource.device().driver().is_in_host_function() {
            Ok(true) => Err(Unsettled::Refused(Error::HostCallback)),
            _ => Ok(None),
        }
    }

    /// Whether a drop leaves everything to the reaper. What that drops itself does.
    pub(crate) fn is_deferred(&self) -> bool {
        self.resource.options().on_drop == OnDrop::Defer || reaper::is_here()
    }

    /// Lets go of the memory without waiting. It is empty after.
    pub(crate) fn let_go(&mut self) -> Result<(), Error> {
        self.size = 0;
        let closed = std::mem::take(&mut self.range).close_with(self.reserved.take());
        drop(self.take_order());
        Ok(closed?)
    }

    fn take_order(&mut self) -> Order {
        std::mem::take(self.order.get_mut().unwrap_or_else(PoisonError::into_inner))
    }

    /// Moves what this waits for to `other`, which has all of this one's memory, and lets go of this one.
    pub(crate) fn hand_over_to(mut self, other: &Self) {
        let order = self.take_order();
        // Without the lock: with a stream goes its owner, whose drop is anybody's code.
        let former = other.order().map(|mut others| std::mem::replace(&mut *others, order));
        drop(former);
        // Every node is shared with the other: no call is made.
        self.range = Range::default();
        self.reserved = None;
    }

    /// Leaves all that it holds to the reaper, and makes no call. It is empty after.
    pub(crate) fn retire(&mut self) {
        let order = self.take_order();
        self.size = 0;
        self.resource.end_without_call();
        if !self.has_something() {
            // Nothing is waited for, but the end of a stream is a call.
            return order.release.into_stream().into_iter().for_each(reaper::hand_over_stream);
        }
        let range = std::mem::take(&mut self.range);
        reaper::hand_over(Retired::new(&self.resource, range, self.reserved.take(), order));
    }

    /// Waits and lets go, as well as can be where nobody can be told: what goes wrong is counted and reported, and what can't
    /// be waited for is left to the reaper.
    fn end(&mut self) -> Result<(), Error> {
        let settled = match self.settle_by(Instant::now() + patience()) {
            Ok(()) => Ok(()),
            // The driver is gone, and gave back everything.
            Err(Unsettled::Failed(error)) if error.code() == Some(CUresult::DEINITIALIZED) => {
                self.keep();
                return Err(error);
            }
            // So is the work's context.
            Err(Unsettled::Failed(error)) if error.code() == Some(CUresult::CONTEXT_IS_DESTROYED) => Err(error),
            Err(Unsettled::Failed(error)) => {
                tracing::error!(target: TARGET, %error, address = %self.address(), "work on a dropped buffer failed");
                Err(error)
            }
            Err(Unsettled::Refused(error)) => {
                if error == Error::DeadlinePassed {
                    IN_VAIN.set(Some(Instant::now()));
                }
                self.retire();
                return Err(error);
            }
        };
        // What fails here the handles count and report.
        settled.and(self.let_go())
    }

    /// Keeps all that it holds for ever, and makes no call.
    fn keep(&mut self) {
        std::mem::forget(std::mem::take(&mut self.range));
        std::mem::forget(self.reserved.take());
        std::mem::forget(self.take_order());
        std::mem::forget(self.resource.clone());
    }
}

impl Drop for VirtualMemoryBuffer {
    fn drop(&mut self) {
        self.resource.counts().remove_buffer();
        if self.driver().is_forked() {
            return self.keep();
        }
        if self.is_deferred() {
            return self.retire();
        }
        if self.has_something() {
            let ending = Ending(self);
            // A failure is counted and reported.
            let _ = watch("release", ending.0.release_span(), || ending.0.end());
        }
    }
}

/// A buffer that is being dropped. Its memory would go with it also where that panics, as the owner of a stream and a
/// subscriber may, and before all was waited for: so what is left then is the reaper's.
struct Ending<'a>(&'a mut VirtualMemoryBuffer);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        if self.0.has_something() {
            self.0.retire();
        }
    }
}
