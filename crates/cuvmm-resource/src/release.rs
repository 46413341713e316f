//! The gate that every path to an unmap passes: what a buffer waits for before it lets go of its memory.
//!
//! `cuMemUnmap` neither waits nor is ordered after any work; a kernel still running on the addresses then dies. So
//! a buffer waits, on the host, for its release stream and its fences, also while an alias keeps the memory mapped:
//! when the last alias unmaps, all is settled, and ranges need no lists.
//!
//! # Safety
//! A fence's event is alive until the fence is dropped. It is of its stream's context, which lives as long as the
//! stream, which the fence shares.
#![allow(unsafe_code)]

use cuvmm_driver::sys::CUevent;
use cuvmm_driver::{Device, Driver, StrandedKind};
use cuvmm_handles::PrimaryContext;

use crate::capture::{Session, Target, is_capture_code, is_over};
use crate::error::Error;
use crate::stream::StreamRef;
use crate::sync::{Mutex, PoisonError};

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
/// assert!(matches!(buffer.released_after(), Release::Stream(_)));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Release {
    /// The legacy default stream of the device's primary context, and so every blocking stream of it; non-blocking
    /// streams are not covered. Where that context is not active there is nothing to wait for. Nor is there for memory
    /// of the host: give its buffers the stream that they are used on.
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
    /// How many fences were left the last time that the finished ones were sorted out.
    pruned: usize,
}

/// Why a buffer is not settled.
pub(crate) enum Unsettled {
    /// Nothing may be released: a stream is capturing, the thread is in a host function, or work could not be waited
    /// for and may still be running.
    Refused(Error),
    /// Something failed. Work on the buffer is over or lost all the same, and its memory can go.
    Failed(Error),
}

impl Order {
    pub(crate) fn new(release: Release) -> Self {
        Self { release, ..Self::default() }
    }

    /// Whether there is no fence.
    pub(crate) fn has_no_fence(&self) -> bool {
        self.fences.is_empty()
    }

    /// Makes the buffer wait for the work queued on `stream` so far. A later fence on a stream covers an earlier
    /// one, so there is as a rule one for each.
    pub(crate) fn fence(order: &Mutex<Self>, stream: &StreamRef) -> Result<(), Error> {
        let mut known = Taken::new(order, |order| order.fences_on(stream));
        renew(&mut known.fences, stream)?;
        drop(known);
        prune(order);
        Ok(())
    }

    /// Takes out the fences on a stream: one, or as many as threads made at once.
    fn fences_on(&mut self, stream: &StreamRef) -> Vec<Fence> {
        self.fences.extract_if(.., |fence| fence.stream == *stream).collect()
    }

    /// Takes out all fences where their number has doubled since the finished ones were sorted out.
    fn fences_to_prune(&mut self) -> Vec<Fence> {
        const FEW: usize = 8;
        if self.fences.len() < 2 * self.pruned.max(FEW) { Vec::new() } else { std::mem::take(&mut self.fences) }
    }

    /// Makes the buffer wait for the whole of `stream`, where no event could be recorded. Gives the fence that this
    /// covers.
    pub(crate) fn fence_stream(&mut self, stream: &StreamRef) -> Finished {
        let covered = self.fences_on(stream);
        self.fences.push(Fence { stream: stream.clone(), event: None });
        Finished(covered)
    }

