//! What calls a probe made, and what each answered: also those of a drop, which returns nothing.

use std::sync::{Arc, Mutex, PoisonError};

use cuvmm::driver::{Failure, Hook, Invocation};
use cuvmm::{CUresult, Call};

/// The calls made since they were last taken. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Trace {
    made: Arc<Mutex<Vec<Made>>>,
}

/// A call that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Made {
    pub(super) call: Call,
    pub(super) code: CUresult,
}

impl Trace {
    /// The calls since the last time, in order.
    pub(super) fn take(&self) -> Vec<Made> {
        std::mem::take(&mut *self.made.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Hook for Trace {
    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        // Asking for a code's words is no step of anything.
        if !matches!(invocation.call, Call::cuGetErrorName | Call::cuGetErrorString) {
            let made = Made { call: invocation.call, code: result };
            self.made.lock().unwrap_or_else(PoisonError::into_inner).push(made);
        }
        None
    }
}
