//! The reaper: a thread that lets go of what nobody waits for.
//!
//! There is one a process. It is started when it is first handed something, and asleep when it has nothing: then it makes
//! no call. What it has it looks at again and again, with pauses, and waits for none of it, so that nothing is held up by
//! another. It holds no lock while a call is made or anybody else's code runs, so that whoever hands something over waits
//! for nothing: also a host function of the driver's, and a destructor.
//!
//! When the process exits it stops before the driver's own end comes: what is left then the system gives back.
//!
//! # Safety
//! What runs at the exit does not unwind, and is code that stays.
#![cfg_attr(not(cuvmm_shuttle), allow(unsafe_code))]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use cuvmm_driver::{Driver, process_id};

use crate::fence::Busy;
use crate::kept::{Due, Kept, Piece};
use crate::retired::Retired;
use crate::settle::Pauses;
use crate::stream::StreamRef;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, pause, pause_unless, spawn};
use crate::watch::TARGET;

/// The longest pause, which is as long as a round of questions took.
const LONG_ROUND: Duration = Duration::from_millis(20);

/// The most memory that a round gives back, but for one chunk that is larger: 1 GiB. Others wait meanwhile for the driver.
const ROUND: usize = 1 << 30;

/// Leaves the memory of a buffer to the reaper. Makes no call of the driver.
pub(crate) fn hand_over(retired: Retired) {
    process::reaper().push(|queue| queue.retired.push(retired));
}

/// Leaves the last share of a stream to the reaper, where no call can be made to end it. Makes none.
pub(crate) fn hand_over_stream(stream: StreamRef) {
    process::reaper().push(|queue| queue.streams.push(stream));
}

/// Has a cache looked at from now on, until its resource is gone and it is empty. Starts no thread.
pub(crate) fn add_cache(kept: Arc<Kept>) {
    process::reaper().lock().caches.push(kept);
}

/// Has a cache not looked at any more, of which the caller has a share.
pub(crate) fn forget_cache(kept: &Kept) {
    process::reaper().lock().forget_cache(kept);
}

/// Has the caches looked at then, or before.
pub(crate) fn look_at_caches(at: Instant) {
    process::reaper().push(|queue| queue.look_at_caches(at));
}

/// The caches of this process.
pub(crate) fn caches() -> Vec<Arc<Kept>> {
    process::reaper().lock().caches.clone()
}

/// Tells those who wait that something was let go of by somebody else than the reaper.
pub(crate) fn tell() {
    let reaper = process::reaper();
    // Whoever found it not to be so yet waits by then.
    drop(reaper.lock());
    reaper.ended.notify_all();
}

/// When the last of that driver's caches that are not looked at any more released something last, as
/// [`released`](crate::kept::released) counts; 0 for never.
pub(crate) fn last_of_forgotten(driver: &Driver) -> usize {
    process::reaper().lock().forgotten.get(&key(driver)).copied().unwrap_or(0)
}

/// Waits until something holds that the reaper sees to, or that is [told](tell), or until the deadline. Whether it holds.
pub(crate) fn wait_until(deadline: Instant, holds: impl Fn() -> bool) -> bool {
    process::reaper().wait_until(deadline, holds)
}

thread_local! {
    /// The process whose reaper this thread is, which a child that is forked here is not; 0 for none.
    static REAPER_OF: Cell<u32> = const { Cell::new(0) };
}

/// Whether this thread is the reaper, which is to wait for nothing. A model's threads are all of one thread of the system.
pub(crate) fn is_here() -> bool {
    REAPER_OF.get() == process_id() && cfg!(not(cuvmm_shuttle))
}

struct Reaper {
    queue: Mutex<Queue>,
    /// Something was handed over.
    arrived: Condvar,
    /// Somebody waits for something to be let go of.
    awaited: Condvar,
    /// A call has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Queue {
    retired: Vec<Retired>,
    streams: Vec<StreamRef>,
    /// Those of resources that there are, and of others as long as they have something.
    caches: Vec<Arc<Kept>>,
    /// When the last of those that are not looked at any more released something, by the driver's [`key`].
    forgotten: BTreeMap<usize, usize>,
    /// When those are to be looked at, if that is known.
    caches_due: Option<Instant>,
    /// How many wait for something to be let go of.
    waiting: usize,
    /// Whether there is a thread, or will be.
    is_served: bool,
    /// Whether it is making calls.
    is_busy: bool,
    /// Whether the process exits, and no call is to be made any more.
    is_closed: bool,
}

/// What was handed over, and caches that are to be looked at.
struct Arrived {
    retired: Vec<Retired>,
    streams: Vec<StreamRef>,
    caches: Vec<Arc<Kept>>,
}

impl Queue {
    fn look_at_caches(&mut self, at: Instant) {
        self.caches_due = Some(self.caches_due.map_or(at, |due| due.min(at)));
    }

