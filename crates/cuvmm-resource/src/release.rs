//! The gate that every path to an unmap passes: what a buffer waits for before it lets go of its memory.
//!
//! `cuMemUnmap` neither waits nor is ordered after any work; a kernel still running on the addresses then dies. So
//! a buffer waits, on the host, for its release stream and its fences, also while an alias keeps the memory mapped:
//! when the last alias unmaps, all is settled, and ranges need no lists.
//!
//! # Safety
//! A fence's event is alive until the fence is dropped, and of its stream's context, which the fence keeps alive.
#![allow(unsafe_code)]

use std::thread::ThreadId;

use cuvmm_driver::sys::{CUcontext, CUevent};
use cuvmm_driver::{Device, Driver};

use crate::capture::{Session, Target, in_host_callback, is_capture_code};
use crate::error::Error;
use crate::stream::{PrimaryContext, StreamRef, strand};

/// What a buffer waits for when it closes or drops, besides its fences.
///
/// ```
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// # let resource = VirtualMemoryResource::new(&device, Options::new())?;
/// let stream = StreamRef::create(&device)?;
/// let options = Options::new().release(Release::Stream(stream));
/// let buffer = VirtualMemoryResource::new(&device, options)?.allocate(2 << 20)?;
/// assert!(matches!(buffer.release(), Release::Stream(_)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Release {
    /// The legacy default stream of the device's primary context, and so every blocking stream of it; non-blocking
    /// streams are not covered. Where that context is not active there is nothing to wait for.
    #[default]
    DefaultStream,
    /// This stream. A default-stream token counts as [`DefaultStream`](Self::DefaultStream).
    Stream(StreamRef),
    /// Nothing: the caller promises that no work on the buffer is queued or running when it goes.
    Caller,
}

impl Release {
    /// Refuses a stream of another driver.
    pub(crate) fn require_driver(&self, driver: &Driver) -> Result<(), Error> {
        match self {
            Self::Stream(stream) => Ok(driver.require_same(stream.driver())?),
            Self::DefaultStream | Self::Caller => Ok(()),
        }
    }
}

/// A buffer's release stream and fences.
#[derive(Debug, Default)]
pub(crate) struct Order {
    pub(crate) release: Release,
    fences: Vec<Fence>,
}

/// Why a buffer is not settled.
pub(crate) enum Unsettled {
    /// Nothing may be released: a stream is capturing, or the thread is in a host function.
    Refused(Error),
    /// A wait failed. Work on the buffer is over or lost, and its memory can go.
    Failed(Error),
}

impl Order {
    pub(crate) fn new(release: Release) -> Self {
        Self { release, fences: Vec::new() }
    }

    /// Whether there is no fence.
    pub(crate) fn has_no_fence(&self) -> bool {
        self.fences.is_empty()
    }

    /// Makes the buffer wait for the work queued on `stream` so far. A later fence on a stream covers an earlier
    /// one, so there is at most one for each.
    pub(crate) fn fence(&mut self, stream: &StreamRef) -> Result<(), Error> {
        let named = Named::of(stream)?;
        let session = Session::require(stream.target())?;
        if session.is_capturing()? {
            return Err(Error::StreamCapturing);
        }
        let known = self.fences.iter().position(|fence| fence.stream == *stream && fence.named == named);
        let event = match known.map(|index| self.fences[index].event) {
            Some(Some(event)) => event,
            // A fence without an event waits for the whole of its stream: it covers this work too.
            Some(None) => return Ok(()),
            None => {
                let event = session.create_event()?;
                self.fences.push(Fence { stream: stream.clone(), named, event: Some(event) });
                event
            }
        };
        // SAFETY: the event is the fence's, made in this stream's context.
        let recorded = unsafe { session.record(event) };
        drop(session);
        if recorded.is_err() && known.is_none() {
            self.fences.pop();
        }
        Ok(recorded?)
    }

    /// Makes the buffer wait for the whole of `stream`, where no event could be recorded. Gives the fence that this
    /// covers.
    #[must_use = "a fence is let go of without the lock"]
    pub(crate) fn fence_stream(&mut self, stream: &StreamRef) -> Option<Fence> {
        let fence = Fence { stream: stream.clone(), named: None, event: None };
        match self.fences.iter_mut().find(|known| known.stream == *stream && known.named.is_none()) {
            Some(known) => Some(std::mem::replace(known, fence)),
            None => {
                self.fences.push(fence);
                None
            }
        }
    }

