//! What a buffer waits for before it lets go of its memory: its release stream, and its fences.

use cuvmm_driver::Driver;

use crate::capture::Session;
use crate::error::Error;
use crate::fence::Fence;
use crate::settle::Noted;
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
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Release {
    /// The legacy default stream of the device's primary context, and so every blocking stream of it; non-blocking
    /// streams are not covered. Where that context is not active there is nothing to wait for. Nor is there for memory
    /// of the host: give its buffers the stream that they are used on.
    #[default]
    DefaultStream,
    /// This stream. A default-stream token counts as [`DefaultStream`](Self::DefaultStream).
    #[cfg_attr(feature = "serde", serde(skip_deserializing, serialize_with = "crate::serialized::refuse_stream"))]
    Stream(StreamRef),
    /// Nothing: the caller promises that no work on the buffer is queued or running when it goes, but for the runs of graphs
    /// that have its memory.
    Caller,
}

impl Release {
    pub(crate) fn into_stream(self) -> Option<StreamRef> {
        match self {
            Self::Stream(stream) => Some(stream),
            Self::DefaultStream | Self::Caller => None,
        }
    }

    /// Refuses a stream of another driver.
    pub(crate) fn require_driver(&self, driver: &Driver) -> Result<(), Error> {
        match self {
            Self::Stream(stream) => Ok(driver.require_same(stream.driver())?),
            Self::DefaultStream | Self::Caller => Ok(()),
        }
    }
}

/// Who waits for a buffer's work when the buffer is dropped, or leaves its old addresses behind. [`close`] waits itself, and
/// [`close_deferred`] never does, whatever this says.
///
/// ```
/// # use std::time::{Duration, Instant};
/// # use cuvmm_resource::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let simulator = Simulator::new(Machine::h200());
/// # let device = simulator.driver()?.device(0)?;
/// let resource = VirtualMemoryResource::new(&device, Options::new().on_drop(OnDrop::Defer))?;
/// let buffer = resource.allocate(2 << 20)?;
/// drop(buffer); // makes no call of the driver
/// resource.drain(Instant::now() + Duration::from_secs(10))?;
/// assert_eq!(simulator.physical_bytes(0), 0);
/// # Ok(())
/// # }
/// ```
///
/// [`close`]: crate::VirtualMemoryBuffer::close
/// [`close_deferred`]: crate::VirtualMemoryBuffer::close_deferred
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum OnDrop {
    /// The thread that drops, for up to two seconds, and hardly at all right after it did so in vain. What is not over by
    /// then is left to the thread that [`Defer`](Self::Defer) leaves all to.
    #[default]
    Wait,
    /// A thread of this library's, which lets go of the memory once its work is over. The drop makes no call of the driver,
    /// and waits for nothing. [`pending`](crate::VirtualMemoryResource::pending) counts what is left to it, and
    /// [`drain`](crate::VirtualMemoryResource::drain) waits for that, as is to be done before a capture begins on a stream that
    /// buffers wait for.
    Defer,
}

/// A buffer's release stream and fences.
#[derive(Debug, Default)]
pub(crate) struct Order {
    pub(crate) release: Release,
    pub(crate) fences: Vec<Fence>,
    /// What went wrong with work that was waited for, where the wait for other work was given up.
    pub(crate) noted: Noted,
    /// How many fences were left the last time that the finished ones were sorted out.
    pruned: usize,
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
        self.fences.extract_if(.., |fence| fence.stream() == stream).collect()
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
        self.fences.push(Fence::whole(stream.clone()));
        Finished(covered)
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
    if known.iter().any(Fence::is_whole) {
        // One waits for the whole of the stream, and so for this work too.
        return Ok(());
    }
    // They stay in place, whatever happens: the work behind them is to be waited for.
    let is_first = known.is_empty();
    if is_first {
        known.push(Fence::whole(stream.clone()));
    }
    let Some(fence) = known.first_mut() else { return Ok(()) };
    if let Err(error) = fence.record(&session) {
        if is_first {
            known.clear();
        }
        return Err(error.into());
    }
    let confirmed = fence.confirm(&session);
    known.truncate(1);
    confirmed
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

/// Fences that nobody waits for any more. To be dropped without a lock: with a stream goes its owner, whose drop is
/// anybody's code.
#[derive(Debug, Default)]
#[must_use = "fences are let go of without the lock"]
pub(crate) struct Finished(#[allow(dead_code, reason = "held for its drop")] Vec<Fence>);
