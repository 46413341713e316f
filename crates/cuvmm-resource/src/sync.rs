//! Shared ownership, locks and threads, as in cuvmm-handles: the standard library's, or those that a model checker
//! schedules.

use std::time::Duration;

#[cfg(cuvmm_shuttle)]
pub(crate) use cuvmm_handles::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, thread};
#[cfg(not(cuvmm_shuttle))]
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
#[cfg(not(cuvmm_shuttle))]
pub(crate) use std::thread;

/// Waits to be notified, no longer than that. In a model, where no time passes, others get their turn.
pub(crate) fn wait_for<'a, T>(
    condvar: &Condvar,
    _mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    time: Duration,
) -> MutexGuard<'a, T> {
    #[cfg(not(cuvmm_shuttle))]
    return condvar.wait_timeout(guard, time).unwrap_or_else(PoisonError::into_inner).0;
    #[cfg(cuvmm_shuttle)]
    {
        let _ = (condvar, time);
        drop(guard);
        thread::yield_now();
        _mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