    /// Waits for the release stream (`instead`, where one is given) and every fence. Where all went well, the fences
    /// are used up.
    ///
    /// Whether anything is in the way is found out first, for all of them, so that a refusal waits for nothing.
    pub(crate) fn settle(&mut self, device: &Device, instead: Option<&StreamRef>) -> Result<(), Unsettled> {
        let driver = device.driver();
        let mut first = Ok(());
        match in_host_callback(driver) {
            Ok(true) => return Err(Unsettled::Refused(Error::HostCallback)),
            Ok(false) => {}
            Err(error) => first = Err(error),
        }
        let release = match (instead, &self.release) {
            (Some(stream), _) => Release::Stream(stream.clone()),
            (None, release) => release.clone(),
        };
        let primary = match &release {
            Release::Stream(stream) if !stream.is_default() => None,
            Release::Caller => None,
            Release::Stream(_) | Release::DefaultStream => {
                let (primary, found) = active_primary_context(device);
                first = first.and(found);
                primary
            }
        };
        let released = match (&release, &primary) {
            (Release::Stream(stream), None) if !stream.is_default() => Some(stream.target()),
            (_, Some(primary)) => Some(primary.legacy_stream()),
            _ => None,
        };
        let mut waits: Vec<(Target<'_>, Option<CUevent>)> = released.map(|target| (target, None)).into_iter().collect();
        waits.extend(self.fences.iter().map(|fence| (fence.stream.target(), fence.event)));
        for (target, _) in waits.iter().filter(|(_, event)| event.is_none()) {
            let (session, entered) = Session::enter(*target);
            first = first.and(entered);
            match session.is_capturing() {
                Ok(true) => return Err(Unsettled::Refused(Error::StreamCapturing)),
                Ok(false) => {}
                Err(error) => first = first.and(Err(error)),
            }
            first = first.and(session.leave());
        }
        for (target, event) in &waits {
            let (session, entered) = Session::enter(*target);
            let waited = match event {
                // SAFETY: the event is the fence's, of this stream's context.
                Some(event) => unsafe { session.synchronize_event(*event) },
                None => session.synchronize(),
            };
            match waited {
                Err(error) if is_capture_code(error.code()) => {
                    return Err(Unsettled::Refused(Error::Driver(error)));
                }
                waited => first = first.and(entered).and(waited).and(session.leave()),
            }
        }
        drop(waits);
        if first.is_ok() {
            for fence in self.fences.drain(..) {
                first = first.and(fence.end());
            }
        }
        first = first.and(primary.map_or(Ok(()), PrimaryContext::release));
        first.map_err(|error| Unsettled::Failed(Error::Driver(error)))
    }
}

/// The device's primary context, where it is active: nothing can be queued in one that is not. Where the driver does
/// not say, it counts as active, so that its work is waited for.
fn active_primary_context(device: &Device) -> (Option<PrimaryContext>, Result<(), cuvmm_driver::Error>) {
    let active = device.primary_ctx_is_active();
    if active == Ok(false) {
        return (None, Ok(()));
    }
    match PrimaryContext::retain(device) {
        Ok(primary) => (Some(primary), active.map(drop)),
        Err(error) => (None, active.and(Err(error))),
    }
}

/// Where a default stream's token was used: it names another stream on another thread and in another context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Named {
    thread: ThreadId,
    context: CUcontext,
}

impl Named {
    /// None for a stream that is the same everywhere.
    fn of(stream: &StreamRef) -> Result<Option<Self>, Error> {
        if !stream.is_default() {
            return Ok(None);
        }
        let context = stream.driver().ctx_get_current()?;
        Ok(Some(Self { thread: std::thread::current().id(), context }))
    }
}

/// Work on some stream that a buffer waits for.
#[derive(Debug)]
pub(crate) struct Fence {
    stream: StreamRef,
    named: Option<Named>,
    /// Recorded behind the work; none: the whole stream is waited for.
    event: Option<CUevent>,
}

impl Fence {
    /// Destroys the event, as dropping this does, and says how that went.
    fn end(mut self) -> Result<(), cuvmm_driver::Error> {
        self.destroy()
    }

    fn destroy(&mut self) -> Result<(), cuvmm_driver::Error> {
        let driver: &Driver = self.stream.driver();
        let Some(event) = self.event.take().filter(|_| !driver.is_forked()) else { return Ok(()) };
        // SAFETY: the event was the fence's, which destroys it once; that is allowed before it completes.
        let result = unsafe { driver.event_destroy(event) };
        result.inspect_err(|error| strand(driver, error, "an event was not destroyed"))
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        // A failure was counted and reported by `destroy`.
        let _ = self.destroy();
    }
}
