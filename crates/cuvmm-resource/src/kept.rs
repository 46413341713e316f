//! [`Kept`]: the chunks of a resource's buffers that are gone, for its next buffers.
//!
//! All of them are of one kind of memory, so that the size alone tells which fits. No call is made under the lock: what is
//! to be released is taken out first, and released by whoever took it.
//!
//! The reaper knows each cache from its resource's beginning until that is gone and the cache is empty.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use cuvmm_driver::sys::CUmemLocation;
use cuvmm_driver::{Device, Driver};
use cuvmm_handles::{Allocation, Mapping};

use crate::error::Error;
use crate::memory::is_host;
use crate::reaper;
use crate::recycling::Recycling;
use crate::statistics::Counts;
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError};
use crate::watch::{TARGET, watch};

/// How often any cache of the process has released something.
static RELEASED: AtomicUsize = AtomicUsize::new(0);

/// The cache of one resource.
pub(crate) struct Kept {
    recycling: Recycling,
    device: Device,
    /// Where its memory lies.
    location: CUmemLocation,
    counts: Arc<Counts>,
    chunks: Mutex<Chunks>,
    /// How often somebody is just releasing what was taken out.
    leaving: AtomicUsize,
    /// When something of that was released last, as [`released`] counts.
    left: AtomicUsize,
}

#[derive(Default)]
struct Chunks {
    /// The oldest first, by numbers that rise.
    by_age: BTreeMap<u64, Chunk>,
    /// The numbers of those of one size, the oldest first. No list is empty.
    by_size: BTreeMap<usize, VecDeque<u64>>,
    next: u64,
    bytes: usize,
    /// Whether the resource is gone.
    is_closed: bool,
}

struct Chunk {
    allocation: Allocation,
    /// When it is too old.
    until: Option<Instant>,
}

/// Why chunks are released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reason {
    /// Somebody asked for it.
    Trim,
    /// There is no room for them beside younger ones.
    Budget,
    /// They are too old, or their resource is gone.
    Age,
    /// An allocation found too little memory.
    Shortage,
}

/// How much may be given back in one go, and how much was.
pub(crate) struct Piece {
    most: usize,
    given_back: usize,
}

impl Piece {
    /// So many bytes, or one chunk that is larger.
    pub(crate) fn of(most: usize) -> Self {
        Self { most, given_back: 0 }
    }

    /// All that there is.
    pub(crate) fn whole() -> Self {
        Self::of(usize::MAX)
    }

    pub(crate) fn is_used_up(&self) -> bool {
        self.given_back >= self.most
    }

    pub(crate) fn given_back(&self) -> usize {
        self.given_back
    }

    pub(crate) fn add(&mut self, bytes: usize) {
        self.given_back = self.given_back.saturating_add(bytes);
    }
}

impl Kept {
    /// A cache that has nothing. The reaper knows of it from now on.
    pub(crate) fn new(
        recycling: Recycling,
        device: &Device,
        location: CUmemLocation,
        counts: &Arc<Counts>,
    ) -> Arc<Self> {
        let (device, counts) = (device.clone(), Arc::clone(counts));
        let kept = Arc::new(Self {
            recycling,
            device,
            location,
            counts,
            chunks: Mutex::default(),
            leaving: AtomicUsize::new(0),
            left: AtomicUsize::new(0),
        });
        reaper::add_cache(Arc::clone(&kept));
        kept
    }

    /// Held for a moment each time.
    fn lock(&self) -> MutexGuard<'_, Chunks> {
        self.chunks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes out the chunk of exactly that size that came last.
    pub(crate) fn take(&self, size: usize) -> Option<Allocation> {
        if self.counts.kept() == 0 {
            return None;
        }
        let mut chunks = self.lock();
        let number = *chunks.by_size.get(&size)?.back()?;
        let allocation = chunks.remove(number);
        self.counts.set_kept(chunks.bytes);
        allocation
    }

    /// Unmaps a chunk, and keeps it where it may be kept. Tells how much memory was given back for it.
    ///
    /// # Errors
    /// The first of those that calls failed with, as where a mapping closes.
    pub(crate) fn end(&self, mapping: Mapping, piece: &mut Piece) -> Result<(), cuvmm_handles::Error> {
        let size = mapping.size();
        let allocation = match mapping.unmap() {
            Ok(allocation) => Arc::into_inner(allocation),
            Err(error) => {
                piece.add(size);
                return Err(error);
            }
        };
        // Where it is not the last share, it is a chunk of others still.
        allocation.map_or(Ok(()), |allocation| self.offer(allocation, piece))
    }

