//! Shared ownership and locks, as in cuvmm-handles: the standard library's, or those that a model checker schedules.

#[cfg(cuvmm_shuttle)]
pub(crate) use cuvmm_handles::sync::{Arc, Mutex, MutexGuard, PoisonError};
#[cfg(not(cuvmm_shuttle))]
pub(crate) use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
