//! The driver calls of an operation, to make each of them fail.

use cuvmm::{CUresult, Call};

use crate::backend::Backend;

/// The calls that make or undo something, or give access to it: those that fail at random.
pub const FAILING: [Call; 9] = [
    Call::cuMemAddressReserve,
    Call::cuMemAddressFree,
    Call::cuMemCreate,
    Call::cuMemRelease,
    Call::cuMemMap,
    Call::cuMemUnmap,
    Call::cuMemSetAccess,
    Call::cuMemExportToShareableHandle,
    Call::cuMemImportFromShareableHandle,
];

/// What they fail with.
pub const FAILING_CODES: [CUresult; 4] =
    [CUresult::INVALID_VALUE, CUresult::OUT_OF_MEMORY, CUresult::NOT_SUPPORTED, CUresult::UNKNOWN];

/// One call of an operation: the `nth` of its name, from 1 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its name.
    pub call: Call,
    /// Which of that name.
    pub nth: usize,
}

/// The calls that reach the driver while `work` runs, in order, and what it returns.
pub fn steps<T>(backend: &Backend, work: impl FnOnce() -> T) -> (Vec<Step>, T) {
    let before = backend.ledger.total();
    let result = work();
    let calls: Vec<Call> = backend.ledger.log_since(before).iter().map(|made| made.call).collect();
    let nth = |index: usize| calls[..=index].iter().filter(|call| **call == calls[index]).count();
    (calls.iter().enumerate().map(|(index, &call)| Step { call, nth: nth(index) }).collect(), result)
}