    /// Waits for the release stream (`instead`, where one is given) and every fence. Where all went well, the fences
    /// are used up.
    ///
    /// Whether anything is in the way is found out first, for all of them, so that a refusal waits for nothing.
    ///
    /// `by_default` is the device whose default stream is meant where none is named; none where that is no stream's
    /// matter.
    pub(crate) fn settle(
        &mut self,
        driver: &Driver,
        by_default: Option<&Device>,
        instead: Option<&StreamRef>,
    ) -> Result<(), Unsettled> {
        let mut first = Ok(());
        match driver.is_in_host_function() {
            Ok(true) => return Err(Unsettled::Refused(Error::HostCallback)),
            Ok(false) => {}
            Err(error) => first = Err(error),
        }
        let named = match (instead, &self.release) {
            (Some(stream), _) | (None, Release::Stream(stream)) => Some(stream).filter(|stream| !stream.is_default()),
            (None, Release::DefaultStream | Release::Caller) => None,
        };
        let is_default = named.is_none() && (instead.is_some() || !matches!(self.release, Release::Caller));
        let primary = match by_default {
            Some(device) if is_default => active_primary_context(device, &mut first)?,
            _ => None,
        };

        let whole = named.map(StreamRef::target).or_else(|| primary.as_ref().map(Target::legacy));
        let mut waits: Vec<(Target<'_>, Option<CUevent>)> = whole.map(|target| (target, None)).into_iter().collect();
        waits.extend(self.fences.iter().map(|fence| (fence.stream.target(), fence.event)));
        for (target, _) in waits.iter().filter(|(_, event)| event.is_none()) {
            let (session, entered) = Session::enter(*target);
            first = first.and(entered);
            if session.is_gone() || session.is_lost() {
                continue;
            }
            match session.is_capturing() {
                Ok(true) => return Err(Unsettled::Refused(Error::StreamCapturing)),
                Ok(false) => {}
                Err(error) => first = first.and(Err(error)),
            }
            first = first.and(session.leave());
        }
        for (target, event) in &waits {
            first = wait(*target, *event, first)?;
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

/// Fences of a buffer that is shared meanwhile, taken out of its [`Order`]: calls are made without the lock. They are put
/// back when this is dropped, whatever happened. The buffer can't go before: its order is borrowed.
struct Taken<'a> {
    order: &'a Mutex<Order>,
    fences: Vec<Fence>,
}

impl<'a> Taken<'a> {
    fn new(order: &'a Mutex<Order>, take: impl FnOnce(&mut Order) -> Vec<Fence>) -> Self {
        let fences = take(&mut order.lock().unwrap_or_else(PoisonError::into_inner));
        Self { order, fences }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.order.lock().unwrap_or_else(PoisonError::into_inner).fences.append(&mut self.fences);
    }
}

/// Makes the known fences on a stream one that covers the work queued on it so far.
fn renew(known: &mut Vec<Fence>, stream: &StreamRef) -> Result<(), Error> {
    let session = Session::require(stream.target())?;
    if session.is_capturing()? {
        return Err(Error::StreamCapturing);
    }
    if known.iter().any(|fence| fence.event.is_none()) {
        // One waits for the whole of the stream, and so for this work too.
        return Ok(());
    }
    // They stay in place, whatever happens: the work behind them is to be waited for.
    let before = known.first().and_then(|fence| fence.event);
    let recorded = match before {
        Some(event) => event,
        None => {
            let event = session.create_event()?;
            known.push(Fence { stream: stream.clone(), event: Some(event) });
            event
        }
    };
    // SAFETY: the event is the fence's, made in this stream's context.
    if let Err(error) = unsafe { session.record(recorded) } {
        if before.is_none() {
            known.clear();
        }
        return Err(error.into());
    }
    // A capture that began in between has the event, and a wait for that could never end well.
    let is_captured = session.is_capturing();
    if !matches!(is_captured, Ok(false)) {
        known.iter_mut().take(1).for_each(|fence| fence.event = None);
        // A failure was counted and reported.
        let _ = destroy(stream.driver(), recorded);
    }
    known.truncate(1);
    if is_captured? { Err(Error::StreamCapturing) } else { Ok(()) }
}

/// Sorts out the fences whose work is over, each time that their number has doubled: whoever uses ever new streams
/// leaves few behind, and pays for it with a constant number of queries a fence.
fn prune(order: &Mutex<Order>) {
    let mut all = Taken::new(order, Order::fences_to_prune);
    if all.fences.is_empty() {
        return;
    }
    let finished: Vec<Fence> = all.fences.extract_if(.., |fence| fence.is_finished()).collect();
    order.lock().unwrap_or_else(PoisonError::into_inner).pruned = all.fences.len();
    drop(all);
    drop(finished);
}

/// Waits for an event, or a whole stream, and gives the first error so far. Refused where the work behind it may still
/// be running.
fn wait(
    target: Target<'_>,
    event: Option<CUevent>,
    first: Result<(), cuvmm_driver::Error>,
) -> Result<Result<(), cuvmm_driver::Error>, Unsettled> {
    let (session, entered) = Session::enter(target);
    let waited = match event {
        _ if session.is_gone() => entered.clone(),
        // SAFETY: the event is a fence's, of this stream's context.
        Some(event) => unsafe { session.synchronize_event(event) },
        None if session.is_lost() => entered.clone(),
        None => session.synchronize(),
    };
    if waited.as_ref().is_err_and(|error| is_capture_code(error.code())) {
        return Err(Unsettled::Refused(Error::StreamCapturing));
    }
    let is_settled = session.is_gone() || waited.as_ref().map_or_else(|error| is_over(error.code()), |()| true);
    match first.and(entered).and(waited) {
        Err(error) if !is_settled => Err(Unsettled::Refused(Error::Driver(error))),
        first => Ok(first.and(session.leave())),
    }
}

/// The device's primary context, where it is active: nothing can be queued in one that is not. Where that can't be
/// found out, it may be.
fn active_primary_context(
    device: &Device,
    first: &mut Result<(), cuvmm_driver::Error>,
) -> Result<Option<PrimaryContext>, Unsettled> {
    match device.primary_ctx_is_active() {
        Ok(false) => return Ok(None),
        Ok(true) => {}
        Err(error) => *first = first.clone().and(Err(error)),
    }
    match PrimaryContext::retain(device) {
        Ok(primary) => Ok(Some(primary)),
        Err(error) if is_over(error.code()) => {
            *first = first.clone().and(Err(error));
            Ok(None)
        }
        Err(error) => Err(Unsettled::Refused(Error::Driver(first.clone().err().unwrap_or(error)))),
    }
}

/// Fences that nobody waits for any more. To be dropped without a lock: with a stream goes its owner, whose drop is
/// anybody's code.
#[derive(Debug, Default)]
#[must_use = "fences are let go of without the lock"]
pub(crate) struct Finished(#[allow(dead_code, reason = "held for its drop")] Vec<Fence>);

/// Work on some stream that a buffer waits for.
#[derive(Debug)]
struct Fence {
    stream: StreamRef,
    /// Recorded behind the work; none: the whole stream is waited for.
    event: Option<CUevent>,
}

impl Fence {
    /// Whether the work is over for sure.
    fn is_finished(&self) -> bool {
        let Some(event) = self.event else { return false };
        let (session, entered) = Session::enter(self.stream.target());
        // SAFETY: the event is this fence's, of this stream's context.
        entered.is_ok() && matches!(unsafe { session.query_event(event) }, Ok(true))
    }

    /// Destroys the event, as dropping this does, and returns the error that dropping would only report.
    fn end(mut self) -> Result<(), cuvmm_driver::Error> {
        self.event.take().map_or(Ok(()), |event| destroy(self.stream.driver(), event))
    }
}

fn destroy(driver: &Driver, event: CUevent) -> Result<(), cuvmm_driver::Error> {
    // SAFETY: the event was taken out of its fence, so this is the only time; it need not have completed.
    let result = unsafe { driver.event_destroy(event) };
    result.inspect_err(|error| driver.strand(StrandedKind::Other, error, "an event was not destroyed"))
}

impl Drop for Fence {
    fn drop(&mut self) {
        if let Some(event) = self.event.take()
            && self.stream.driver().may_drop("an event is kept")
        {
            // A failure was counted and reported.
            let _ = destroy(self.stream.driver(), event);
        }
    }
}