    /// Of which the caller has a share.
    fn forget_cache(&mut self, kept: &Kept) {
        self.caches.retain(|other| !std::ptr::eq(&raw const **other, kept));
        if kept.last_left() > 0 {
            let last = self.forgotten.entry(key(kept.driver())).or_default();
            *last = kept.last_left().max(*last);
        }
    }
}

impl Reaper {
    fn new() -> Self {
        Self { queue: Mutex::default(), arrived: Condvar::new(), awaited: Condvar::new(), ended: Condvar::new() }
    }

    /// Held for a moment each time.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds something, and starts the thread where there is none. Where that fails, it is tried again the next time.
    fn push(&'static self, add: impl FnOnce(&mut Queue)) {
        let mut queue = self.lock();
        add(&mut queue);
        let is_served = queue.is_closed || std::mem::replace(&mut queue.is_served, true);
        drop(queue);
        self.arrived.notify_one();
        if !is_served {
            self.start();
        }
    }

    fn start(&'static self) {
        process::stop_at_exit();
        if let Err(error) = spawn("cuvmm-reaper", || self.serve()) {
            self.lock().is_served = false;
            tracing::error!(target: TARGET, %error, "no thread can be had that lets go of dropped buffers");
        }
    }

    fn wait_until(&'static self, deadline: Instant, holds: impl Fn() -> bool) -> bool {
        if is_here() {
            // It would wait for itself.
            return holds();
        }
        // Where no thread could be had before, one may be now.
        self.push(|queue| queue.waiting += 1);
        self.awaited.notify_one();
        let mut queue = self.lock();
        let held = loop {
            if holds() {
                break true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || queue.is_closed {
                break false;
            }
            queue = self.ended.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        };
        queue.waiting -= 1;
        held
    }

    /// What its thread does.
    fn serve(&self) {
        REAPER_OF.set(process_id());
        let mut known = BTreeMap::new();
        let mut pauses = Pauses::new();
        let mut took = Duration::ZERO;
        let (mut piece, mut round) = (Piece::of(ROUND), 0_u64);
        let mut caches_first = false;
        loop {
            // No more than half of the time is spent on questions and releases. What takes longer is somebody else's code, or
            // a chunk that is very large.
            let rest = took.min(LONG_ROUND);
            if piece.given_back() > 0 {
                self.rest(rest);
            } else if !known.is_empty() {
                pause(pauses.next().max(rest));
            }
            piece = Piece::of(ROUND);
            let Some(Arrived { retired, streams, caches }) = self.take(known.is_empty()) else { break };
            let begin = Instant::now();
            for stream in streams {
                self.attend(|| drop(stream));
            }
            for retired in retired {
                self.attend(|| admit(&mut known, retired));
                pauses = Pauses::new();
            }
            let (before, mut busy) = (known.len(), Busy::default());
            // Those come first whom the last piece did not reach.
            let (caches, sooner) = if caches_first { (Vec::new(), caches) } else { (caches, Vec::new()) };
            self.see_to(sooner, &mut piece);
            round += 1;
            for retired in in_turn(std::mem::take(&mut known)) {
                if let Some(retired) = self.attend(|| retired.step(&mut busy, &mut piece, round)).flatten() {
                    // Where a piece of it went it ends elsewhere.
                    merge(&mut known, retired);
                }
            }
            self.attend(|| drop(busy));
            caches_first = piece.is_used_up();
            caches_first &= self.see_to(caches, &mut piece);
            if known.len() < before || piece.given_back() > 0 {
                pauses = Pauses::new();
            }
            took = begin.elapsed();
        }
        std::mem::forget(known);
    }

    /// Leaves others alone for so long after something was given back, but for those who wait for more of it: for them there
    /// is no pause, and where they come later no more of it.
    fn rest(&self, time: Duration) {
        let queue = self.lock();
        if queue.waiting == 0 && !time.is_zero() {
            pause_unless(&self.awaited, queue, time);
        }
    }

    /// Releases what caches have kept for too long, and forgets those that nothing comes to any more. Whether there is more to
    /// release.
    fn see_to(&self, caches: Vec<Arc<Kept>>, piece: &mut Piece) -> bool {
        let mut is_more = false;
        for kept in caches {
            let now = Instant::now();
            // What it was panicked over is gone by then, and not what is behind that.
            let due = self.attend(|| kept.release_due(now, piece)).unwrap_or(Due::At(now));
            is_more |= due == Due::At(now);
            let mut queue = self.lock();
            match due {
                Due::At(at) => queue.look_at_caches(at),
                Due::WhenTold => {}
                Due::Never => queue.forget_cache(&kept),
            }
            drop(queue);
            // With the last share may go the driver, whose end is somebody's code.
            self.attend(|| drop(kept));
        }
        is_more
    }

    /// What was handed over since, waiting for something where there is nothing else to do. None where the process exits.
    fn take(&self, is_idle: bool) -> Option<Arrived> {
        let mut queue = self.lock();
        let mut is_due;
        loop {
            let left = queue.caches_due.map(|due| due.saturating_duration_since(Instant::now()));
            is_due = left.is_some_and(|left| left.is_zero());
            if !is_idle || queue.is_closed || is_due || !queue.retired.is_empty() || !queue.streams.is_empty() {
                break;
            }
            queue = match left {
                Some(left) => self.arrived.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0,
                None => self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
        if queue.is_closed {
            return None;
        }
        let (retired, streams) = (std::mem::take(&mut queue.retired), std::mem::take(&mut queue.streams));
        let caches = if is_due { queue.caches.clone() } else { Vec::new() };
        queue.caches_due = queue.caches_due.filter(|_| !is_due);
        Some(Arrived { retired, streams, caches })
    }

    /// Does a piece of work that makes calls, unless the process exits. None also where it panicked: the owner of a stream
    /// and a subscriber are anybody's code.
    fn attend<T>(&self, work: impl FnOnce() -> T) -> Option<T> {
        let mut queue = self.lock();
        if queue.is_closed {
            std::mem::forget(work);
            return None;
        }
        queue.is_busy = true;
        drop(queue);
        let done = catch_unwind(AssertUnwindSafe(work));
        self.lock().is_busy = false;
        self.ended.notify_all();
        // So may be what was panicked with.
        done.map_err(std::mem::forget).ok()
    }

    /// Has no call made any more, and waits for one that is being made, for a while.
    #[cfg(not(cuvmm_shuttle))]
    fn close(&self) {
        /// A call of the driver's that takes longer than this hangs.
        const LAST_CALL: Duration = Duration::from_secs(1);
        let deadline = Instant::now() + LAST_CALL;
        let mut queue = self.lock();
        queue.is_closed = true;
        while queue.is_busy && !is_here() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = self.ended.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// A number of the driver's, no other's as long as it is there.
fn key(driver: &Driver) -> usize {
    std::ptr::from_ref(driver.retained()).addr()
}

/// Adds it to those that are looked at; where one of the same memory is among them, to that one.
fn admit(known: &mut BTreeMap<usize, Retired>, mut retired: Retired) {
    // What can't be found out now is asked again.
    let _ = retired.begin();
    merge(known, retired);
}

fn merge(known: &mut BTreeMap<usize, Retired>, retired: Retired) {
    match known.entry(retired.key()) {
        Entry::Occupied(mut same) => same.get_mut().merge(retired),
        Entry::Vacant(place) => {
            place.insert(retired);
        }
    }
}

/// Those first of whom nothing was let go of yet, then those for whom that is longest ago.
fn in_turn(known: BTreeMap<usize, Retired>) -> Vec<Retired> {
    let mut all: Vec<_> = known.into_values().collect();
    all.sort_by_key(Retired::last_served);
    all
}

/// The reaper of this process, and the end of that.
#[cfg(not(cuvmm_shuttle))]
mod process {
    use std::ffi::c_int;
    use std::sync::atomic::{AtomicU32, Ordering};

    use cuvmm_driver::{OfProcess, process_id};

    use super::Reaper;

    /// A forked child has another than its parent.
    static CURRENT: OfProcess<Reaper> = OfProcess::new();

    pub(super) fn reaper() -> &'static Reaper {
        CURRENT.get_or_make(Reaper::new)
    }

    /// What was registered last runs first, and the driver registered its own end when it was loaded, before the reaper had
    /// anything of it: so the reaper stops before.
    pub(super) fn stop_at_exit() {
        /// The process that has it. A child has its parent's functions, but for one that was just being added: twice is as
        /// good as once.
        static KNOWN_TO: AtomicU32 = AtomicU32::new(0);
        if KNOWN_TO.swap(process_id(), Ordering::Relaxed) != process_id() {
            // SAFETY: the function is there as long as this code is. Where there is no room for it, nothing stops.
            let _ = unsafe { atexit(stop) };
        }
    }

    extern "C" fn stop() {
        if let Some(reaper) = CURRENT.get() {
            reaper.close();
        }
    }

    unsafe extern "C" {
        fn atexit(function: extern "C" fn()) -> c_int;
    }
}

/// The reaper of one execution of a model.
#[cfg(cuvmm_shuttle)]
mod process {
    use super::Reaper;

    cuvmm_handles::sync::lazy_static! {
        static ref REAPER: Reaper = Reaper::new();
    }

    pub(super) fn reaper() -> &'static Reaper {
        &REAPER
    }

    pub(super) fn stop_at_exit() {}
}
