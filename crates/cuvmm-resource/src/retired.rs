//! [`Retired`]: the memory of buffers that are gone, until nothing uses it any more.

use std::time::{Duration, Instant};

use cuvmm_driver::sys::CUdeviceptr;
use cuvmm_driver::{CUresult, Device, Driver, StrandedKind};
use cuvmm_handles::Reservation;

use crate::error::Error;
use crate::fence::{Busy, Fence, drop_alone};
use crate::kept::Piece;
use crate::range::Range;
use crate::release::{Order, Release};
use crate::resource::VirtualMemoryResource;
use crate::settle::{Noted, Unsettled, poll, release_fence};
use crate::statistics::Counts;
use crate::sync::Arc;
use crate::watch::{TARGET, watch};

/// How often in a row, and for how long, it may fail to be found out whether the work is over before the memory is given up:
/// what a driver lacks for a moment is there again by then.
const TRIES: u32 = 8;
const TRIED_FOR: Duration = if cfg!(cuvmm_shuttle) { Duration::ZERO } else { Duration::from_millis(500) };

/// The memory of a buffer that is gone, or of several that had the same, or what a graph had of it, with all that it waits
/// for. It holds the driver, and of the resource the numbers.
///
/// Dropped before its work is known to be over, for whatever reason, it is stranded: memory that may be in use is never
/// unmapped.
pub(crate) struct Retired {
    driver: Driver,
    /// The device whose default stream is meant where none is named.
    by_default: Option<Device>,
    counts: Arc<Counts>,
    /// How many buffers it was of.
    buffers: usize,
    range: Range,
    /// The addresses of a buffer that has no memory.
    reserved: Option<Arc<Reservation>>,
    /// The release stream, until there is a fence for it.
    release: Release,
    fences: Vec<Fence>,
    noted: Noted,
    /// How often in a row it could not be found out whether the work is over.
    failures: u32,
    /// When the first of those was.
    failing_since: Option<Instant>,
    /// Why it is given up.
    refused: Option<Error>,
    /// The round in which something of it was let go of last; 0 for none.
    served: u64,
}

impl Retired {
    /// What a buffer of that resource had, and waits for. It counts as pending from now on.
    pub(crate) fn new(
        resource: &VirtualMemoryResource,
        range: Range,
        reserved: Option<Arc<Reservation>>,
        order: Order,
    ) -> Self {
        let driver = resource.device().driver().clone();
        let mut retired = Self::of_graph(driver, Arc::clone(resource.counts()), range);
        retired.by_default = resource.by_default().cloned();
        retired.reserved = reserved;
        (retired.release, retired.fences, retired.noted) = (order.release, order.fences, order.noted);
        retired
    }

    /// What a graph had of a buffer's memory, with nothing to wait for: its runs are over. It counts as pending from now on.
    pub(crate) fn of_graph(driver: Driver, counts: Arc<Counts>, range: Range) -> Self {
        counts.add_pending();
        Self {
            driver,
            by_default: None,
            counts,
            buffers: 1,
            range,
            reserved: None,
            release: Release::Caller,
            fences: Vec::new(),
            noted: Noted::default(),
            failures: 0,
            failing_since: None,
            refused: None,
            served: 0,
        }
    }

    /// The round in which something of it was let go of last; 0 where nothing was.
    pub(crate) fn last_served(&self) -> u64 {
        self.served
    }

    /// Whether no driver is there any more that it could be let go of by: it is another process's, or shut down.
    pub(crate) fn is_lost(&self) -> bool {
        self.driver.is_forked() || self.noted.get().is_some_and(cuvmm_driver::Error::is_shut_down)
    }

    /// A number that it shares with another of the same memory, and with nothing else as long as it is there.
    pub(crate) fn key(&self) -> usize {
        let reserved = || self.reserved.as_deref().map_or(0, |reserved| std::ptr::from_ref(reserved).addr());
        self.range.key().unwrap_or_else(reserved)
    }

    /// Takes on what another one of the same memory waits for. Of a stream that both wait for, what is queued by now is
    /// waited for once.
    pub(crate) fn merge(&mut self, mut other: Self) {
        self.buffers += std::mem::take(&mut other.buffers);
        for mut fence in std::mem::take(&mut other.fences) {
            match self.fences.iter_mut().find(|known| known.stream() == fence.stream()) {
                Some(known) => {
                    known.widen_unseen();
                    fence.widen_unseen();
                }
                None => self.fences.push(fence),
            }
        }
        if let Some(error) = other.noted.get() {
            self.noted.note(Err(error.clone()));
        }
        if let Release::DefaultStream | Release::Stream(_) = &other.release {
            self.release = std::mem::replace(&mut other.release, Release::Caller);
        }
        self.by_default = self.by_default.take().or(other.by_default.take());
        // All that it has is shared with this one: no call is made.
        (other.range, other.reserved) = (Range::default(), None);
    }

