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
//! [`CURRENT`] is null or a reaper that is never freed. What runs at the exit does not unwind.
#![cfg_attr(not(cuvmm_shuttle), allow(unsafe_code))]

use std::cell::Cell;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use cuvmm_driver::process_id;

use crate::fence::Busy;
use crate::retired::Retired;
use crate::settle::Pauses;
use crate::stream::StreamRef;
use crate::sync::{Condvar, Mutex, MutexGuard, PoisonError, pause, spawn};
use crate::watch::TARGET;

/// The longest pause, which is as long as a round of questions took.
const LONG_ROUND: Duration = Duration::from_millis(20);

/// Leaves the memory of a buffer to the reaper. Makes no call of the driver.
pub(crate) fn hand_over(retired: Retired) {
    process::reaper().push(|queue| queue.retired.push(retired));
}

/// Leaves the last share of a stream to the reaper, where no call can be made to end it. Makes none.
pub(crate) fn hand_over_stream(stream: StreamRef) {
    process::reaper().push(|queue| queue.streams.push(stream));
}

/// Waits until something holds that the reaper sees to, or until the deadline. Whether it holds.
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
    /// A call has ended.
    ended: Condvar,
}

#[derive(Default)]
struct Queue {
    retired: Vec<Retired>,
    streams: Vec<StreamRef>,
    /// Whether there is a thread, or will be.
    is_served: bool,
    /// Whether it is making calls.
    is_busy: bool,
    /// Whether the process exits, and no call is to be made any more.
    is_closed: bool,
}

impl Reaper {
    fn new() -> Self {
        Self { queue: Mutex::default(), arrived: Condvar::new(), ended: Condvar::new() }
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
        self.push(|_| ());
        let mut queue = self.lock();
        while !holds() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || queue.is_closed {
                return false;
            }
            queue = self.ended.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// What its thread does.
    fn serve(&self) {
        REAPER_OF.set(process_id());
        let mut known = BTreeMap::new();
        let mut pauses = Pauses::new();
        let mut took = Duration::ZERO;
        loop {
            if !known.is_empty() {
                // No more than half of the time is spent on questions. What takes longer is somebody else's code, or a release.
                pause(pauses.next().max(took.min(LONG_ROUND)));
            }
            let Some((retired, streams)) = self.take(known.is_empty()) else { break };
            let begin = Instant::now();
            for stream in streams {
                self.attend(|| drop(stream));
            }
            for retired in retired {
                self.attend(|| admit(&mut known, retired));
                pauses = Pauses::new();
            }
            let (before, mut busy) = (known.len(), Busy::default());
            let step = |(key, retired): (usize, Retired)| Some((key, self.attend(|| retired.step(&mut busy))??));
            known = known.into_iter().filter_map(step).collect();
            self.attend(|| drop(busy));
            if known.len() < before {
                pauses = Pauses::new();
            }
            took = begin.elapsed();
        }
        std::mem::forget(known);
    }

    /// What was handed over since, waiting for something where there is nothing else to do. None where the process exits.
    fn take(&self, is_idle: bool) -> Option<(Vec<Retired>, Vec<StreamRef>)> {
        let mut queue = self.lock();
        while is_idle && !queue.is_closed && queue.retired.is_empty() && queue.streams.is_empty() {
            queue = self.arrived.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        (!queue.is_closed).then(|| (std::mem::take(&mut queue.retired), std::mem::take(&mut queue.streams)))
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

/// Adds it to those that are looked at; where one of the same memory is among them, to that one.
fn admit(known: &mut BTreeMap<usize, Retired>, mut retired: Retired) {
    // What can't be found out now is asked again.
    let _ = retired.begin();
    match known.entry(retired.key()) {
        Entry::Occupied(mut same) => same.get_mut().merge(retired),
        Entry::Vacant(place) => {
            place.insert(retired);
        }
    }
}

/// The reaper of this process, and the end of that.
#[cfg(not(cuvmm_shuttle))]
mod process {
    use std::ffi::c_int;
    use std::sync::atomic::{AtomicPtr, AtomicU32, Ordering};

    use cuvmm_driver::process_id;

    use super::Reaper;

    struct Current {
        process: u32,
        reaper: Reaper,
    }

    /// Null before it is first needed.
    static CURRENT: AtomicPtr<Current> = AtomicPtr::new(std::ptr::null_mut());

    /// One that was made in this process. A forked child has another than its parent: it has none of that one's threads, and
    /// may have found its lock held for ever.
    fn current() -> Result<&'static Reaper, *mut Current> {
        let known = CURRENT.load(Ordering::Acquire);
        // SAFETY: it is null, or a value that is never freed.
        let current = unsafe { known.as_ref() }.filter(|current| current.process == process_id());
        current.map(|current| &current.reaper).ok_or(known)
    }

    pub(super) fn reaper() -> &'static Reaper {
        loop {
            match current() {
                Ok(reaper) => return reaper,
                Err(known) => {
                    let made = Box::into_raw(Box::new(Current { process: process_id(), reaper: Reaper::new() }));
                    if CURRENT.compare_exchange(known, made, Ordering::AcqRel, Ordering::Acquire).is_err() {
                        // SAFETY: it was made just now, and another thread was first: nobody knows of it.
                        drop(unsafe { Box::from_raw(made) });
                    }
                }
            }
        }
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
        if let Ok(reaper) = current() {
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
