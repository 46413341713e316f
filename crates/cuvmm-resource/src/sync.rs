//! Shared ownership, locks and threads, as in cuvmm-handles: the standard library's, or those that a model checker
//! schedules.

use std::time::Duration;

#[cfg(cuvmm_shuttle)]
pub(crate) use cuvmm_handles::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
#[cfg(not(cuvmm_shuttle))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Starts a thread that nobody joins: a model ends when its other threads have.
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> std::io::Result<()> {
    #[cfg(not(cuvmm_shuttle))]
    return std::thread::Builder::new().name(name.to_owned()).spawn(work).map(drop);
    #[cfg(cuvmm_shuttle)]
    {
        let _ = name;
        drop(cuvmm_handles::sync::future::spawn(async { work() }));
        Ok(())
    }
}

/// Lets others go on for so long; in a model, where no time passes, before this thread does.
pub(crate) fn pause(time: Duration) {
    #[cfg(not(cuvmm_shuttle))]
    std::thread::sleep(time);
    #[cfg(cuvmm_shuttle)]
    {
        let _ = time;
        cuvmm_handles::sync::thread::yield_now();
    }
}

/// As [`pause`], with the lock given back, and until somebody tells that it is over, if that is sooner.
pub(crate) fn pause_unless<T>(over: &Condvar, guard: MutexGuard<'_, T>, time: Duration) {
    #[cfg(not(cuvmm_shuttle))]
    drop(over.wait_timeout(guard, time));
    #[cfg(cuvmm_shuttle)]
    if cuvmm_handles::sync::LASTING.get() {
        drop(over.wait(guard));
    } else {
        drop(guard);
        pause(time);
    }
}