    /// Looks up what there is to wait for, as far as that can be told: then nothing but fences is left of it.
    pub(crate) fn begin(&mut self) -> Result<(), Unsettled> {
        if self.range.is_empty() && self.fences.is_empty() {
            // Nothing to protect, nothing to wait for.
            self.release = Release::Caller;
        }
        let fence = release_fence(&self.release, self.by_default.as_ref(), &mut self.noted)?;
        self.release = Release::Caller;
        self.fences.extend(fence);
        Ok(())
    }

    /// Lets go of the memory, as much as a piece has room for, if its work is over, and gives it up if that can't be found out.
    /// Otherwise it is given back, as is one of which something is left.
    pub(crate) fn step(mut self, busy: &mut Busy, piece: &mut Piece, round: u64) -> Option<Self> {
        let polled = self.begin().and_then(|()| poll(&mut self.fences, &mut self.noted, busy));
        match polled {
            _ if self.is_lost() => {}
            Ok(true) => {
                (self.failures, self.failing_since) = (0, None);
                if !piece.is_used_up() {
                    self.let_go(piece);
                    self.served = round;
                }
                return (!self.range.is_empty() || self.reserved.is_some()).then_some(self);
            }
            Ok(false) | Err(Unsettled::Refused(Error::StreamCapturing)) => {
                (self.failures, self.failing_since) = (0, None);
                return Some(self);
            }
            Err(Unsettled::Refused(error) | Unsettled::Failed(error)) => {
                self.failures += 1;
                let since = *self.failing_since.get_or_insert_with(Instant::now);
                if self.failures < TRIES || since.elapsed() < TRIED_FOR {
                    return Some(self);
                }
                self.refused = Some(error);
            }
        }
        None
    }

    fn let_go(&mut self, piece: &mut Piece) {
        let address = self.address();
        // Told once, of the first piece.
        let noted = std::mem::take(&mut self.noted);
        if let Some(error) = noted.get().filter(|error| error.code() != Some(CUresult::CONTEXT_IS_DESTROYED)) {
            tracing::error!(target: TARGET, %error, %address, "work on a dropped buffer failed");
        }
        let (size, chunks) = (self.range.end(), self.range.count());
        let span = tracing::debug_span!(target: TARGET, "release", %address, size, chunks, deferred = true);
        // What fails here the handles count and report.
        let _ = watch("release", span, || -> Result<(), Error> {
            let closed = self.range.tear_down(piece);
            // Whoever lacks memory may have enough by now, also where more is left.
            self.counts.add_given_back();
            let reserved = if self.range.is_empty() { self.reserved.take() } else { None };
            Ok(closed.and(reserved.and_then(Arc::into_inner).map_or(Ok(()), Reservation::close))?)
        });
    }

    fn address(&self) -> CUdeviceptr {
        self.reserved.as_ref().map_or(self.range.base(), |reserved| reserved.address())
    }
}

impl Drop for Retired {
    fn drop(&mut self) {
        let has_memory = !self.range.is_empty() || self.reserved.is_some();
        let (address, size) = (self.address(), self.range.end());
        std::mem::forget((std::mem::take(&mut self.range), self.reserved.take()));
        if self.is_lost() {
            // The driver is gone, and gave back everything.
            std::mem::forget(std::mem::take(&mut self.fences));
        }
        let is_stranded = has_memory && !self.is_lost();
        if is_stranded {
            self.driver.stranded().add(StrandedKind::Buffer);
            self.counts.add_stranded();
        }
        drop_alone(std::mem::take(&mut self.release));
        std::mem::take(&mut self.fences).into_iter().for_each(drop_alone);
        // Last: streams, and with them the contexts of events, need only be there as long as it is pending.
        self.counts.remove_pending(self.buffers);
        // A subscriber may be what panicked, and may panic now.
        if is_stranded && !std::thread::panicking() {
            let error = self.refused.as_ref().map(tracing::field::display);
            tracing::error!(target: TARGET, error, %address, size, "stranded a dropped buffer");
        }
    }
}