    /// Keeps a chunk that nobody has any more, if it may be kept; else it is released, and so are the oldest where there is
    /// no room for all.
    pub(crate) fn offer(&self, allocation: Allocation, piece: &mut Piece) -> Result<(), cuvmm_handles::Error> {
        if allocation.size() > self.recycling.bytes || !allocation.is_private() {
            piece.add(allocation.size());
            return allocation.close();
        }
        let until = self.recycling.age.and_then(|age| Instant::now().checked_add(age));
        let mut chunks = self.lock();
        if chunks.is_closed {
            drop(chunks);
            piece.add(allocation.size());
            return allocation.close();
        }
        // Of several the reaper knows when the first is too old.
        let is_first = chunks.by_age.is_empty();
        chunks.insert(Chunk { allocation, until });
        let taken = chunks.take_down_to(self.recycling.bytes);
        let evicted = self.taken_out(chunks, taken);
        if let Some(until) = until.filter(|_| is_first) {
            reaper::look_at_caches(until);
        }
        let Some(evicted) = evicted else { return Ok(()) };
        let (bytes, released) = evicted.release(Reason::Budget);
        piece.add(bytes);
        released
    }

    /// Keeps a chunk again that was taken out in vain.
    pub(crate) fn put_back(&self, allocation: Arc<Allocation>) {
        if let Some(allocation) = Arc::into_inner(allocation) {
            // What fails here the handles count and report.
            let _ = self.offer(allocation, &mut Piece::whole());
        }
    }

    /// Releases the oldest until no more than so many bytes are kept. Tells how many were released.
    pub(crate) fn trim(&self, to_bytes: usize, reason: Reason) -> (usize, Result<(), cuvmm_handles::Error>) {
        if self.counts.kept() <= to_bytes {
            return (0, Ok(()));
        }
        let mut chunks = self.lock();
        let taken = chunks.take_down_to(to_bytes);
        self.taken_out(chunks, taken).map_or((0, Ok(())), |taken| taken.release(reason))
    }

    /// Keeps nothing more: its resource is gone. What it has is left to the reaper. Makes no call.
    pub(crate) fn close(&self) {
        let mut chunks = self.lock();
        chunks.is_closed = true;
        let (is_empty, is_over) = (chunks.by_age.is_empty(), self.is_over(&chunks));
        drop(chunks);
        if is_over {
            reaper::forget_cache(self);
        } else if !is_empty {
            reaper::look_at_caches(Instant::now());
        }
    }

    /// Releases what is too old, as much as a piece has room for. Tells when there is more to do; nothing more, ever, where it
    /// is closed and empty.
    pub(crate) fn release_due(&self, now: Instant, piece: &mut Piece) -> Due {
        let mut taken = Vec::new();
        let mut bytes = 0;
        let mut chunks = self.lock();
        let due = loop {
            let Some((number, oldest)) = chunks.by_age.first_key_value() else {
                break if self.is_over(&chunks) { Due::Never } else { Due::WhenTold };
            };
            match oldest.until {
                Some(until) if until > now && !chunks.is_closed => break Due::At(until),
                None if !chunks.is_closed => break Due::WhenTold,
                _ if piece.given_back().saturating_add(bytes) >= piece.most => break Due::At(now),
                _ => {}
            }
            let number = *number;
            taken.extend(chunks.remove(number).inspect(|allocation| bytes += allocation.size()));
        };
        let taken = self.taken_out(chunks, taken);
        // Whatever comes of it: the piece is used up by the attempt.
        piece.add(bytes);
        // What fails here the handles count and report.
        let _ = taken.map(|taken| taken.release(Reason::Age));
        due
    }

    /// Whether what it keeps would do for memory of that device, or of the host.
    fn is_beside(&self, device: &Device, location: CUmemLocation) -> bool {
        let is_there = self.location == location || is_host(self.location) && is_host(location);
        self.device.driver() == device.driver() && is_there
    }

    /// What was taken out under that lock: so each chunk is kept, or leaving, or released. None for nothing.
    fn taken_out(&self, chunks: MutexGuard<'_, Chunks>, taken: Vec<Allocation>) -> Option<Leaving<'_>> {
        self.counts.set_kept(chunks.bytes);
        (!taken.is_empty()).then(|| {
            self.leaving.fetch_add(1, Ordering::Relaxed);
            Leaving { kept: self, chunks: taken }
        })
    }

    /// Whether nothing comes to it any more, and nothing is leaving. Of what is, whoever lacks memory is to know.
    fn is_over(&self, chunks: &Chunks) -> bool {
        chunks.is_closed && chunks.by_age.is_empty() && !self.is_leaving()
    }

    /// Whether somebody is just releasing something. Who asks after that [when](Self::last_left) that was, knows.
    fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Acquire) > 0
    }

    /// When something was released last, as [`released`] counts; 0 for never.
    pub(crate) fn last_left(&self) -> usize {
        self.left.load(Ordering::Acquire)
    }

    pub(crate) fn driver(&self) -> &Driver {
        self.device.driver()
    }
}

/// Chunks that were taken out to be released. Who lacks memory waits for them.
struct Leaving<'a> {
    kept: &'a Kept,
    chunks: Vec<Allocation>,
}

impl Leaving<'_> {
    /// Releases them. Tells how many bytes went, and the first failure.
    fn release(mut self, reason: Reason) -> (usize, Result<(), cuvmm_handles::Error>) {
        let taken = std::mem::take(&mut self.chunks);
        self.kept.counts.add_trimmed(taken.len());
        if std::thread::panicking() {
            // A subscriber may be what panicked: told of this, it may end the process.
            return self.release_each(taken);
        }
        let size: usize = taken.iter().map(Allocation::size).sum();
        let span = tracing::debug_span!(target: TARGET, "trim", size, chunks = taken.len(), reason = reason.as_str());
        let (mut bytes, mut first) = (0, Ok(()));
        let _ = watch("trim", span, || -> Result<(), Error> {
            (bytes, first) = self.release_each(taken);
            Ok(first.clone()?)
        });
        (bytes, first)
    }

    fn release_each(&self, taken: Vec<Allocation>) -> (usize, Result<(), cuvmm_handles::Error>) {
        let (mut bytes, mut first) = (0, Ok(()));
        for allocation in taken {
            let size = allocation.size();
            let released = allocation.close();
            if released.is_ok() {
                bytes += size;
                self.kept.left.fetch_max(RELEASED.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Release);
                reaper::tell();
            }
            first = first.and(released);
        }
        (bytes, first)
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        if self.kept.driver().is_forked() {
            // Another thread of the parent's may have had the lock.
            return;
        }
        self.kept.leaving.fetch_sub(1, Ordering::Release);
        reaper::tell();
        let is_over = self.kept.is_over(&self.kept.lock());
        if is_over {
            // It was known for this.
            reaper::look_at_caches(Instant::now());
        }
    }
}

impl Chunks {
    fn insert(&mut self, chunk: Chunk) {
        let (number, size) = (self.next, chunk.allocation.size());
        self.next += 1;
        self.bytes += size;
        self.by_size.entry(size).or_default().push_back(number);
        self.by_age.insert(number, chunk);
    }

    /// Takes out the chunk of that number: the oldest or the youngest of its size, as all are that are taken.
    fn remove(&mut self, number: u64) -> Option<Allocation> {
        let Chunk { allocation, .. } = self.by_age.remove(&number)?;
        let size = allocation.size();
        if let Some(numbers) = self.by_size.get_mut(&size) {
            if numbers.front() == Some(&number) {
                numbers.pop_front();
            } else {
                numbers.pop_back();
            }
            if numbers.is_empty() {
                self.by_size.remove(&size);
            }
        }
        self.bytes -= size;
        Some(allocation)
    }

    /// Takes out the oldest until there are no more than so many bytes.
    fn take_down_to(&mut self, bytes: usize) -> Vec<Allocation> {
        let mut taken = Vec::new();
        while self.bytes > bytes
            && let Some((&number, _)) = self.by_age.first_key_value()
        {
            taken.extend(self.remove(number));
        }
        taken
    }
}

/// When a cache is to be looked at again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Then.
    At(Instant),
    /// When it says so.
    WhenTold,
    /// Not any more.
    Never,
}

impl Reason {
    fn as_str(self) -> &'static str {
        match self {
            Self::Trim => "trim",
            Self::Budget => "budget",
            Self::Age => "age",
            Self::Shortage => "shortage",
        }
    }
}

/// How often something that was kept was released in this process so far: to be asked before memory is found to lack.
pub(crate) fn released() -> usize {
    RELEASED.load(Ordering::Acquire)
}

/// Releases what is kept of such memory: all that the own cache has, or where that has nothing what others have. Whether that
/// was anything.
pub(crate) fn relieve(own: Option<&Kept>, device: &Device, location: CUmemLocation) -> bool {
    // What fails the handles count and report.
    own.is_some_and(|kept| kept.trim(0, Reason::Shortage).0 > 0)
        || beside(device, location).map(|kept| kept.trim(0, Reason::Shortage).0).sum::<usize>() > 0
}

/// Waits, where somebody else is just releasing what was kept of such memory, until something of that goes. Whether anything
/// was [released](released) since, before the deadline.
pub(crate) fn gives_back_more(device: &Device, location: CUmemLocation, since: usize, deadline: Instant) -> bool {
    let beside: Vec<_> = beside(device, location).collect();
    let are_leaving = || beside.iter().any(|kept| kept.is_leaving());
    let has_left = || beside.iter().any(|kept| kept.last_left() > since);
    // In this order: what is not leaving any more has left.
    if are_leaving() {
        reaper::wait_until(deadline, || has_left() || !are_leaving());
    }
    (has_left() || reaper::last_of_forgotten(device.driver()) > since) && Instant::now() < deadline
}

/// The caches of such memory.
fn beside(device: &Device, location: CUmemLocation) -> impl Iterator<Item = Arc<Kept>> {
    reaper::caches().into_iter().filter(move |kept| kept.is_beside(device, location))
}
